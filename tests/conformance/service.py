"""What the conformance tests run against: a router with a key before simulated engines, and routers for scripted ones."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tests.router.process import RouterProcess
from tests.scripted_engine import ScriptedEngine, ScriptedRequest, json_answer, scripted_engine
from tests.sim import SimEngine
from tests.waiting import await_until, wait_until

MODEL = "org/sim"  # of two engines
THINKER = "thinker"  # of one engine, whose answers begin with reasoning
KEY = "sk-conformance"
ORIGIN = "https://app.example"
MODEL_LEN = 262_144  # tokens
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
JSON_HEADERS = {**AUTHORIZED, "content-type": "application/json"}
WITHOUT_TLS = False  # for `verify` of a client made for each test: reading the certificates of all authorities takes 50 ms
ENGINE_FLAGS = (
    *("--time-scale", "0.05", "--answer-tokens-mean", "24", "--max-model-len", str(MODEL_LEN)),
    # As vLLM's own server closes idle connections.
    *("--timeout-keep-alive", "5", "--enable-prompt-tokens-details"),
)


@dataclass(slots=True)
class Service:
    """`engines` serve MODEL, `thinker` serves THINKER. `http` is a client with the key, `admin` one of the admin port."""

    router: RouterProcess
    engines: tuple[SimEngine, SimEngine]
    thinker: SimEngine
    http: httpx.Client
    admin: httpx.Client
    has_faults: bool = False

    def in_flight(self) -> int:
        """Requests that the router has not settled yet."""
        return sum(replica["in_flight"] for replica in self.admin.get("/admin/replicas").json())

    def running(self) -> float:
        """Requests that the engines of MODEL work on."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return sum(engine.metric(name) for engine in self.engines for name in names)

    def fault_everywhere(self, **fault: object) -> None:
        """Arms a fault on both engines of MODEL; the fixture `service` disarms it after the test."""
        self.has_faults = True
        for engine in self.engines:
            engine.add_faults(fault)

    def clear_faults(self) -> None:
        if self.has_faults:
            self.has_faults = False
            for engine in self.engines:
                engine.clear_faults()

    def logged(self, request_id: str) -> dict[str, Any]:
        return logged(self.router, request_id)


def logged(router: RouterProcess, request_id: str) -> dict[str, Any]:
    """The access log's only line about a request; waits for it."""

    def lines() -> list[dict[str, Any]]:
        found = [line for line in router.log.splitlines() if request_id in line and line.startswith("{")]
        return [json.loads(line) for line in found]

    wait_until(lines, 3, f"the access log's line about {request_id}")
    (line,) = lines()
    return line


@asynccontextmanager
async def scripted_behind(router: RouterProcess) -> AsyncIterator[ScriptedEngine]:
    """A scripted engine as one more replica of the router. Afterwards every lease on it must be settled."""
    async with scripted_engine(_answer_empty) as engine, httpx.AsyncClient(base_url=router.admin, verify=WITHOUT_TLS) as admin:

        async def is_ready() -> bool:
            return {replica["health"] for replica in (await admin.get("/admin/replicas")).json()} == {"ready"}

        async def is_idle() -> bool:
            return all(replica["in_flight"] == 0 for replica in (await admin.get("/admin/replicas")).json())

        added = (await admin.post("/admin/replicas", json={"url": engine.url})).json()
        try:
            await await_until(is_ready, 5, "the scripted engine to be ready")
            yield engine
            await await_until(is_idle, 2, "every lease to be settled")
        finally:
            await admin.delete(f"/admin/replicas/{added['id']}")


async def _answer_empty(_: ScriptedRequest, writer: object) -> None:
    """A test that sets no script is about what reaches the engine."""
    assert hasattr(writer, "write")
    writer.write(json_answer({}))
