"""One real vLLM engine on the CPU with its agent, and a router before it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from router.edge.kv_endpoints import KvEndpoints
from tests.ports import free_port
from tests.router.process import ROOT, RouterProcess, start_router
from tests.waiting import wait_until

MODEL = "tiny-glm"
START_TIMEOUT_S = 300.0  # a cold machine compiles bytecode first


@dataclass
class RealStack:
    router: RouterProcess
    agent: str
    engine: str
    folder: Path  # with the variants of tests.real.tiny_glm
    store: Path
    kv_events: KvEndpoints

    @property
    def answers(self) -> dict[str, str]:
        answers: dict[str, str] = json.loads((self.folder / "answers.json").read_text())
        return answers

    def engine_metric(self, name: str) -> float:
        text = httpx.get(f"{self.engine}/metrics").text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name + "{"))

    def intellect(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "intellect", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)

    def swap(self, version: str) -> subprocess.CompletedProcess[str]:
        return self.intellect("checkpoint", "swap", version, "--model", MODEL, "--admin", self.router.admin, "--wait")

    def publish(self, variant: str, version: str) -> None:
        done = self.intellect(
            *("checkpoint", "publish", str(self.folder / variant), "--model", MODEL),
            *("--version", version, "--store", str(self.store)),
        )
        assert done.returncode == 0, done.stderr


@contextmanager
def start_real_stack(folder: Path) -> Iterator[RealStack]:
    subprocess.run([sys.executable, "-m", "tests.real.tiny_glm", str(folder)], cwd=ROOT, check=True, capture_output=True)
    store = folder / "store"
    port, admin_port, events_port, replay_port = (free_port() for _ in range(4))
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events_port}",
        "replay_endpoint": f"tcp://*:{replay_port}",
    }
    log_path = folder / "replica.log"
    command = [
        *(sys.executable, "-m", "intellect", "replica", "--preset", "cpu"),
        *("--model", str(folder / "first"), "--served-model-name", MODEL, "--store", str(store)),
        *("--port", str(port), "--admin-port", str(admin_port)),
        *("--", "--enable-expert-parallel", "--max-model-len", "2048", "--max-num-seqs", "32"),
        *("--kv-events-config", json.dumps(events)),
    ]
    with log_path.open("wb") as log:
        agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=dict(os.environ))
    try:
        agent_url = f"http://127.0.0.1:{admin_port}"
        wait_until(lambda: _is_ready(agent, agent_url, log_path), START_TIMEOUT_S, f"vLLM; see {log_path}")
        with start_router([agent_url], "--debug-headers") as router:
            kv_events = KvEndpoints(f"tcp://127.0.0.1:{events_port}", f"tcp://127.0.0.1:{replay_port}")
            yield RealStack(router, agent_url, f"http://127.0.0.1:{port}", folder, store, kv_events)
    finally:
        agent.send_signal(signal.SIGTERM)
        try:
            agent.wait(30)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


def _is_ready(agent: subprocess.Popen[bytes], url: str, log_path: Path) -> bool:
    if agent.poll() is not None:
        raise AssertionError(f"the agent ended with status {agent.returncode}:\n{log_path.read_text(errors='replace')[-4000:]}")
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False
