"""Starts the real router as its users do and ends it whatever happens."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.ports import free_port
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass
class RouterProcess:
    url: str
    admin: str
    process: subprocess.Popen[bytes]
    log_path: Path
    # Plain HTTP only: reading the machine's certificates for each request would take longer than what is tested.
    http: httpx.Client = field(default_factory=lambda: httpx.Client(verify=False, timeout=10))

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def terminate(self, timeout_s: float = 15.0) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the series of a metric that carry these labels."""
        text = self.http.get(f"{self.admin}/metrics").text
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] == name]
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in wanted))

    def in_flight(self) -> float:
        return self.metric("intellect_router_in_flight_requests") + self.metric("intellect_router_departing_requests")

    def wait_ready(self, replicas: int, timeout_s: float = 20.0) -> None:
        def ready() -> bool:
            listed = self.http.get(f"{self.admin}/admin/replicas").json()
            ready_now = [replica for replica in listed if replica["health"] == "ready"]
            return len(ready_now) >= replicas

        wait_until(ready, timeout_s, f"{replicas} ready replicas")


@contextmanager
def start_router(
    replicas: Sequence[str] = (), *flags: str, env: dict[str, str] | None = None, wait: bool = True
) -> Iterator[RouterProcess]:
    port, admin_port = free_port(), free_port()
    command = [sys.executable, "-m", "intellect", "router", "--port", str(port), "--admin-port", str(admin_port)]
    command += ["--health-interval", "0.2", *flags]
    for replica in replicas:
        command += ["--replica", replica]
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder) / "router.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env={**os.environ, **(env or {})}
            )
        router = RouterProcess(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}", process, log_path)
        try:
            wait_until(lambda: _answers(router), 20, f"router to listen; its log:\n{router.log}")
            if wait and replicas:
                router.wait_ready(len(replicas))
            yield router
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(10)
            router.http.close()


def _answers(router: RouterProcess) -> bool:
    if router.process.poll() is not None:
        raise AssertionError(f"the router ended with status {router.process.returncode}:\n{router.log}")
    try:
        return router.http.get(f"{router.url}/health").status_code == 200
    except httpx.TransportError:
        return False
