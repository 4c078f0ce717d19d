"""The tuner finds good settings with few tries."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest

from router.sim.tuning import search


@dataclass(frozen=True)
class Knobs:
    a: float = 0.0
    b: int = 0
    c: bool = False


SPACE: Mapping[str, Sequence[object]] = {"a": (0.0, 0.5, 1.0, 2.0), "b": (0, 1, 2, 3, 4, 5), "c": (False, True)}


def goodness(knobs: Knobs) -> float:
    return -((knobs.a - 1.0) ** 2) - (knobs.b - 4) ** 2 + (0.5 if knobs.c else 0.0)


def noting(tried: list[Knobs]) -> Callable[[Knobs], float]:
    def evaluate(knobs: Knobs) -> float:
        tried.append(knobs)
        return goodness(knobs)

    return evaluate


@pytest.mark.parametrize("seed", range(5))
def test_the_best_of_a_smooth_space_is_found_with_half_the_tries(seed: int) -> None:
    """48 settings, 24 tries."""
    assert search(goodness, Knobs(), SPACE, random.Random(seed), 24) == (Knobs(1.0, 4, True), 0.5)


@pytest.mark.parametrize("budget", [1, 2, 10, 500])
def test_it_keeps_to_the_budget_tries_nothing_twice_and_never_ends_worse_than_it_began(budget: int) -> None:
    """Also when the budget is larger than the space, which it then knows wholly or leaves at a peak."""
    tried: list[Knobs] = []
    best, value = search(noting(tried), Knobs(), SPACE, random.Random(0), budget)
    assert len(tried) <= min(budget, 48)
    assert len(tried) >= min(budget, 12)
    assert len(set(tried)) == len(tried)
    assert tried[0] == Knobs()
    assert value == goodness(best) == max(map(goodness, tried))


def test_the_same_seed_searches_alike() -> None:
    """A published best setting can be found again."""
    runs = []
    for _ in range(2):
        tried: list[Knobs] = []
        search(noting(tried), Knobs(), SPACE, random.Random(3), 15)
        runs.append(tried)
    assert runs[0] == runs[1]


def test_a_policy_without_settings_is_tried_once() -> None:
    """An empty space is no error."""
    assert search(goodness, Knobs(), {}, random.Random(0), 10) == (Knobs(), -17.0)


@pytest.mark.parametrize(
    ("space", "budget", "problem"),
    [
        ({"d": (1,)}, 5, "'d', which Knobs does not have"),
        ({"a": ()}, 5, "no values for 'a'"),
        ({"a": (1.0,)}, 0, "budget is 0"),
    ],
)
def test_a_space_that_does_not_fit_is_refused(space: Mapping[str, Sequence[object]], budget: int, problem: str) -> None:
    """The error names the field."""
    with pytest.raises(ValueError, match=problem):
        search(goodness, Knobs(), space, random.Random(0), budget)
