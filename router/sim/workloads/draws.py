"""Random sizes and times, as measured traffic has them: skewed, with a bound."""

import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple


class Skewed(NamedTuple):
    """A log-normal quantity: half of the draws lie below `median`; `sigma` is the deviation of the logarithm."""

    median: float
    sigma: float
    most: float

    def draw(self, rng: Random) -> float:
        return min(self.most, self.median * math.exp(rng.gauss(0.0, self.sigma)))

    def tokens(self, rng: Random) -> int:
        return max(1, round(self.draw(rng)))


class Quantiles(NamedTuple):
    """A quantity known by some of its quantiles, ascending from (0, least) to (1, most); linear in between."""

    points: Sequence[tuple[float, float]]

    def draw(self, rng: Random) -> float:
        share = rng.random()
        for (low, least), (high, most) in zip(self.points, self.points[1:], strict=False):
            if share <= high:
                return least + (most - least) * (share - low) / (high - low)
        return self.points[-1][1]


def arrivals(rates: Sequence[float], horizon_s: float, rng: Random) -> Iterator[float]:
    """Times of a Poisson process that goes through `rates` (events a second) in equal stages until `horizon_s`."""
    stage_s = horizon_s / len(rates)
    for stage, rate in enumerate(rates):
        now, end = stage * stage_s, (stage + 1) * stage_s
        # A Poisson process has no memory: each stage can begin anew.
        while rate > 0 and (now := now + rng.expovariate(rate)) < end:
            yield now
