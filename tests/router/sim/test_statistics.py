"""Estimates over a few seeds are honest about how few they are."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.sim.statistics import estimate, jain, max_min_shares, percentile, t_95, variation


def test_an_interval_is_students() -> None:
    """Values of the textbook: 1, 2, 3, 4, 5 have mean 3 and 3 ± 2.776 * sqrt(2.5 / 5)."""
    found = estimate([1, 2, 3, 4, 5])
    assert found.mean == 3.0
    assert found.ci95 == pytest.approx(2.776 * math.sqrt(0.5))
    assert estimate([7.0]) == (7.0, None)
    assert estimate([2.0, 2.0]) == (2.0, 0.0)


def test_the_t_distribution_goes_over_into_its_expansion() -> None:
    """31 and 120 degrees of freedom by table: 2.040 and 1.980."""
    assert t_95(1) == 12.706
    assert t_95(31) == pytest.approx(2.040, abs=0.001)
    assert t_95(120) == pytest.approx(1.980, abs=0.001)
    assert all(t_95(degrees) > t_95(degrees + 1) for degrees in range(1, 60))


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_percentiles_are_linear_between_values(values: list[float]) -> None:
    """As numpy and Python's inclusive quantiles have them."""
    ordered = sorted(values)
    assert percentile(ordered, 0.0) == ordered[0]
    assert percentile(ordered, 1.0) == ordered[-1]
    deciles = statistics.quantiles(ordered, n=10, method="inclusive")
    assert percentile(ordered, 0.9) == pytest.approx(deciles[8], rel=1e-6, abs=1e-6)


def test_of_nothing_there_is_nothing() -> None:
    """A run without a single request is no fault of the report."""
    assert percentile([], 0.9) == 0.0
    assert jain([0.0, 0.0]) == 1.0
    assert variation([0.0, 0.0]) == 0.0


def test_jain_and_variation_by_hand() -> None:
    """One of four has everything: a quarter. 1 and 3 differ from 2 by a half of it."""
    assert jain([1, 0, 0, 0]) == 0.25
    assert jain([5, 5, 5]) == pytest.approx(1.0)
    assert variation([1, 3]) == 0.5


@given(st.dictionaries(st.text(max_size=3), st.floats(0.001, 1e6), min_size=1, max_size=8), st.floats(0, 1))
def test_max_min_shares_are_fair(demands: dict[str, float], part: float) -> None:
    """Nobody gets more than asked, all is given away, and who is short has as much as anyone."""
    capacity = part * sum(demands.values())
    shares = max_min_shares(demands, capacity)
    assert sum(shares.values()) == pytest.approx(capacity)
    most = max(shares.values())
    for name, share in shares.items():
        assert share <= demands[name] * (1 + 1e-9)
        assert share == pytest.approx(demands[name]) or share == pytest.approx(most)
