"""Policies that look at no cache: in turn, at random, by load, or by a hash of what the request belongs to."""

import random
from bisect import bisect_left
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from protocol.usage import Usage
from router.policy.interface import PlacementRequest, Policy, ReplicaFacts, Ticket
from router.types import ReplicaId

# Points of each replica on the ring. With 160 the busiest of 8 replicas owns about a tenth more than its share (as ketama's).
RING_POINTS = 160


class RoundRobin(Policy):
    """Each in turn, in the order of their ids, so that a replica that leaves and returns keeps its place.

    The first is drawn by lot, or routers that start together would go round in step.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._last: ReplicaId | None = None

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket:
        last = self._last
        if last is None:
            chosen = candidates[int(self._rng.random() * len(candidates))]
        else:
            chosen = min([candidate for candidate in candidates if candidate > last], default=None) or min(candidates)
        self._last = chosen
        return Ticket(request, chosen)


class Random(Policy):
    """Each as likely as any other."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket:
        return Ticket(request, candidates[int(self._rng.random() * len(candidates))])


class _ByInFlight(Policy):
    """Knows how many of its own requests each replica has. A replica without any is in no table, so churn leaves nothing."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._in_flight: dict[ReplicaId, int] = {}

    def in_flight(self, replica: ReplicaId) -> int:
        return self._in_flight.get(replica, 0)

    def adopt(self, request: PlacementRequest, replica: ReplicaId, rank: int, now: float) -> Ticket:
        self._in_flight[replica] = self._in_flight.get(replica, 0) + 1
        return Ticket(request, replica, rank)

    def ended(self, ticket: Ticket, usage: Usage | None, now: float) -> None:
        left = self._in_flight[ticket.replica] - 1
        if left:
            self._in_flight[ticket.replica] = left
        else:
            del self._in_flight[ticket.replica]


class LeastLoaded(_ByInFlight):
    """Fewest requests in flight. Ties are random, or every router would send its first request to the same replica."""

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket:
        get = self._in_flight.get
        fewest = get(candidates[0], 0)
        tied: list[ReplicaId] = []
        for candidate in candidates:
            load = get(candidate, 0)
            if load < fewest:
                fewest, tied = load, [candidate]
            elif load == fewest:
                tied.append(candidate)
        chosen = tied[0] if len(tied) == 1 else tied[int(self._rng.random() * len(tied))]
        self._in_flight[chosen] = fewest + 1
        return Ticket(request, chosen)


class PowerOfTwo(_ByInFlight):
    """The less loaded of two that are drawn at random (Mitzenmacher, 2001): nearly as even, and it never herds."""

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket:
        draw, get = self._rng.random, self._in_flight.get
        count = len(candidates)
        first = int(draw() * count)
        chosen = candidates[first]
        load = get(chosen, 0)
        if count > 1:
            second = int(draw() * (count - 1))
            other = candidates[second + (second >= first)]
            other_load = get(other, 0)
            if other_load < load:
                chosen, load = other, other_load
        self._in_flight[chosen] = load + 1
        return Ticket(request, chosen)


class ConsistentHash(Policy):
    """Requests that belong together go to the same replica, by a hash ring (Karger et al., 1997).

    What belongs together: the client's affinity key (of one tenant); without it, prompts that begin with the same 1024 bytes; a
    shorter prompt, by all of it; a request without a prompt, by its tenant. The load is not looked at.

    When a replica leaves, or is no candidate for a while, only its own keys move, spread over all the others, and they return
    with it. The ring holds every replica that was ever told of or offered and not removed.
    """

    uses_prompt = True

    def __init__(self, rng: random.Random, *, points: int = RING_POINTS) -> None:
        self._points_each = points
        self._points: list[int] = []  # sorted
        self._owners: list[ReplicaId] = []  # of each point
        self._known: set[ReplicaId] = set()

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket:
        if not self._known.issuperset(candidates):
            for candidate in candidates:
                self._add(candidate)
        owners = self._owners
        at = bisect_left(self._points, _key(request))
        for owner in owners[at : at + 4]:  # nearly always the first
            if owner in candidates:
                return Ticket(request, owner)
        allowed = set(candidates)
        return Ticket(request, next(owner for owner in owners[at:] + owners[:at] if owner in allowed))

    def changed(self, facts: ReplicaFacts) -> None:
        self._add(facts.id)

    def removed(self, replica: ReplicaId) -> None:
        if replica in self._known:
            self._known.remove(replica)
            kept = [(point, owner) for point, owner in zip(self._points, self._owners, strict=True) if owner != replica]
            self._points = [point for point, _ in kept]
            self._owners = [owner for _, owner in kept]

    def _add(self, replica: ReplicaId) -> None:
        if replica in self._known:
            return
        self._known.add(replica)
        for number in range(self._points_each):
            point = xxh3_64_intdigest(f"{replica}#{number}".encode())
            at = bisect_left(self._points, point)
            self._points.insert(at, point)
            self._owners.insert(at, replica)


def _key(request: PlacementRequest) -> int:
    if request.affinity:
        return xxh3_64_intdigest(f"{request.tenant}\0{request.affinity}".encode())
    prompt = request.prompt
    if prompt.size == 0:
        return xxh3_64_intdigest(request.tenant.encode())
    chunks = prompt.chunks
    return chunks[0] if chunks else prompt.digest(prompt.size)
