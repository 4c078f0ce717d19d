"""Finds a policy's best settings by trying: a few at random, then one field at a time around the best."""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

S = TypeVar("S")

RANDOM_SHARE = 0.4  # of the budget; the rest refines the best of them


def search(
    evaluate: Callable[[S], float], start: S, space: Mapping[str, Sequence[object]], rng: random.Random, budget: int
) -> tuple[S, float]:
    """The settings with the highest value of `evaluate` that `budget` tries have met, and that value.

    `start`, a dataclass, is the first try, so the outcome is never worse than it. `space` gives the values to try for its
    fields; nothing is tried twice. `evaluate` must be deterministic. Raises ValueError for a field that `start` does not
    have, a field without values, or a budget below 1.
    """
    _check(start, space, budget)
    tries = _Tries(evaluate, start, budget)
    size = 1
    for values in space.values():
        size *= len(values)
    random_tries = min(round(budget * RANDOM_SHARE), size)
    for _ in range(random_tries):
        tries.attempt({field: rng.choice(values) for field, values in space.items()})
    improved = True
    while improved and not tries.exhausted:
        improved = False
        for field in rng.sample(sorted(space), len(space)):
            for value in space[field]:
                improved |= tries.attempt({field: value})
    return tries.best, tries.best_value


class _Tries:
    def __init__(self, evaluate: Callable[[S], float], start: S, budget: int) -> None:
        self._evaluate: Callable[[Any], float] = evaluate
        self._left = budget - 1
        self._known: list[Any] = [start]
        self.best: Any = start
        self.best_value = evaluate(start)

    @property
    def exhausted(self) -> bool:
        return self._left <= 0

    def attempt(self, changes: Mapping[str, object]) -> bool:
        """Whether the best settings with these changes are better than the best."""
        settings = dataclasses.replace(self.best, **changes)
        if self.exhausted or settings in self._known:
            return False
        self._left -= 1
        self._known.append(settings)
        value = self._evaluate(settings)
        if value <= self.best_value:
            return False
        self.best, self.best_value = settings, value
        return True


def _check(start: object, space: Mapping[str, Sequence[object]], budget: int) -> None:
    if not dataclasses.is_dataclass(start) or isinstance(start, type):
        raise ValueError(f"start is {start!r}; give an instance of a settings dataclass")
    fields = {field.name for field in dataclasses.fields(start)}
    for field, values in space.items():
        if field not in fields:
            raise ValueError(f"space names {field!r}, which {type(start).__name__} does not have; it has {sorted(fields)}")
        if not values:
            raise ValueError(f"space has no values for {field!r}; give some or leave the field out")
    if budget < 1:
        raise ValueError(f"budget is {budget}; give 1 or more tries")
