"""The processes of a soak: the router and the simulated engines, held by the leash, killed and started anew."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Self

import httpx
import psutil

from intellect.problem import Problem
from intellect.stack.process import last_lines
from loadtests.overhead.processes import free_ports
from loadtests.soak.requests import EMBEDDING_MODEL, MODEL
from protocol.headers import ENGINE_TOKEN
from server import leash
from server.guard import TOKEN_VARIABLE

HOST = "127.0.0.1"
TOKEN = "soak"
# What is freed goes back to the system at once, so that resident memory shows what is held and not the largest answers met.
_TIGHT_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 2.0
_STOP_S = 20.0
_READY_S = 60.0
_POLL_S = 0.1
_LOG_LINES = 5


class Process:
    """A command under the leash: it cannot outlive us, whatever happens."""

    def __init__(self, name: str, leashed: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self._leashed = leashed
        self._log = log

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        output: Path | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> Self:
        """`log` takes its standard error, and its standard output too without `output`."""
        holder = (sys.executable, "-I", "-S", leash.__file__, "--grace-s", str(_GRACE_S), "--")
        with log.open("ab") as errors, (output or log).open("ab") as written:
            leashed = await asyncio.create_subprocess_exec(
                *holder,
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=written,
                stderr=errors,
                cwd=_ROOT,
                env={**os.environ, TOKEN_VARIABLE: TOKEN, **variables},
            )
        return cls(name, leashed, log)

    @property
    def is_running(self) -> bool:
        return self._leashed.returncode is None

    @property
    def log_tail(self) -> str:
        return " | ".join(last_lines(self._log, _LOG_LINES)) or "nothing in its log"

    def held(self) -> psutil.Process:
        """The command itself, below the leash. Raises Problem if it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            return psutil.Process(self._leashed.pid).children(recursive=True)[-1]
        raise Problem(f"{self.name} has ended: {self.log_tail}")

    def signal(self, number: signal.Signals) -> None:
        """To the command alone; one that has ended gets none."""
        with contextlib.suppress(Problem, psutil.NoSuchProcess):
            self.held().send_signal(number)

    async def wait(self) -> int:
        return await self._leashed.wait()

    async def stop(self) -> None:
        assert self._leashed.stdin is not None
        self._leashed.stdin.close()  # the leash ends the command, and by force what does not end
        try:
            async with asyncio.timeout(_STOP_S):
                await self._leashed.wait()
        except TimeoutError:
            self._leashed.kill()
            await self._leashed.wait()


class Engine:
    """A simulated engine on a port of its own, over all its lives."""

    def __init__(self, name: str, port: int, folder: Path, arguments: Sequence[str]) -> None:
        self.name = name
        self.url = f"http://{HOST}:{port}"
        self.id = f"{HOST}:{port}"  # the router's name for it
        self._command = [sys.executable, "-m", "server.sim_engine", "--host", HOST, "--port", str(port), *arguments]
        self._log = folder / f"{name}.log"
        self._process: Process | None = None
        self._client = httpx.AsyncClient(base_url=self.url, timeout=10.0, headers={ENGINE_TOKEN.decode(): TOKEN})

    @property
    def process(self) -> Process:
        assert self._process is not None
        return self._process

    async def start(self, *arguments: str) -> None:
        self._process = await Process.start(self.name, [*self._command, *arguments], log=self._log)

    async def wait_ready(self) -> None:
        """Raises Problem."""
        await wait_answering(self.process, self._client, "/health")

    async def admin(self, method: str, path: str, json: object = None) -> bool:
        """A development route; whether the engine did what was asked."""
        try:
            return (await self._client.request(method, path, json=json)).is_success
        except httpx.HTTPError:
            return False

    async def ask(self, path: str, body: bytes, method: str) -> httpx.Response:
        return await self._client.request(method, path, content=body, headers={"content-type": "application/json"})

    async def busy(self) -> float:
        """Requests that it runs or queues. Raises httpx.HTTPError."""
        return sum_of((await self._client.get("/metrics")).text, "vllm:num_requests_running", "vllm:num_requests_waiting")

    async def close(self) -> None:
        await self._client.aclose()
        if self._process is not None:
            await self._process.stop()


class Router:
    def __init__(self, process: Process, port: int, admin_port: int, *, access_log: Path, error_log: Path) -> None:
        self.process = process
        self.port = port
        self.access_log = access_log
        self.error_log = error_log
        self.held = process.held()
        self.client = httpx.AsyncClient(base_url=f"http://{HOST}:{admin_port}", timeout=10.0)

    @classmethod
    async def start(cls, folder: Path, engines: Sequence[Engine], settings: str) -> Self:
        """`settings` is the configuration file. Returns when every engine is ready. Raises Problem."""
        configuration = folder / "router.toml"
        configuration.write_text(settings)
        port, admin_port = free_ports(2)
        command = [sys.executable, "-m", "intellect", "router", "--config", str(configuration), "--port", str(port)]
        command += ["--admin-port", str(admin_port), *(f"--replica={engine.url}" for engine in engines)]
        access_log, error_log = folder / "access.log", folder / "router.log"
        process = await Process.start("router", command, log=error_log, output=access_log, variables=_TIGHT_MEMORY)
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{admin_port}", timeout=10.0) as client:
            await wait_answering(process, client, "/health")
        router = cls(process, port, admin_port, access_log=access_log, error_log=error_log)
        await router.wait_ready(len(engines))
        return router

    async def wait_ready(self, count: int) -> None:
        """Raises Problem unless `count` replicas become ready."""
        deadline = time.monotonic() + _READY_S
        while (ready := sum(replica["health"] == "ready" for replica in await self.replicas())) < count:
            if time.monotonic() > deadline:
                raise Problem(f"only {ready} of {count} replicas are ready after {_READY_S:g} s: {self.process.log_tail}")
            await asyncio.sleep(_POLL_S)

    async def replicas(self) -> list[dict[str, object]]:
        listed: list[dict[str, object]] = (await self.client.get("/admin/replicas")).raise_for_status().json()
        return listed

    async def metrics(self) -> str:
        return (await self.client.get("/metrics")).raise_for_status().text

    async def close(self) -> None:
        await self.client.aclose()
        await self.process.stop()


def engine_arguments(*, time_scale: float, is_embedding: bool = False) -> list[str]:
    name = EMBEDDING_MODEL if is_embedding else MODEL
    kind = ["--runner", "pooling"] if is_embedding else ["--reasoning-parser", "any", "--enable-prompt-tokens-details"]
    # Below uvicorn's default, as a bare vLLM has it: idle connections close under the router's hands.
    return ["--served-model-name", name, "--time-scale", str(time_scale), "--timeout-keep-alive", "5", *kind]


async def wait_answering(process: Process, client: httpx.AsyncClient, path: str) -> None:
    """Returns when GET `path` is answered with success. Raises Problem."""
    deadline = time.monotonic() + _READY_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if (await client.get(path)).is_success:
                return
        if not process.is_running:
            raise Problem(f"{process.name} ended at its start: {process.log_tail}")
        if time.monotonic() > deadline:
            raise Problem(f"{process.name} does not answer after {_READY_S:g} s: {process.log_tail}")
        await asyncio.sleep(_POLL_S)


def sum_of(exposition: str, *names: str) -> float:
    """Of all series of these metrics."""
    lines = (line for line in exposition.splitlines() if line.partition(" ")[0].partition("{")[0] in names)
    return sum(float(line.rpartition(" ")[2]) for line in lines)
