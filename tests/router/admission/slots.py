"""A policy whose replicas run a fixed number of requests at once, and a fleet of them that works off tokens at a fixed rate."""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from protocol.usage import Usage
from router.admission.dispatcher import Dispatcher
from router.admission.priorities import AdmissionSettings
from router.admission.waiting import Shed, Waiting
from router.policy.interface import PlacementRequest, Policy, Priority, Ticket
from router.policy.prompt import BytesPrompt
from router.types import ReplicaId

A, B = ReplicaId("a:1"), ReplicaId("b:1")


class Slots(Policy):
    """First replica with a free slot; None if there is none. Fails the test when a ticket ends twice."""

    def __init__(self, slots: int = 1) -> None:
        self.slots = slots
        self.running: dict[Ticket, ReplicaId] = {}
        self.log: list[tuple[PlacementRequest, ReplicaId]] = []
        self.tries = 0

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket | None:
        assert candidates
        self.tries += 1
        for replica in candidates:
            if sum(busy == replica for busy in self.running.values()) < self.slots:
                ticket = Ticket(request, replica)
                self.running[ticket] = replica
                self.log.append((request, replica))
                return ticket
        return None

    def ended(self, ticket: Ticket, usage: Usage | None, now: float) -> None:
        del self.running[ticket]


def asks(
    tenant: str = "",
    tokens: int = 100,
    priority: Priority = Priority.DEFAULT,
    model: str = "m",
) -> PlacementRequest:
    """A request of so many prompt tokens at 4 bytes each, and no output."""
    return PlacementRequest(model, BytesPrompt(b"x" * (4 * tokens), 0), tenant=tenant, priority=priority, output_max=0)


def at(*replicas: ReplicaId) -> Callable[[], Sequence[ReplicaId]]:
    return lambda: replicas


def uses(request: PlacementRequest) -> Usage:
    return Usage(prompt=request.prompt.size // 4, completion=0)


@dataclass
class Served:
    """What became of a run's requests. Times are seconds since each arrived."""

    started: list[tuple[PlacementRequest, float]] = field(default_factory=list)
    shed: list[tuple[PlacementRequest, Shed]] = field(default_factory=list)
    expired: list[PlacementRequest] = field(default_factory=list)
    predicted: list[tuple[float, float]] = field(default_factory=list)  # (predicted, actual) of those that waited
    tokens: dict[str, int] = field(default_factory=dict)  # by tenant, of those started within the observed time

    def waits(self, tenant: str) -> list[float]:
        return sorted(wait for request, wait in self.started if request.tenant == tenant)


def run(
    arrivals: Iterable[tuple[float, PlacementRequest]],
    *,
    rate: float,
    slots: int = 4,
    settings: AdmissionSettings | None = None,
    observed: tuple[float, float] = (0.0, float("inf")),
) -> Served:
    """One replica whose `slots` each work off `rate / slots` tokens per second."""
    policy = Slots(slots)
    dispatcher = Dispatcher(policy, settings)
    served = Served()
    events: list[tuple[float, int, PlacementRequest | Ticket]] = []
    order = 0
    for moment, request in arrivals:
        events.append((moment, order, request))
        order += 1
    heapq.heapify(events)
    arrived: dict[PlacementRequest, tuple[float, float | None]] = {}

    def start(ticket: Ticket, now: float) -> None:
        nonlocal order
        request = ticket.request
        size = request.prompt.size // 4
        since, predicted = arrived[request]
        served.started.append((request, now - since))
        if predicted is not None:
            served.predicted.append((predicted, now - since))
        if observed[0] <= now < observed[1]:
            served.tokens[request.tenant] = served.tokens.get(request.tenant, 0) + size
        heapq.heappush(events, (now + size * slots / rate, order, ticket))
        order += 1

    while events or dispatcher.waiting:
        timer = dispatcher.next_deadline()
        if events and (timer is None or events[0][0] <= timer):
            now, _, event = heapq.heappop(events)
            if isinstance(event, Ticket):
                dispatcher.ended(event, uses(event.request), now)
            else:
                predicted = dispatcher.predicted_wait(event.priority, now, model=event.model, tenant=event.tenant)
                arrived[event] = now, predicted
                answer = dispatcher.submit(event, at(A), now)
                if isinstance(answer, Ticket):
                    arrived[event] = now, None
                    start(answer, now)
                elif isinstance(answer, Shed):
                    served.shed.append((event, answer))
        else:
            assert timer is not None
            now = timer
        for waiting, ticket in dispatcher.due(now):
            assert isinstance(waiting, Waiting)
            assert ticket is not None
            start(ticket, now)
        served.expired += [waiting.request for waiting in dispatcher.expired(now)]
    return served
