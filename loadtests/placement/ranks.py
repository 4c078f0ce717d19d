"""Whether two measurements put the same things into the same order. Pure."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple


class Agreement(NamedTuple):
    """Of the pairs whose order the first measurement is sure of."""

    pairs: int
    agreeing: int


def kendall(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Kendall's tau-b over the names that both have: 1 the same order, -1 the reverse; ties in either count as no order.

    Raises ValueError for fewer than two names, or where one of them ties all.
    """
    names = sorted(first.keys() & second.keys())
    if len(names) < 2:
        raise ValueError(f"{len(names)} names in common, but an order needs two")
    balance = ordered_first = ordered_second = 0
    for one, other in combinations(names, 2):
        left, right = _sign(first[one] - first[other]), _sign(second[one] - second[other])
        balance += left * right
        ordered_first += left * left
        ordered_second += right * right
    if not ordered_first or not ordered_second:
        raise ValueError("all values of one measurement are equal, so there is no order to compare")
    return float(balance / (ordered_first * ordered_second) ** 0.5)


def agreement(runs: Mapping[str, Sequence[float]], measured: Mapping[str, float], *, apart: float) -> Agreement:
    """How `measured` orders the pairs that several runs of the first measurement tell apart.

    A pair counts where all runs of one lie on the same side of all runs of the other, with a gap of at least `apart` times
    the larger value.
    """
    pairs = agreeing = 0
    for one, other in combinations(sorted(runs.keys() & measured.keys()), 2):
        low, high = (one, other) if max(runs[one]) < max(runs[other]) else (other, one)
        gap = min(runs[high]) - max(runs[low])
        if gap <= 0 or gap < apart * max(map(abs, runs[high])):
            continue
        pairs += 1
        agreeing += measured[low] < measured[high]
    return Agreement(pairs, agreeing)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
