"""Supervision: back-off as arithmetic, and real processes that crash, hang and come back."""

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.presets import LaunchPlan
from server.settings import RestartPolicy
from server.supervisor import EnginePhase, FailureCount, GiveUp, LaunchRefused, Restart, Silence, Supervisor, is_hang, on_exit
from tests.waiting import await_until

POLICY = RestartPolicy(first_delay_s=1, delay_s_max=10, jitter=0.0, healthy_s=60, failures_max=8)


@pytest.mark.parametrize(
    ("failures", "healthy_since", "outcome"),
    [
        (0, None, Restart(1.0, FailureCount(1))),
        (1, None, Restart(2.0, FailureCount(2))),
        (2, None, Restart(4.0, FailureCount(3))),
        (3, None, Restart(8.0, FailureCount(4))),
        (4, None, Restart(10.0, FailureCount(5))),  # 16, capped
        (6, None, Restart(10.0, FailureCount(7))),
        (7, None, GiveUp(8)),
        # It ended at 1000 s.
        (7, 941.0, GiveUp(8)),  # 59 s of answering are too short to forget
        (7, 940.0, Restart(1.0, FailureCount(1))),  # 60 s are enough
        (0, 999.9, Restart(1.0, FailureCount(1))),
    ],
)
def test_delays_double_up_to_a_cap_and_start_over_after_a_healthy_time(
    failures: int, healthy_since: float | None, outcome: Restart | GiveUp
) -> None:
    """The eighth quick failure in a row is the last."""
    count = FailureCount(failures, healthy_since)
    assert on_exit(count, now=1000.0, policy=POLICY, rng=random.Random(1)) == outcome


@given(st.integers(0, 6), st.floats(0, 1), st.integers())
def test_jitter_only_shortens(failures: int, jitter: float, seed: int) -> None:
    """Agents that lost their engines together come back at different times, none later than the back-off says."""
    policy = RestartPolicy(first_delay_s=1, delay_s_max=10, jitter=jitter, failures_max=8)
    outcome = on_exit(FailureCount(failures), now=0, policy=policy, rng=random.Random(seed))
    assert isinstance(outcome, Restart)
    full = min(2.0**failures, 10.0)
    assert full * (1 - jitter) - 1e-9 <= outcome.delay_s <= full


@pytest.mark.parametrize(
    ("since", "probes", "hangs"),
    [
        (940.0, 2, True),  # 60 s
        (940.1, 9, False),
        (100.0, 1, False),  # the agent itself stood still while it asked
    ],
)
def test_an_engine_hangs_when_it_was_silent_long_enough(since: float, probes: int, hangs: bool) -> None:
    """Both count: the time, and that it was asked more than once."""
    assert is_hang(Silence(since, probes), now=1000.0, policy=RestartPolicy(hang_s=60)) is hangs


# --- real processes. Each engine writes its pid into a file once it "answers", and lives until it is told otherwise.

UP = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); print('up', flush=True); time.sleep(1000)"
CRASH = "print('no memory'); raise SystemExit(3)"
HANG = "import time; print('loading', flush=True); time.sleep(1000)"
QUICK = RestartPolicy(first_delay_s=0.05, delay_s_max=0.1, jitter=0.0, failures_max=3)


class Bench:
    """A supervisor over engines that run the given codes in turn, the last one again and again."""

    def __init__(self, folder: Path, *codes: str, start_timeout_s: float = 20.0, policy: RestartPolicy = QUICK) -> None:
        self.marker = folder / "marker"
        self.codes = list(codes)
        self.planned = 0
        self.ready = 0
        self.start_timeout_s = start_timeout_s
        self.is_mute = False
        self.is_swapping = False
        self.probes_while_mute = 0
        self.supervisor = Supervisor(
            make_plan=self.plan,
            probe=self.probe,
            may_be_silent=lambda: self.is_swapping,
            on_ready=self.on_ready,
            policy=policy,
            clock=time.monotonic,
            rng=random.Random(1),
        )

    async def plan(self) -> LaunchPlan:
        code = self.codes[min(self.planned, len(self.codes) - 1)]
        self.planned += 1
        self.marker.unlink(missing_ok=True)
        if code == "refuse":
            raise LaunchRefused("v2 is gone from the store")
        return LaunchPlan(
            argv=(sys.executable, "-c", code, str(self.marker)),
            env={},
            start_timeout_s=self.start_timeout_s,
            stop_timeout_s=5.0,
        )

    async def probe(self, timeout_s: float) -> bool:
        if self.is_mute:
            self.probes_while_mute += 1
            return False
        return self.marker.exists() and self.marker.read_text() != ""

    async def on_ready(self) -> None:
        self.ready += 1

    def phase(self) -> EnginePhase:
        return self.supervisor.phase

    async def reach(self, phase: EnginePhase) -> None:
        await await_until(lambda: self.supervisor.phase is phase, 20, f"the phase {phase}")

    async def reach_run(self, run: int) -> None:
        await await_until(
            lambda: self.ready == run and self.supervisor.phase is EnginePhase.RUNNING, 20, f"run {run} to answer"
        )

    def kill_engine(self) -> int:
        pid = self.supervisor.pid
        assert pid is not None
        psutil.Process(pid).kill()
        return pid


