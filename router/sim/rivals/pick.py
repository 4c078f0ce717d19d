"""Choices among costs, one per target."""

import math
import random
from collections.abc import Sequence


def cheapest(costs: Sequence[float], rng: random.Random) -> int:
    """Position of the lowest cost; among equals, any."""
    least = min(costs)
    tied = [position for position, cost in enumerate(costs) if cost == least]
    return tied[0] if len(tied) == 1 else tied[int(rng.random() * len(tied))]


def sampled(costs: Sequence[float], temperature: float, rng: random.Random) -> int:
    """A position with probability proportional to exp(-(cost - lowest) / temperature); at 0 the cheapest."""
    if temperature <= 0:
        return cheapest(costs, rng)
    least = min(costs)
    weights = [math.exp(-(cost - least) / temperature) for cost in costs]
    return rng.choices(range(len(costs)), weights)[0]


def normalised(costs: Sequence[float]) -> list[float]:
    """Scaled to 0 for the lowest and 1 for the highest; all 0 where they are equal."""
    least = min(costs)
    span = max(costs) - least
    return [(cost - least) / span if span > 0 else 0.0 for cost in costs]
