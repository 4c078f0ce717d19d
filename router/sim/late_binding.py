"""Our own router in the simulation: the policy behind the real dispatcher, which lets requests wait until one can start."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from protocol.usage import Usage
from router.admission.dispatcher import Dispatcher
from router.admission.priorities import AdmissionSettings
from router.admission.token_cost import charge_of
from router.admission.waiting import Shed, Waiting
from router.policy.interface import EngineLoad, PlacementRequest, Policy, ReplicaFacts, Ticket
from router.sim.gateway import Outlet
from router.sim.request import SimRequest
from router.types import ReplicaId

# What the edge tells a client that has waited to its bound.
EXPIRED_RETRY_AFTER_S = 10.0


class LateBindingGateway:
    """As `router.placing` does it over sockets: after each event it looks who can start now."""

    def __init__(
        self, policy: Policy, settings: AdmissionSettings | None = None, *, clock_ns: Callable[[], int] | None = None
    ) -> None:
        self._policy = _Timed(policy, clock_ns)
        self._dispatcher = Dispatcher(self._policy, settings, charge_of=charge_of)
        self._poll_s = (AdmissionSettings() if settings is None else settings).poll_s
        self._outlet: Outlet | None = None
        self._candidates: list[ReplicaId] = []
        self._waiting: dict[Waiting, SimRequest] = {}
        self._stranded: deque[SimRequest] = deque()  # while no replica is up
        self._peers: dict[int, Ticket] = {}

    @property
    def tick_interval_s(self) -> float | None:
        return self._poll_s

    def connect(self, outlet: Outlet) -> None:
        self._outlet = outlet

    def submit(self, request: SimRequest, now: float) -> None:
        if not self._candidates:
            self._stranded.append(request)
            return
        given = self._dispatcher.submit(request, self._candidates_now, now)
        if isinstance(given, Ticket):
            self._send(request, given, now)
        elif isinstance(given, Waiting):
            self._waiting[given] = request
        else:
            self._refuse(request, given, now)

    def first_token(self, request: SimRequest, ticket: Ticket, now: float) -> None:
        self._dispatcher.first_token(ticket, now)
        self._look(now)

    def ended(self, request: SimRequest, ticket: Ticket, usage: Usage | None, now: float) -> None:
        self._dispatcher.ended(ticket, usage, now)
        self._look(now)

    def tick(self, now: float) -> None:
        self._look(now)

    def changed(self, facts: ReplicaFacts, now: float) -> None:
        self._policy.changed(facts)
        if facts.id not in self._candidates:
            self._candidates = sorted([*self._candidates, facts.id])
        while self._stranded:
            self.submit(self._stranded.popleft(), now)
        self._look(now)

    def lost(self, replica: ReplicaId, now: float) -> None:
        self._candidates = [candidate for candidate in self._candidates if candidate != replica]

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
            self._look(now)

    def peer_ended(self, request: SimRequest, usage: Usage | None, now: float) -> None:
        if (ticket := self._peers.pop(request.id, None)) is not None:
            self._policy.ended(ticket, usage, now)
            self._look(now)

    @property
    def decision_ns(self) -> Sequence[int]:
        return self._policy.decision_ns

    @property
    def facts(self) -> Mapping[str, float]:
        counts = self._dispatcher.counts
        return {
            "shed": float(sum(counts.shed.values())),
            "promoted": float(sum(counts.promoted.values())),
        }

    def _candidates_now(self) -> Sequence[ReplicaId]:
        return self._candidates

    def _look(self, now: float) -> None:
        if not self._waiting:
            return
        for waiting, ticket in self._dispatcher.due(now):
            request = self._waiting.pop(waiting)
            if waiting.error is not None:
                raise waiting.error
            if ticket is None:
                self._stranded.append(request)
            else:
                self._send(request, ticket, now)
        for waiting in self._dispatcher.expired(now):
            self._refuse_after(self._waiting.pop(waiting), EXPIRED_RETRY_AFTER_S, now)

    def _send(self, request: SimRequest, ticket: Ticket, now: float) -> None:
        assert self._outlet is not None, "a gateway is connected before anything is submitted"
        self._outlet.send(request, ticket, now)

    def _refuse(self, request: SimRequest, shed: Shed, now: float) -> None:
        self._refuse_after(request, shed.retry_after_s, now)

    def _refuse_after(self, request: SimRequest, retry_after_s: float, now: float) -> None:
        assert self._outlet is not None, "a gateway is connected before anything is submitted"
        self._outlet.refuse(request, retry_after_s, now)


class _Timed(Policy):
    """The policy, with the time of each decision."""

    def __init__(self, policy: Policy, clock_ns: Callable[[], int] | None) -> None:
        self._policy = policy
        self._clock_ns = clock_ns
        self.decision_ns: list[int] = []

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket | None:
        if self._clock_ns is None:
            return self._policy.place(request, candidates, now)
        began = self._clock_ns()
        ticket = self._policy.place(request, candidates, now)
        self.decision_ns.append(self._clock_ns() - began)
        return ticket

    def adopt(self, request: PlacementRequest, replica: ReplicaId, rank: int, now: float) -> Ticket:
        return self._policy.adopt(request, replica, rank, now)

    def first_token(self, ticket: Ticket, now: float) -> None:
        self._policy.first_token(ticket, now)

    def ended(self, ticket: Ticket, usage: Usage | None, now: float) -> None:
        self._policy.ended(ticket, usage, now)

    def changed(self, facts: ReplicaFacts) -> None:
        self._policy.changed(facts)

    def removed(self, replica: ReplicaId) -> None:
        self._policy.removed(replica)

    def restarted(self, replica: ReplicaId) -> None:
        self._policy.restarted(replica)

    def scraped(self, replica: ReplicaId, load: EngineLoad, now: float) -> None:
        self._policy.scraped(replica, load, now)

    def stored(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self._policy.stored(replica, rank, blocks, now)

    def evicted(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self._policy.evicted(replica, rank, blocks, now)
