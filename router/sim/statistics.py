"""Statistics over a handful of runs, and over the requests of one."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Two-sided 95 % points of Student's t distribution for 1, 2, ... degrees of freedom.
_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_Z_95 = 1.959964


class Estimate(NamedTuple):
    """A mean over seeds, and half the width of its 95 % confidence interval; None where one seed tells nothing of that."""

    mean: float
    ci95: float | None


def t_95(degrees: int) -> float:
    """Two-sided 95 % point of Student's t distribution; beyond 30 degrees of freedom by its expansion around the normal's."""
    if degrees <= len(_T_95):
        return _T_95[degrees - 1]
    z = _Z_95
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def estimate(values: Sequence[float]) -> Estimate:
    """Of one value or more."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, t_95(count - 1) * math.sqrt(variance / count))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of ascending values, linear between two of them; 0 where there are none."""
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def variation(values: Sequence[float]) -> float:
    """Coefficient of variation: standard deviation over mean; 0 where the mean is."""
    mean = math.fsum(values) / len(values)
    if mean == 0:
        return 0.0
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)) / mean


def jain(values: Sequence[float]) -> float:
    """Jain's fairness index: 1 where all are equal, 1/n where one has everything."""
    squares = math.fsum(value * value for value in values)
    return 1.0 if squares == 0 else math.fsum(values) ** 2 / (len(values) * squares)


def max_min_shares(demands: Mapping[str, float], capacity: float) -> dict[str, float]:
    """What each is due of `capacity` (at most the sum of demands): none more than it asks, and the rest in equal parts."""
    shares: dict[str, float] = {}
    left = capacity
    for count, (name, demand) in enumerate(sorted(demands.items(), key=lambda item: item[1])):
        shares[name] = min(demand, left / (len(demands) - count))
        left -= shares[name]
    return shares
