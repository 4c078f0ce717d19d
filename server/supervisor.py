"""Keeps one engine running: starts it, waits until it answers, restarts it with back-off, gives up with a reason.

What to do after an exit is decided by `on_exit`, whether a silence is a hang by `is_hang`; both are pure. The supervisor
does not know HTTP, checkpoints or vLLM: it is handed a function that plans the next start and one that asks whether the
engine answers.
"""

import asyncio
import enum
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass

from server.engine_process import EngineProcess
from server.presets import LaunchPlan
from server.settings import RestartPolicy

PROBE_TIMEOUT_S = 3.0
PROBE_INTERVAL_S = 0.25  # while it loads
WATCH_INTERVAL_S = 5.0  # while it runs
# One question may have failed because the agent itself stood still.
_HANG_PROBES_MIN = 2
_REASON_LINES = 12

logger = logging.getLogger(__name__)


class EnginePhase(enum.StrEnum):
    STARTING = "starting"  # loading, or waiting to be started again
    RUNNING = "running"
    FAILED = "failed"  # given up; only a new agent starts it again
    STOPPED = "stopped"


class LaunchRefused(Exception):
    """The engine must not be started, and waiting would not help; the message says why."""


@dataclass(frozen=True, slots=True)
class FailureCount:
    """Failures in a row, and since when (monotonic seconds) the present run has been answering."""

    failures: int = 0
    healthy_since: float | None = None


@dataclass(frozen=True, slots=True)
class Restart:
    delay_s: float
    count: FailureCount


@dataclass(frozen=True, slots=True)
class GiveUp:
    failures: int


def on_exit(count: FailureCount, *, now: float, policy: RestartPolicy, rng: random.Random) -> Restart | GiveUp:
    """Delays double from `first_delay_s` up to `delay_s_max`, each shortened by a random share of at most `jitter`."""
    was_healthy = count.healthy_since is not None and now - count.healthy_since >= policy.healthy_s
    failures = 1 if was_healthy else count.failures + 1
    if failures >= policy.failures_max:
        return GiveUp(failures)
    delay_s = min(policy.first_delay_s * 2 ** (failures - 1), policy.delay_s_max)
    return Restart(delay_s * (1 - policy.jitter * rng.random()), FailureCount(failures))


@dataclass(frozen=True, slots=True)
class Silence:
    """Probes of a running engine that failed in a row; the first one began at `since` (monotonic seconds)."""

    since: float
    probes: int


def is_hang(silence: Silence, *, now: float, policy: RestartPolicy) -> bool:
    return silence.probes >= _HANG_PROBES_MIN and now - silence.since >= policy.hang_s


class _Event(enum.Enum):
    STOP = enum.auto()
    RESTART = enum.auto()
    EXIT = enum.auto()
    READY = enum.auto()
    HANG = enum.auto()


@dataclass(frozen=True, slots=True)
class _RunEnd:
    count: FailureCount
    why: str  # for people
    failed: bool = True  # and not ended because somebody asked


