"""How the benchmark makes one figure of many measurements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.overhead.disturbance import Reading, cores_lost
from loadtests.overhead.figures import Metric, Sample, percentile, summarize


def test_a_router_gets_the_median_of_its_rounds() -> None:
    """One disturbed round does not change what the table says; rounds of other routers do not count."""
    taken = [("ours", 1, 100.0), ("ours", 2, 900.0), ("ours", 3, 110.0), ("sglang-router", 1, 5.0)]
    summary = summarize(Sample(router, number, Metric.CHUNK, value) for router, number, value in taken)
    assert summary == {"ours": {Metric.CHUNK: 110.0}, "sglang-router": {Metric.CHUNK: 5.0}}


def test_errors_are_summed_over_rounds() -> None:
    """A single failed request shows, although the median of 0, 0 and 1 is 0."""
    summary = summarize(Sample("ours", number, Metric.ERRORS, float(number == 3)) for number in (1, 2, 3))
    assert summary["ours"][Metric.ERRORS] == 1.0


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([7.0], 0.99, 7.0), ([1.0, 2.0], 0.5, 1.0), ([1.0, 2.0], 0.51, 2.0), ([float(n) for n in range(1, 101)], 0.99, 99.0)],
)
def test_a_percentile_is_one_of_the_values(values: list[float], share: float, expected: float) -> None:
    """p99 of a hundred latencies is the second longest."""
    assert percentile(values, share) == expected


@given(st.lists(st.floats(allow_nan=False), min_size=1), st.floats(0, 1))
def test_a_percentile_covers_its_share(values: list[float], share: float) -> None:
    """At least that share of the values does not exceed it, and no smaller value would do."""
    ordered = sorted(values)
    found = percentile(ordered, share)
    assert sum(value <= found for value in ordered) >= share * len(ordered)
    assert all(sum(value <= smaller for value in ordered) < share * len(ordered) for smaller in ordered if smaller < found)


def test_no_values_have_no_percentile() -> None:
    """It is an error, not a zero that would look like a very good result."""
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (Reading(at=20.0, machine=118.0, own=13.0), 0.5),
        (Reading(at=20.0, machine=113.0, own=13.0), 0.0),
        (Reading(at=20.0, machine=112.9, own=13.0), 0.0),  # the two clocks tick apart
    ],
)
def test_what_others_kept_busy_is_the_rest(after: Reading, expected: float) -> None:
    """A run on a busy machine says so, and the benchmark's own work does not count as others'."""
    assert cores_lost(Reading(at=10.0, machine=100.0, own=0.0), after) == pytest.approx(expected)
