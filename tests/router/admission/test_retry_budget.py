"""How many retries the router adds to its clients' load."""

import enum
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.retry_budget import RetryBudget


class Event(enum.Enum):
    SUCCESS = enum.auto()
    CLIENT_RETRY = enum.auto()
    OUR_RETRY = enum.auto()


def granted(budget: RetryBudget, now: float, tries: int = 1000) -> int:
    return sum(budget.try_spend(now) for _ in range(tries))


@pytest.mark.parametrize(
    ("share", "floor", "successes", "client_retries", "grants"),
    [
        (0.2, 10, 0, 0, 10),  # a router that has just started, or whose engines all fail
        (0.2, 10, 100, 0, 30),
        (0.2, 10, 1000, 0, 210),
        (0.2, 10, 100, 12, 18),  # clients retry too: what they use is not ours
        (0.2, 10, 100, 500, 0),
        (0.0, 10, 1000, 0, 10),
        (0.5, 0, 8, 0, 4),
        (0.0, 0, 1000, 0, 0),  # retries switched off
    ],
)
def test_retries_are_a_share_of_the_successes_plus_a_floor(
    share: float, floor: int, successes: int, client_retries: int, grants: int
) -> None:
    """While engines fail, clients' requests are multiplied by 1.2 at most, however many ask for a retry."""
    budget = RetryBudget(share, floor)
    for _ in range(successes):
        budget.success(50.0)
    for _ in range(client_retries):
        budget.client_retry(50.5)
    assert granted(budget, 51.0) == grants
    assert not budget.try_spend(51.5)


def test_retries_are_granted_again_after_a_quiet_window() -> None:
    """An incident that is over leaves nothing behind: ten seconds later the whole floor is there."""
    budget = RetryBudget()
    assert granted(budget, 100.0) == 10
    for _ in range(200):
        budget.client_retry(100.2)
    assert [granted(budget, now) for now in (105.0, 109.9, 110.0, 119.9, 120.0)] == [0, 0, 10, 0, 10]


@given(
    st.lists(st.tuples(st.sampled_from(Event), st.floats(0.0, 0.3) | st.floats(0.0, 30.0)), max_size=300),
    st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0]),
    st.integers(0, 12),
    st.integers(1, 12),
)
def test_the_retries_of_no_window_exceed_the_budget(
    events: list[tuple[Event, float]], share: float, floor: int, window_s: int
) -> None:
    """At no moment have more retries been made in the window than the successes in it allow, and none is refused below that."""
    budget, now = RetryBudget(share, floor, window_s), 1000.0
    successes, retries = list[int](), list[int]()
    for event, passed in events:
        now += passed
        oldest = math.floor(now) - window_s + 1
        limit = floor + share * sum(second >= oldest for second in successes)
        spent = sum(second >= oldest for second in retries)
        match event:
            case Event.SUCCESS:
                budget.success(now)
                successes.append(math.floor(now))
            case Event.CLIENT_RETRY:
                budget.client_retry(now)
                retries.append(math.floor(now))
            case Event.OUR_RETRY:
                assert budget.try_spend(now) is (spent < limit)
                if spent < limit:
                    retries.append(math.floor(now))
                    assert spent + 1 < limit + 1


@given(st.lists(st.tuples(st.sampled_from(Event), st.floats(-1e9, 1e9) | st.floats(0.0, 20.0)), max_size=100))
def test_a_clock_that_jumps_neither_frees_nor_blocks_retries_for_long(events: list[tuple[Event, float]]) -> None:
    """A clock that was set never grants more retries than successes allow, and is forgotten two windows after the next try."""
    budget, now, successes = RetryBudget(), 0.0, 0
    for event, moment in events:
        now = moment
        match event:
            case Event.SUCCESS:
                budget.success(now)
                successes += 1
            case Event.CLIENT_RETRY:
                budget.client_retry(now)
            case Event.OUR_RETRY:
                assert granted(budget, now) <= math.ceil(10 + 0.2 * successes)
    budget.try_spend(now)
    assert granted(budget, now + 20.0) == 10


@pytest.mark.parametrize(
    ("share", "floor", "window_s", "message"),
    [
        (-0.1, 10, 10, "share is -0.1; it must be a number from 0 upwards"),
        (math.nan, 10, 10, "share is nan; it must be a number from 0 upwards"),
        (math.inf, 10, 10, "share is inf; it must be a number from 0 upwards"),
        (0.2, -1, 10, "floor is -1; it must be at least 0"),
        (0.2, 10, 0, "window_s is 0; it must be at least 1"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(share: float, floor: int, window_s: int, message: str) -> None:
    """A wrong setting is named, with what it may be."""
    with pytest.raises(ValueError, match=message):
        RetryBudget(share, floor, window_s)
