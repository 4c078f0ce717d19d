"""Telling an engine that hangs from one that is slow, idle or paused."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.state.progress import TIMER_SLACK, ProgressWatch

STALL_AFTER_S = 3.0


@dataclass
class Engine:
    """An engine that works until `hangs_at`, seen from outside: steps every `step_s`, and `step_bytes` come with each."""

    hangs_at: float = math.inf
    step_s: float = 0.02
    step_bytes: int = 200

    def steps(self, now: float) -> int:
        return int(min(now, self.hangs_at) / self.step_s)

    def bytes_received(self, now: float) -> int:
        return self.steps(now) * self.step_bytes


def stalled_at(engine: Engine, probes: list[float], in_flight: Callable[[float], int] = lambda now: 4) -> float | None:
    """Time of the first probe that finds it stalled. Metrics are read only when the watch asks for them."""
    watch = ProgressWatch(STALL_AFTER_S)
    for now in probes:
        count, bytes_received = in_flight(now), engine.bytes_received(now)
        asked = watch.needs_metrics(count, bytes_received, False)
        if watch.observe(
            now,
            in_flight=count,
            bytes_received=bytes_received,
            is_paused=False,
            iterations=float(engine.steps(now)) if asked else None,
            running=float(count) if asked else None,
        ):
            return now
    return None


def observe(watch: ProgressWatch, now: float, **changed: float | bool | None) -> bool:
    """One observation of an engine that does nothing with its requests, but for what is `changed`."""
    told = {"in_flight": 2, "bytes_received": 500, "is_paused": False, "iterations": 70.0, "running": 2.0, **changed}
    return watch.observe(now, **told)  # type: ignore[arg-type]


def hung() -> ProgressWatch:
    """Found stalled at 3 s."""
    watch = ProgressWatch(STALL_AFTER_S)
    assert [observe(watch, float(second)) for second in range(4)] == [False, False, False, True]
    return watch


@pytest.mark.parametrize("phase", [number / 50 for number in range(50)])
def test_an_engine_that_hangs_is_found_within_five_seconds(phase: float) -> None:
    """With a probe a second, requests leave a hung engine at most 5 s after it hung, whenever between two probes that was."""
    for hangs_after in range(50):
        hangs_at = 20.0 + hangs_after / 50
        found = stalled_at(Engine(hangs_at), [phase + second for second in range(40)])
        assert found is not None
        assert STALL_AFTER_S * (1.0 - TIMER_SLACK) <= found - hangs_at <= 5.0


@given(st.floats(20.0, 21.0), st.integers())
def test_probes_that_come_a_little_early_or_late_cost_no_further_second(hangs_at: float, seed: int) -> None:
    """Timers are never exact: 20 ms either way delay the finding by as much, not by a whole interval."""
    randomly = random.Random(seed)
    found = stalled_at(Engine(hangs_at), [second + randomly.uniform(-0.02, 0.02) for second in range(40)])
    assert found is not None
    assert found - hangs_at <= 5.0 + 0.04 + 0.02  # a step's width: the last bytes come that much before the hang


@pytest.mark.parametrize(("interval_s", "within_s"), [(0.05, 3.15), (0.5, 4.0), (2.0, 8.0), (10.0, 30.0), (60.0, 180.0)])
def test_other_intervals_find_it_after_two_probes_more_than_the_stall_takes(interval_s: float, within_s: float) -> None:
    """The bound for any --health-interval: up to one interval to notice the silence, one to read the counter, then the wait."""
    for phase in range(20):
        probes = [interval_s * (number + phase / 20) for number in range(1200)]
        hangs_at = interval_s * 3
        found = stalled_at(Engine(hangs_at), probes)
        assert found is not None
        assert found - hangs_at <= within_s


@pytest.mark.parametrize("interval_s", [0.05, 0.3, 0.7, 1.0, 1.25, 2.5, 3.0, 7.0])
@pytest.mark.parametrize("step_bytes", [0, 100])
def test_a_slow_engine_is_never_stalled(interval_s: float, step_bytes: int) -> None:
    """An engine that needs 2.5 s a step, on a long prefill without a byte too, keeps its requests."""
    for phase in range(25):
        engine = Engine(step_s=2.5, step_bytes=step_bytes)
        assert stalled_at(engine, [phase / 10 + interval_s * number for number in range(400)]) is None


@given(st.lists(st.integers(0, 3), min_size=20, max_size=60), st.floats(0.05, 2.0))
def test_an_idle_engine_is_never_stalled(in_flight: list[int], interval_s: float) -> None:
    """Requests that come and go on an engine that answers at once, or none at all, prove no hang."""
    engine = Engine(step_s=0.04)
    probes = [interval_s * number for number in range(len(in_flight))]
    assert stalled_at(engine, probes, lambda now: in_flight[round(now / interval_s)]) is None


@pytest.mark.parametrize(
    "sign_of_life",
    [
        {"bytes_received": 501},
        {"bytes_received": 0},  # counted anew
        {"bytes_received": 501, "iterations": None, "running": None},  # no scrape: bytes came
        {"iterations": 71.0},
        {"iterations": 71.0, "in_flight": 0},
        {"iterations": 71.0, "running": None},
        {"iterations": 3.0},  # the engine was restarted
        {"is_paused": True},
        {"is_paused": True, "iterations": None, "running": None},
        {"running": 0.0},
        {"running": 0.0, "in_flight": 0},
    ],
)
def test_any_sign_of_life_takes_it_back_and_starts_the_clock_again(sign_of_life: dict[str, float | bool | None]) -> None:
    """A replica whose engine goes on gets requests again at the next probe, and is not stalled before another 3 s."""
    watch = hung()
    assert not observe(watch, 5.0, **sign_of_life)
    later = {key: value for key, value in sign_of_life.items() if key in ("bytes_received", "iterations") and value is not None}
    assert [observe(watch, now, **later) for now in (6.0, 7.0, 7.8)] == [False] * 3
    assert observe(watch, 9.0, **later)

    fresh = ProgressWatch(STALL_AFTER_S)
    assert [observe(fresh, now) for now in (0.0, 1.0, 2.8)] == [False] * 3
    assert not observe(fresh, 4.0, **sign_of_life)
    assert [observe(fresh, now, **later) for now in (5.0, 6.0, 6.8)] == [False] * 3
    assert observe(fresh, 8.0, **later)


@pytest.mark.parametrize(
    "unknown",
    [
        {"iterations": None, "running": None},
        {"iterations": None},
        {"running": None},
        {"in_flight": 0, "iterations": None, "running": None},
        {"in_flight": 0},
    ],
)
def test_what_is_not_known_takes_nothing_back(unknown: dict[str, float | bool | None]) -> None:
    """A hung engine stays out after its requests were moved away, and when its metrics cannot be read for a while."""
    watch = hung()
    assert all(observe(watch, now, **unknown) for now in (5.0, 6.0, 60.0))
    assert watch.is_stalled
    assert observe(watch, 61.0)


@pytest.mark.parametrize("unknown", [{"iterations": None}, {"running": None}, {"iterations": None, "running": None}])
def test_an_engine_whose_metrics_cannot_be_read_is_not_stalled(unknown: dict[str, float | bool | None]) -> None:
    """Silence alone proves no hang: an engine without these metrics is left to the timeouts."""
    watch = ProgressWatch(STALL_AFTER_S)
    assert not any(observe(watch, float(second), **unknown) for second in range(100))


def test_a_scrape_that_failed_in_between_does_not_start_the_clock_again() -> None:
    """The counter before and after it is the same, so it stood still."""
    watch = ProgressWatch(STALL_AFTER_S)
    told = [observe(watch, float(second), iterations=None if second in (2, 3) else 70.0) for second in range(6)]
    assert told == [False, False, False, False, True, True]


@pytest.mark.parametrize(
    "innocent",
    [{"running": 0.0}, {"is_paused": True}, {"in_flight": 0}, {"in_flight": 0, "running": 0.0}],
)
def test_an_engine_with_nothing_to_do_is_not_stalled(innocent: dict[str, float | bool | None]) -> None:
    """Idle, paused, or with requests that only wait in its queue: its counter stands still for good reason."""
    watch = ProgressWatch(STALL_AFTER_S)
    assert not any(observe(watch, float(second), **innocent) for second in range(100))
    # And the time spent so does not count when requests run again.
    assert [observe(watch, now) for now in (100.0, 102.0, 102.8)] == [False] * 3


def test_the_clock_starts_again_when_there_was_no_request_in_between() -> None:
    """Two requests with a rest between them are not one long silence."""
    watch = ProgressWatch(STALL_AFTER_S)
    assert [observe(watch, now) for now in (0.0, 1.0, 2.0)] == [False] * 3
    assert not observe(watch, 2.5, in_flight=0, iterations=None, running=None)
    assert [observe(watch, now) for now in (3.0, 4.0, 5.0, 5.8)] == [False] * 4
    assert observe(watch, 6.0)

    watch = hung()
    assert not observe(watch, 5.0, in_flight=0, iterations=71.0)  # back, with only other routers' requests
    assert not any(observe(watch, now, iterations=71.0) for now in (6.0, 7.0, 8.0, 8.8))


@pytest.mark.parametrize(
    ("in_flight", "bytes_received", "is_paused", "needed"),
    [
        (1, 500, False, True),
        (1, 501, False, False),  # bytes came: alive, at no cost
        (1, 0, False, False),
        (0, 500, False, False),
        (0, 501, False, False),
        (1, 500, True, False),
    ],
)
def test_metrics_are_read_only_where_requests_wait_in_silence(
    in_flight: int, bytes_received: int, is_paused: bool, needed: bool
) -> None:
    """Engines that deliver, idle or are paused are not asked for 100 kB of metrics every second."""
    watch = ProgressWatch(STALL_AFTER_S)
    observe(watch, 0.0, bytes_received=500)
    assert watch.needs_metrics(in_flight, bytes_received, is_paused) is needed


def test_a_replica_that_never_sent_a_byte_is_asked_at_the_first_probe() -> None:
    """An engine that hung before its first request is found as fast as any."""
    assert ProgressWatch(STALL_AFTER_S).needs_metrics(1, 0, False)
    assert not ProgressWatch(STALL_AFTER_S).needs_metrics(1, 10, False)


def test_a_stalled_engine_is_asked_at_every_probe_until_it_goes_on() -> None:
    """It has no requests any more that could show by their bytes that it is back."""
    watch = hung()
    assert watch.needs_metrics(0, 500, False)
    assert not watch.needs_metrics(0, 500, True)
    observe(watch, 5.0, in_flight=0, iterations=71.0)
    assert not watch.needs_metrics(0, 500, False)


@pytest.mark.parametrize("jumped_to", [-1e9, 0.0])
def test_a_clock_that_was_set_back_does_not_hide_a_stall(jumped_to: float) -> None:
    """It is found as long after the jump as it would have been after its last step."""
    watch = ProgressWatch(STALL_AFTER_S)
    assert [observe(watch, now) for now in (100.0, 101.0, jumped_to, jumped_to + 2.0)] == [False] * 4
    assert observe(watch, jumped_to + 3.0)
    assert observe(watch, jumped_to - 1.0)  # nor does it take one back


@pytest.mark.parametrize("stall_after_s", [0.0, -1.0, math.nan])
def test_a_stall_time_that_makes_no_sense_is_refused(stall_after_s: float) -> None:
    """A wrong setting is named, with what it may be."""
    with pytest.raises(ValueError, match=r"stall_after_s is .*; it must be above 0 seconds"):
        ProgressWatch(stall_after_s)
