"""Chooses the replica for one request among those that may take it. Never called without a candidate."""

import enum
import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from router.types import Candidate, RequestInfo

C = TypeVar("C", bound=Candidate)


class PolicyName(enum.StrEnum):
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"


class Policy(Protocol):
    def choose(self, request: RequestInfo, candidates: Sequence[C]) -> C: ...


class LeastLoaded:
    """Fewest requests in flight. Ties are random, or every router would send its first request to the same replica."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: RequestInfo, candidates: Sequence[C]) -> C:
        fewest, least = candidates[0].in_flight, [candidates[0]]
        for candidate in candidates[1:]:
            in_flight = candidate.in_flight
            if in_flight < fewest:
                fewest, least = in_flight, [candidate]
            elif in_flight == fewest:
                least.append(candidate)
        return least[0] if len(least) == 1 else least[int(self._rng.random() * len(least))]


class RoundRobin:
    """Each in turn, in the order of their ids, so that a replica that leaves and returns keeps its place."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, request: RequestInfo, candidates: Sequence[C]) -> C:
        ordered = sorted(candidates, key=lambda candidate: candidate.id)
        chosen = next((candidate for candidate in ordered if candidate.id > self._last), ordered[0])
        self._last = chosen.id
        return chosen


class Random:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: RequestInfo, candidates: Sequence[C]) -> C:
        return candidates[int(self._rng.random() * len(candidates))]


def make_policy(name: PolicyName, rng: random.Random) -> Policy:
    match name:
        case PolicyName.LEAST_LOADED:
            return LeastLoaded(rng)
        case PolicyName.ROUND_ROBIN:
            return RoundRobin()
        case PolicyName.RANDOM:
            return Random(rng)
