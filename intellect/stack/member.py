"""One process of the stack through its deaths and restarts, and what it last said about itself."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import httpx
import msgspec

from intellect.problem import EXIT_FAILURE
from intellect.stack.failure import tells_failure
from intellect.stack.plan import ProcessPlan
from intellect.stack.process import LeashedProcess
from protocol.status import ReplicaState, ReplicaStatus

_RESTART_DELAY_S_MAX = 30.0
# One that ran this long before it died starts again without delay.
_HEALTHY_S = 60.0
_PROBE_TIMEOUT_S = 2.0
_UNREACHABLE = "no answer yet"

T = TypeVar("T")


class Member:
    """State of one process: `waiting`, `starting`, then a replica's own states, or `ready` for the router."""

    def __init__(self, plan: ProcessPlan, report: Callable[[str], None]) -> None:
        self.plan = plan
        self.state = "waiting"
        self.reason: str | None = None  # why it is not ready
        self.failure: str | None = None  # the last reason that told of a failure; loading again does not hide it
        self.own_end: str | None = None  # the same of the process itself, not of an engine below it
        self.started_at: float | None = None
        self.ready_after_s: float | None = None  # seconds from its first start
        self.exits = 0  # times that it died by itself
        self.exit_status: int | None = None  # of the last death
        self.engine_restarts = 0
        self._report = report
        self._process: LeashedProcess | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def seconds(self) -> float:
        """Since its first start; what it took, once it was ready."""
        if self.ready_after_s is not None:
            return self.ready_after_s
        return 0.0 if self.started_at is None else time.monotonic() - self.started_at

    def launch(self) -> None:
        """Starts the process, and again whenever it dies, until stop()."""
        self.started_at = time.monotonic()
        self._keeper = asyncio.create_task(self._keep_running(), name=self.plan.name)

    async def stop(self, timeout_s: float) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        if self._process is not None and self._process.is_running:
            await self._process.stop(timeout_s)

    async def _keep_running(self) -> None:
        failures = 0
        while True:
            self.state, self.reason = "starting", None
            begun = time.monotonic()
            try:
                self._process = await LeashedProcess.start(self.plan)
                status = await self._process.wait()
                end = f"ended with status {status}"
            except OSError as error:  # no memory, no log folder: whatever it is, it may pass
                status, end = EXIT_FAILURE, f"could not be started ({error.strerror or error})"
            failures = 1 if time.monotonic() - begun > _HEALTHY_S else failures + 1
            delay = min(_RESTART_DELAY_S_MAX, 2.0 ** (failures - 1))
            self.exits, self.exit_status = self.exits + 1, status
            self.state = "starting"
            self.reason = self.failure = self.own_end = f"it {end}"
            self._report(f"{self.plan.name} {end}; starting it again in {delay:g} s")
            await asyncio.sleep(delay)

    async def probe_replica(self, http: httpx.AsyncClient) -> None:
        status = await _read(http, f"{self.plan.url}/status", ReplicaStatus)
        if status is None:
            self._lost()
            return
        self.engine_restarts = status.engine_restarts
        self._heard(status.state, status.reason)

    async def probe_router(self, http: httpx.AsyncClient, admin_token: str | None) -> int:
        """The number of replicas that the router sends requests to."""
        headers = {} if admin_token is None else {"authorization": f"Bearer {admin_token}"}
        replicas = await _read(http, f"{self.plan.url}/admin/replicas", list[_SeenReplica], headers)
        if replicas is None:
            self._lost()
            return 0
        self._heard("ready", None)
        return sum(replica.health == "ready" for replica in replicas)

    def _heard(self, state: str, reason: str | None) -> None:
        self.state, self.reason = state, reason
        if state == ReplicaState.FAILED or tells_failure(reason):
            self.failure = reason
        if state == ReplicaState.READY and self.ready_after_s is None:
            self.ready_after_s = self.seconds

    def _lost(self) -> None:
        if self.state not in ("waiting", "starting"):
            self.state, self.reason = "starting", _UNREACHABLE


class _SeenReplica(msgspec.Struct, frozen=True):
    id: str
    health: str


async def _read(http: httpx.AsyncClient, url: str, kind: type[T], headers: dict[str, str] | None = None) -> T | None:
    """A JSON answer, or None while there is none. A stranger on the port counts as none."""
    try:
        answer = await http.get(url, headers=headers, timeout=_PROBE_TIMEOUT_S)
        return msgspec.json.decode(answer.content, type=kind) if answer.status_code == 200 else None
    except (httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError):
        return None
