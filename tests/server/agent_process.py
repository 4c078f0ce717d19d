"""A replica agent over a simulated engine, as a real process for tests."""

import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec
import psutil

from protocol.status import ReplicaState, ReplicaStatus
from tests.ports import free_port
from tests.waiting import wait_until

_RUN = """
import asyncio, logging, sys
from pathlib import Path
from server.agent import run_agent
from server.settings import *
logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
sys.exit(asyncio.run(run_agent(AgentSettings({arguments}))))
"""
_REPOSITORY = Path(__file__).parents[2]


class AgentProcess:
    """Leaving the `with` block ends it, by force if need be, and shows its log if the test failed.

    Keyword arguments are AgentSettings' own; the engine is the simulated one unless they say otherwise.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = {
            "served_model_name": "sim",
            "preset": "sim",
            "port": free_port(),
            "admin_port": free_port(),
            **settings,
        }
        with tempfile.NamedTemporaryFile(prefix="agent-", suffix=".log", delete=False) as log:
            self._log = Path(log.name)
            code = _RUN.format(arguments=", ".join(f"{name}={value!r}" for name, value in self.settings.items()))
            code = code.replace("PosixPath(", "Path(")
            self.process = subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=subprocess.STDOUT, cwd=_REPOSITORY)
        host = self.settings.get("host", "127.0.0.1").replace("0.0.0.0", "127.0.0.1")
        token = self.settings.get("token")
        self.admin = httpx.Client(
            base_url=f"http://{host}:{self.settings['admin_port']}",
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=30,
        )
        self.engine = httpx.Client(base_url=f"http://{host}:{self.settings['port']}", timeout=30)

    @property
    def log_text(self) -> str:
        return self._log.read_text(errors="replace")

    def status(self) -> ReplicaStatus:
        return msgspec.json.decode(self.admin.get("/status").content, type=ReplicaStatus)

    def is_in(self, state: ReplicaState) -> bool:
        assert self.process.poll() is None, f"the agent ended with code {self.process.returncode}:\n{self.log_text}"
        try:
            return self.status().state is state
        except httpx.TransportError:
            return False

    def reach(self, state: ReplicaState, timeout_s: float = 30) -> ReplicaStatus:
        wait_until(lambda: self.is_in(state), timeout_s, f"the state {state}")
        return self.status()

    def swap(self, version: str) -> httpx.Response:
        return self.admin.post("/checkpoint", json={"version": version})

    def answer(self) -> tuple[str, str]:
        """The engine's answer to a fixed prompt, and the checkpoint that the response names."""
        body = {"model": "sim", "prompt": "a fixed prompt", "max_tokens": 8, "temperature": 0}
        response = self.engine.post("/v1/completions", json=body).raise_for_status()
        return response.json()["choices"][0]["text"], response.headers["x-intellect-checkpoint"]

    def metric(self, series: str) -> float:
        """The value of one series as it is spelled in /metrics."""
        for line in self.admin.get("/metrics").text.splitlines():
            name, _, value = line.rpartition(" ")
            if name == series:
                return float(value)
        raise KeyError(series)

    def family(self) -> list[psutil.Process]:
        """The agent and everything below it."""
        agent = psutil.Process(self.process.pid)
        return [agent, *agent.children(recursive=True)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.admin.close()
        self.engine.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if error is not None:
            print(f"--- log of the agent ---\n{self.log_text}")
        self._log.unlink()