MakeBench = Callable[..., Awaitable[Bench]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[MakeBench]:
    running: list[tuple[Bench, asyncio.Task[None]]] = []

    async def make(*codes: str, start_timeout_s: float = 20.0, policy: RestartPolicy = QUICK) -> Bench:
        bench = Bench(tmp_path, *codes, start_timeout_s=start_timeout_s, policy=policy)
        running.append((bench, asyncio.create_task(bench.supervisor.run())))
        return bench

    yield make
    for bench, task in running:
        bench.supervisor.stop()
        await asyncio.wait_for(task, 20)
        assert bench.supervisor.pid is None


async def test_a_crashed_engine_is_started_again(start: MakeBench) -> None:
    """After kill -9 a new process runs, and the count of restarts shows it."""
    bench = await start(UP)
    await bench.reach_run(1)
    assert bench.supervisor.reason is None
    first = bench.kill_engine()
    await bench.reach_run(2)
    assert bench.supervisor.pid not in (None, first)
    assert bench.supervisor.restarts == 1


async def test_an_engine_that_cannot_start_is_given_up_with_its_last_words(start: MakeBench) -> None:
    """After three quick failures the reason holds the exit code and what the engine wrote."""
    bench = await start(CRASH)
    await bench.reach(EnginePhase.FAILED)
    assert bench.planned == 3
    assert bench.supervisor.reason is not None
    assert "failed 3 times in a row" in bench.supervisor.reason
    assert "exited with code 3" in bench.supervisor.reason
    assert "no memory" in bench.supervisor.reason


async def test_an_engine_that_hangs_at_start_is_ended_and_started_again(start: MakeBench) -> None:
    """Loading has a deadline."""
    bench = await start(HANG, UP, start_timeout_s=2.0)
    await await_until(lambda: "did not answer within 2 s" in (bench.supervisor.reason or ""), 20, "the deadline")
    assert "loading" in (bench.supervisor.reason or "")
    await bench.reach(EnginePhase.RUNNING)


HANGS_SOON = RestartPolicy(first_delay_s=0.05, jitter=0.0, failures_max=3, hang_s=0.3)


async def test_an_engine_that_hangs_while_it_runs_is_ended_and_started_again(start: MakeBench) -> None:
    """A process that lives but does not answer serves nobody; until it is given up, the phase stays RUNNING."""
    bench = await start(UP, policy=HANGS_SOON)
    await bench.reach_run(1)
    first = bench.supervisor.pid
    bench.is_mute = True
    await await_until(lambda: bench.probes_while_mute > 0, 20, "a question without an answer")
    assert bench.phase() is EnginePhase.RUNNING
    await await_until(lambda: "did not answer for 0.3 s" in (bench.supervisor.reason or ""), 20, "the end of the patience")
    bench.is_mute = False
    await bench.reach_run(2)
    assert bench.supervisor.pid not in (None, first)


async def test_an_engine_may_be_silent_while_it_swaps(start: MakeBench) -> None:
    """Loading weights can keep it from answering for longer."""
    bench = await start(UP, policy=HANGS_SOON)
    await bench.reach_run(1)
    bench.is_swapping = bench.is_mute = True
    await await_until(lambda: bench.probes_while_mute >= 10, 20, "ten questions without an answer")
    assert bench.phase() is EnginePhase.RUNNING
    bench.is_swapping = bench.is_mute = False
    await await_until(lambda: bench.supervisor.starts == 1 and bench.phase() is EnginePhase.RUNNING, 1, "the same run")


async def test_waiting_for_the_next_start_ends_when_the_agent_stops(start: MakeBench) -> None:
    """A long back-off does not delay the end; the fixture stops the supervisor in the middle of it."""
    bench = await start(CRASH, policy=RestartPolicy(first_delay_s=1000, delay_s_max=1000))
    await await_until(lambda: "started again in" in (bench.supervisor.reason or ""), 20, "the back-off")


async def test_a_refused_launch_is_not_tried_again(start: MakeBench) -> None:
    """If what was served cannot be loaded again, nothing is served, and the reason says so."""
    bench = await start(UP, "refuse")
    await bench.reach(EnginePhase.RUNNING)
    bench.kill_engine()
    await bench.reach(EnginePhase.FAILED)
    assert bench.supervisor.reason == "v2 is gone from the store"


async def test_a_restart_on_request_is_no_failure(start: MakeBench) -> None:
    """It happens at once and as often as needed; a request that is about an earlier run does nothing."""
    bench = await start(UP)
    for run in range(1, 6):
        await bench.reach_run(run)
        assert bench.supervisor.starts == run
        bench.supervisor.restart(run - 1, "about an earlier run")
        assert bench.phase() is EnginePhase.RUNNING
        bench.supervisor.restart(run, "the weights are unknown")
        assert bench.phase() is EnginePhase.STARTING
    await bench.reach_run(6)


@asynccontextmanager
async def cancelled(task: asyncio.Task[None]) -> AsyncIterator[None]:
    yield
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelling_the_supervisor_ends_the_engine(tmp_path: Path) -> None:
    """Whatever ends the agent's tasks, no engine stays behind."""
    bench = Bench(tmp_path, UP)
    async with cancelled(asyncio.create_task(bench.supervisor.run())):
        await bench.reach(EnginePhase.RUNNING)
        pid = bench.supervisor.pid
    assert pid is not None
    assert not psutil.pid_exists(pid)
