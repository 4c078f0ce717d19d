"""Counting what happened of late."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.windowed_count import WindowedCount

WINDOW_S = 10


@pytest.mark.parametrize(
    ("added_at", "now", "counted"),
    [
        ([], 100.0, 0),
        ([5.0, 5.9], 5.99, 2),
        ([5.0, 5.9], 14.99, 2),
        ([5.0, 5.9], 15.0, 0),
        ([5.0, 6.0], 15.0, 1),
        ([-3.5, -0.5, 0.5], 5.0, 3),
        ([-3.5, -0.5, 0.5], 6.0, 2),
        ([5.0], 1e18, 0),
    ],
)
def test_an_event_counts_for_the_window_and_no_longer(added_at: list[float], now: float, counted: int) -> None:
    """What happened a quarter of a minute ago no longer decides about requests."""
    count = WindowedCount(WINDOW_S)
    for moment in added_at:
        count.add(moment)
    assert count.total(now) == counted


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 7.0) | st.floats(0.0, 1e6)), max_size=80), st.integers(1, 12))
def test_while_the_clock_runs_the_count_is_that_of_the_last_seconds(steps: list[tuple[bool, float]], window_s: int) -> None:
    """Long runs, pauses and bursts are counted alike: exactly the events of the last whole seconds."""
    count, added, now = WindowedCount(window_s), list[int](), 0.0
    for adds, passed in steps:
        now += passed
        if adds:
            count.add(now)
            added.append(math.floor(now))
        assert count.total(now) == sum(second > math.floor(now) - window_s for second in added)


@given(st.lists(st.floats(-1e12, 1e12) | st.floats(-30.0, 30.0), max_size=60))
def test_a_clock_that_jumps_loses_its_hold_after_two_windows(moments: list[float]) -> None:
    """Whatever the clock did before, counts are never negative and old ones are gone two windows later."""
    count, now = WindowedCount(WINDOW_S), 0.0
    for added, moment in enumerate(moments, 1):
        now = moment
        count.add(now)
        assert 1 <= count.total(now) <= added
    assert count.total(now + 2 * WINDOW_S) == 0


def test_a_small_step_back_keeps_every_count() -> None:
    """Times that arrive out of order, taken at the beginning and at the end of a request, are all counted."""
    count = WindowedCount(WINDOW_S)
    for moment in (100.0, 99.5, 100.5, 96.0, 101.0):
        count.add(moment)
    assert count.total(101.5) == 5


def test_clearing_forgets_all_seconds() -> None:
    """A replica that is forgiven starts from zero."""
    count = WindowedCount(WINDOW_S)
    for moment in (100.0, 103.0, 104.0):
        count.add(moment)
    count.clear()
    assert count.total(104.0) == 0
    count.add(105.0)
    assert [count.total(moment) for moment in (105.0, 110.0, 114.9, 115.0)] == [1, 1, 1, 0]


def test_a_window_of_no_seconds_is_refused() -> None:
    """A setting that could never count anything is named with its remedy."""
    with pytest.raises(ValueError, match="window_s is 0; it must be at least 1"):
        WindowedCount(0)
