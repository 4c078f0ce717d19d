"""One router of the simulation: what it does with a request that arrives, and what it hears of the fleet."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from protocol.usage import Usage
from router.policy.interface import EngineLoad, Policy, ReplicaFacts, Ticket
from router.sim.request import SimRequest
from router.types import ReplicaId


class Outlet(Protocol):
    """What a gateway may do. Given to it once, before anything arrives."""

    def send(self, request: SimRequest, ticket: Ticket, now: float) -> None:
        """The request goes to the ticket's replica and rank. It ends there with exactly one call of `ended`."""
        ...

    def refuse(self, request: SimRequest, retry_after_s: float, now: float) -> None:
        """The request is answered with 429. Not for one that was sent and has not ended."""
        ...


class Gateway(Protocol):
    """Everything happens on virtual time and one call at a time; a gateway may call its outlet within any of these.

    A request is submitted again when the replica it was sent to has died (`ended` without usage comes first).
    """

    @property
    def tick_interval_s(self) -> float | None:
        """How often `tick` is to be called; None: never."""
        ...

    def connect(self, outlet: Outlet) -> None: ...

    def submit(self, request: SimRequest, now: float) -> None: ...

    def first_token(self, request: SimRequest, ticket: Ticket, now: float) -> None: ...

    def ended(self, request: SimRequest, ticket: Ticket, usage: Usage | None, now: float) -> None:
        """The request has left the replica; without usage it has failed there."""
        ...

    def tick(self, now: float) -> None: ...

    def changed(self, facts: ReplicaFacts, now: float) -> None:
        """A replica is up, or back with an empty cache (then `restarted` came before)."""
        ...

    def lost(self, replica: ReplicaId, now: float) -> None:
        """A replica is down: nothing may be sent there until `changed` is called again."""
        ...

    def restarted(self, replica: ReplicaId, now: float) -> None: ...

    def scraped(self, replica: ReplicaId, load: EngineLoad, now: float) -> None: ...

    def stored(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None: ...

    def evicted(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None: ...

    def peer_sent(self, request: SimRequest, replica: ReplicaId, rank: int, now: float) -> None:
        """Another gateway has sent a request there. Only where placements are shared, as the next two."""
        ...

    def peer_first_token(self, request: SimRequest, now: float) -> None: ...

    def peer_ended(self, request: SimRequest, usage: Usage | None, now: float) -> None: ...

    @property
    def decision_ns(self) -> Sequence[int]:
        """Time of each placement decision; empty where no clock was given."""
        ...

    @property
    def facts(self) -> Mapping[str, float]:
        """Numbers about itself for the report, by name."""
        ...


class DirectGateway:
    """Places each request the moment it arrives. Where the policy says None, requests wait in order of arrival.

    They are tried again whenever a first token or an ending may have made room, the oldest first, until one has to wait on.
    """

    tick_interval_s: float | None = None

    def __init__(self, policy: Policy, *, clock_ns: Callable[[], int] | None = None) -> None:
        """`clock_ns` (time.perf_counter_ns) measures the policy's decisions; without it none is measured."""
        self._policy = policy
        self._clock_ns = clock_ns
        self._outlet: Outlet | None = None
        self._candidates: list[ReplicaId] = []
        self._waiting: deque[SimRequest] = deque()
        self._peers: dict[int, Ticket] = {}  # by request: what other gateways have placed
        self._decision_ns: list[int] = []

    def connect(self, outlet: Outlet) -> None:
        self._outlet = outlet

    def submit(self, request: SimRequest, now: float) -> None:
        if self._waiting or not self._place(request, now):
            self._waiting.append(request)

    def first_token(self, request: SimRequest, ticket: Ticket, now: float) -> None:
        self._policy.first_token(ticket, now)
        self._retry(now)

    def ended(self, request: SimRequest, ticket: Ticket, usage: Usage | None, now: float) -> None:
        self._policy.ended(ticket, usage, now)
        self._retry(now)

    def tick(self, now: float) -> None:
        """Nothing waits for the passing of time."""

    def changed(self, facts: ReplicaFacts, now: float) -> None:
        self._policy.changed(facts)
        if facts.id not in self._candidates:
            self._candidates.append(facts.id)
            self._candidates.sort()
        self._retry(now)

    def lost(self, replica: ReplicaId, now: float) -> None:
        if replica in self._candidates:
            self._candidates.remove(replica)

    def restarted(self, replica: ReplicaId, now: float) -> None:
        self._policy.restarted(replica)

    def scraped(self, replica: ReplicaId, load: EngineLoad, now: float) -> None:
        self._policy.scraped(replica, load, now)

    def stored(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self._policy.stored(replica, rank, blocks, now)

    def evicted(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self._policy.evicted(replica, rank, blocks, now)

    def peer_sent(self, request: SimRequest, replica: ReplicaId, rank: int, now: float) -> None:
        if request.id not in self._peers:
            self._peers[request.id] = self._policy.adopt(request, replica, rank, now)

    def peer_first_token(self, request: SimRequest, now: float) -> None:
        if (ticket := self._peers.get(request.id)) is not None:
            self._policy.first_token(ticket, now)

    def peer_ended(self, request: SimRequest, usage: Usage | None, now: float) -> None:
        if (ticket := self._peers.pop(request.id, None)) is not None:
            self._policy.ended(ticket, usage, now)

    @property
    def decision_ns(self) -> Sequence[int]:
        return self._decision_ns

    @property
    def facts(self) -> Mapping[str, float]:
        return {}

    def _retry(self, now: float) -> None:
        while self._waiting and self._place(self._waiting[0], now):
            self._waiting.popleft()

    def _place(self, request: SimRequest, now: float) -> bool:
        assert self._outlet is not None, "a gateway is connected before anything is submitted"
        if not self._candidates:
            return False
        if self._clock_ns is None:
            ticket = self._policy.place(request, self._candidates, now)
        else:
            began = self._clock_ns()
            ticket = self._policy.place(request, self._candidates, now)
            self._decision_ns.append(self._clock_ns() - began)
        if ticket is None:
            return False
        self._outlet.send(request, ticket, now)
        return True
