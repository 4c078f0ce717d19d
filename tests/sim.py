"""Simulated engines as real processes for tests."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from tests.ports import free_port
from tests.waiting import wait_until

TOKEN = "test-engine-token"
_REPOSITORY = Path(__file__).parents[1]
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0


class SimEngine:
    """A running `python -m server.sim_engine`. `stop` always ends the process; so does leaving the `with` block."""

    def __init__(self, process: subprocess.Popen[bytes], *, url: str, token: str, log: Path) -> None:
        self._process = process
        self._log = log
        self.url = url
        self.token = token
        self.pid = process.pid
        self.client = httpx.Client(base_url=url, timeout=30.0)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def log_text(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_status(self) -> int | None:
        return self._process.poll()

    def admin(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        """A development route, with the engine's token."""
        return self.client.request(method, path, headers={"x-intellect-engine-token": self.token}, **kwargs)

    def add_faults(self, *faults: Mapping[str, Any]) -> None:
        self.admin("POST", "/sim/faults", json=list(faults)).raise_for_status()

    def clear_faults(self) -> None:
        self.admin("DELETE", "/sim/faults").raise_for_status()

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series of /metrics, e.g. metric("vllm:num_requests_running").

        Raises:
            KeyError: there is no such series.
        """
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        for line in self.client.get("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(label in series for label in wanted):
                return float(value)
        raise KeyError(f"{name} {labels}")

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """The exit status of a process that is ending."""
        return self._process.wait(timeout_s)

    def print_log(self) -> None:
        print(f"--- log of the simulated engine at {self.url} ---\n{self.log_text}")

    def stop(self) -> None:
        """Ends the process: SIGTERM, then SIGKILL. May be called again."""
        self.client.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is not None:
                self.print_log()
        finally:
            self.stop()


def launch_sim_engine(
    *arguments: str, port: int | None = None, token: str = TOKEN, environ: Mapping[str, str] | None = None
) -> SimEngine:
    """Starts a simulated engine on 127.0.0.1 without waiting for it."""
    port = free_port() if port is None else port
    with tempfile.NamedTemporaryFile(prefix="sim-engine-", suffix=".log", delete=False) as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "server.sim_engine", "--host", "127.0.0.1", "--port", str(port), *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=_REPOSITORY,
            env={**os.environ, "INTELLECT_ENGINE_TOKEN": token, **(environ or {})},
        )
    return SimEngine(process, url=f"http://127.0.0.1:{port}", token=token, log=Path(log.name))


def await_sim_engine(engine: SimEngine, timeout_s: float = _START_TIMEOUT_S) -> SimEngine:
    """Waits until /health answers; a process that does not get there is ended and its log printed."""

    def is_healthy() -> bool:
        assert engine.is_alive, f"the simulated engine ended with status {engine.exit_status}"
        with contextlib.suppress(httpx.TransportError):
            return engine.client.get("/health").status_code == 200
        return False

    try:
        wait_until(is_healthy, timeout_s, f"the simulated engine at {engine.url}")
    except BaseException as error:
        engine.__exit__(type(error), error, error.__traceback__)
        raise
    return engine


def start_sim_engine(
    *arguments: str, port: int | None = None, token: str = TOKEN, environ: Mapping[str, str] | None = None
) -> SimEngine:
    """A simulated engine that answers: `with start_sim_engine(...) as engine:`. `arguments` are its command line.

    Without a `--time-scale` among them it runs ten times as fast as the real thing.
    """
    defaults = () if "--time-scale" in arguments else ("--time-scale", "0.1")
    return await_sim_engine(launch_sim_engine(*defaults, *arguments, port=port, token=token, environ=environ))
