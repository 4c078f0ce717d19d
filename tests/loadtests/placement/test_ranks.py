"""Two measurements are said to agree exactly where they order things alike."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.placement.ranks import Agreement, agreement, kendall

NAMES = "abcdef"
VALUES = st.lists(st.integers(-(10**6), 10**6), min_size=6, max_size=6, unique=True).map(
    lambda values: dict(zip(NAMES, values, strict=True))
)


@given(VALUES)
def test_an_order_agrees_with_itself_and_not_with_its_reverse(values: dict[str, float]) -> None:
    """Only the order counts, not the size."""
    assert kendall(values, {name: 3 * value + 1 for name, value in values.items()}) == pytest.approx(1.0)
    assert kendall(values, {name: -value for name, value in values.items()}) == pytest.approx(-1.0)


@given(VALUES, VALUES)
def test_it_lies_between_and_is_symmetric(first: dict[str, float], second: dict[str, float]) -> None:
    """Whichever measurement is named first."""
    assert -1.0 <= kendall(first, second) <= 1.0
    assert kendall(first, second) == pytest.approx(kendall(second, first))


@pytest.mark.parametrize(
    ("first", "second", "tau"),
    [
        ({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 3, "c": 2}, 1 / 3),
        ({"a": 1, "b": 2, "c": 3, "d": 4}, {"a": 2, "b": 1, "c": 4, "d": 3}, 1 / 3),
        ({"a": 1, "b": 1, "c": 2}, {"a": 1, "b": 2, "c": 3}, 2 / 6**0.5),
        ({"a": 1, "b": 2, "other": 9}, {"a": 5, "b": 6, "third": 0}, 1.0),
    ],
)
def test_known_values(first: dict[str, float], second: dict[str, float], tau: float) -> None:
    """By hand: one pair of three swapped, two of six, one tied, and names that only one has."""
    assert kendall(first, second) == pytest.approx(tau)


@pytest.mark.parametrize(("first", "second"), [({"a": 1.0}, {"a": 2.0}), ({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 2.0})])
def test_no_order_is_no_agreement(first: dict[str, float], second: dict[str, float]) -> None:
    """An error, not a correlation of zero or one."""
    with pytest.raises(ValueError, match=r"order"):
        kendall(first, second)


def test_only_pairs_that_are_told_apart_count() -> None:
    """Runs that overlap, or differ by less than asked, make no claim; the others are counted right or wrong."""
    runs = {"a": [1.0, 1.2], "b": [1.1, 1.3], "c": [2.0, 2.2], "d": [2.23, 2.3]}
    assert agreement(runs, {"a": 5.0, "b": 4.0, "c": 6.0, "d": 5.5}, apart=0.05) == Agreement(pairs=4, agreeing=4)
    assert agreement(runs, {"a": 5.0, "b": 4.0, "c": 4.5, "d": 5.5}, apart=0.05) == Agreement(pairs=4, agreeing=3)
    assert agreement(runs, {"a": 5.0, "b": 4.0, "c": 6.0, "d": 5.5}, apart=0.0).pairs == 5