class Supervisor:
    """`run` is the life of the engine; everything else may be called while it runs.

    `make_plan` is asked before every start and may raise LaunchRefused. `probe` says whether the engine answers within
    the given seconds; it must not raise. `may_be_silent` says whether a running engine need not answer at present.
    `on_ready` is awaited before the phase becomes RUNNING.
    """

    def __init__(
        self,
        *,
        make_plan: Callable[[], Awaitable[LaunchPlan]],
        probe: Callable[[float], Awaitable[bool]],
        may_be_silent: Callable[[], bool],
        on_ready: Callable[[], Awaitable[None]],
        policy: RestartPolicy,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._make_plan = make_plan
        self._probe = probe
        self._may_be_silent = may_be_silent
        self._on_ready = on_ready
        self._policy = policy
        self._clock = clock
        self._rng = rng
        self._phase = EnginePhase.STARTING
        self._reason: str | None = "the engine has not been started yet"
        self._starts = 0
        self._process: EngineProcess | None = None
        self._pid: int | None = None
        self._stopping = asyncio.Event()
        self._restart_wanted = asyncio.Event()

    @property
    def phase(self) -> EnginePhase:
        return self._phase

    @property
    def reason(self) -> str | None:
        """Why the phase is not RUNNING, for people."""
        return self._reason

    @property
    def starts(self) -> int:
        """Number of the present run, from 1; also tells one run from the next."""
        return self._starts

    @property
    def restarts(self) -> int:
        return max(0, self._starts - 1)

    @property
    def pid(self) -> int | None:
        return self._pid

    def restart(self, run: int, reason: str) -> None:
        """Ends the engine and starts it again, if it is still in the run of this number (see `starts`)."""
        if run == self._starts and self._process is not None:
            logger.warning("restarting the engine: %s", reason)
            self._enter(EnginePhase.STARTING, reason)
            self._restart_wanted.set()

    def stop(self) -> None:
        """Makes `run` end the engine and return."""
        self._stopping.set()

    async def run(self) -> None:
        """Returns after `stop`, with the engine gone; cancelling it ends the engine too."""
        count = FailureCount()
        while not self._stopping.is_set():
            try:
                plan = await self._make_plan()
            except LaunchRefused as refusal:
                self._give_up(str(refusal))
                break
            end = await self._run_once(plan, count)
            if self._stopping.is_set():
                break
            if not end.failed:
                continue
            match on_exit(end.count, now=self._clock(), policy=self._policy, rng=self._rng):
                case GiveUp(failures):
                    self._give_up(f"the engine failed {failures} times in a row. {end.why}")
                    break
                case Restart(delay_s, count):
                    self._enter(EnginePhase.STARTING, f"the engine is started again in {delay_s:.1f} s. {end.why}")
                    logger.warning("the engine is started again in %.1f s. %s", delay_s, end.why)
                    await _first_of({_Event.STOP: self._stopping.wait()}, timeout_s=delay_s)
        await self._stopping.wait()
        if self._phase is not EnginePhase.FAILED:
            self._enter(EnginePhase.STOPPED, "the agent is stopping")

    async def _run_once(self, plan: LaunchPlan, count: FailureCount) -> _RunEnd:
        """One process from start to end."""
        self._starts += 1
        self._restart_wanted.clear()
        self._enter(EnginePhase.STARTING, "the engine is loading")
        try:
            process = self._process = await EngineProcess.start(plan)
        except OSError as error:
            return _RunEnd(count, f"The process could not be started: {error}.")
        stop_timeout_s = plan.stop_timeout_s
        try:
            event = await _first_of(
                {
                    _Event.STOP: self._stopping.wait(),
                    _Event.RESTART: self._restart_wanted.wait(),
                    _Event.EXIT: process.wait(),
                    _Event.READY: self._until_ready(),
                },
                timeout_s=plan.start_timeout_s,
            )
            if event is _Event.READY:
                count = FailureCount(count.failures, healthy_since=self._clock())
                self._pid = process.pid()
                self._enter(EnginePhase.RUNNING, None)
                logger.info("the engine is ready, pid %s", self._pid)
                event = await _first_of(
                    {
                        _Event.STOP: self._stopping.wait(),
                        _Event.RESTART: self._restart_wanted.wait(),
                        _Event.EXIT: process.wait(),
                        _Event.HANG: self._until_hang(),
                    }
                )
            if event is _Event.STOP:
                return _RunEnd(count, "The agent is stopping.", failed=False)
            # From here on the engine is gone or hangs, so it gets no time to finish.
            stop_timeout_s = 0.0
            if event is _Event.RESTART:
                return _RunEnd(count, "A restart was asked for.", failed=False)
            if event is _Event.EXIT:
                return _RunEnd(count, f"It exited with code {await process.wait()}. {_quote(process)}")
            if event is _Event.HANG:
                return _RunEnd(count, f"It ran but did not answer for {self._policy.hang_s:g} s. {_quote(process)}")
            return _RunEnd(count, f"It did not answer within {plan.start_timeout_s:g} s. {_quote(process)}")
        finally:
            self._process = None
            self._pid = None
            self._enter(EnginePhase.STARTING, "the engine is being stopped")
            await process.stop(stop_timeout_s)

    async def _until_ready(self) -> None:
        while True:
            if await self._probe(PROBE_TIMEOUT_S):
                await self._on_ready()
                return
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def _until_hang(self) -> None:
        silence: Silence | None = None
        while silence is None or not is_hang(silence, now=self._clock(), policy=self._policy):
            await asyncio.sleep(min(WATCH_INTERVAL_S, self._policy.hang_s / 3))
            began = self._clock()
            if await self._probe(self._policy.hang_s / 3) or self._may_be_silent():
                silence = None
            elif silence is None:
                silence = Silence(began, 1)
            else:
                silence = Silence(silence.since, silence.probes + 1)

    def _give_up(self, reason: str) -> None:
        logger.error("giving up: %s", reason)
        self._enter(EnginePhase.FAILED, reason)

    def _enter(self, phase: EnginePhase, reason: str | None) -> None:
        self._phase = phase
        self._reason = reason


def _quote(process: EngineProcess) -> str:
    lines = process.last_lines(_REASON_LINES)
    return "Its last lines were:\n" + "\n".join(lines) if lines else "It wrote nothing."


async def _first_of(
    waits: Mapping[_Event, Coroutine[object, object, object]], *, timeout_s: float | None = None
) -> _Event | None:
    """The event whose wait ended first (of several, the one listed first), or None after the timeout. Ends the others."""
    tasks = {event: asyncio.create_task(wait, name=event.name) for event, wait in waits.items()}
    try:
        await asyncio.wait(tasks.values(), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        ended = next((event for event, task in tasks.items() if task.done()), None)
    finally:
        for task in tasks.values():
            task.cancel()
        results = await asyncio.gather(*tasks.values(), return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return ended
