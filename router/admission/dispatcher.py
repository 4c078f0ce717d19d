"""Late binding: a request is placed when a replica can start it, not when it arrives.

The router and the simulator run the same object. It calls the policy, keeps those that cannot be placed yet in a fair queue
per model (tenants compete for the replicas of one model), and refuses those that would wait too long.

Predicted wait of a request of class c and tenant t, in seconds:

    max( A / R,  A_c / R_c,  now - last dispatch )

    A_c  tokens of class c that fair service dispatches before it: all that t waits with, and of each other tenant as much as
         it gets until t has had that
    A    A_c and all that waits in the classes above
    R    learned tokens per second that the model's fleet dispatches while something waits
    R_c  the same for class c while it waits, so that what higher classes will take meanwhile is in it
    the last term holds when something waits: if nothing could be placed for so long, nor will it be at once. It is left out
         when all that wait are starving and passed over by the last search: they may fit nowhere, while others do

Before a rate is learned its term is left out, and before R is, nothing is refused for its predicted wait.
"""

import math
from collections.abc import Callable, Sequence

from protocol.usage import Usage
from router.admission.counts import Counts
from router.admission.fair_queue import PROMOTED, FairQueue, Head, Turn
from router.admission.priorities import AdmissionSettings
from router.admission.tenant import Charge
from router.admission.token_cost import EstimatedCost, used
from router.admission.waiting import Candidates, Ending, Shed, ShedReason, Waiting
from router.policy.interface import PlacementRequest, Policy, Priority, Ticket
from router.types import ReplicaId

RETRY_AFTER_MAX_S = 60
# Prompts that wait, of all models together. A request holds its body as long as it waits, and counts of requests alone would
# let large bodies fill the memory.
WAITING_BYTES_MAX = 512 * 1024 * 1024
# Predictions are off by some per cent. A request is let in only if it is predicted to start within this share of its bound,
# so that it does not wait for nothing and expire just before its turn.
_ADMITTED_SHARE = 0.9
# A tenant's part of the places is this many times the free ones (the dynamic thresholds of Choudhury and Hahne, 1998): one
# alone gets 8/9 of them, and however many one sends, there is room left for others.
_PLACES_PER_FREE_ONE = 8


def _estimate_stands(ticket: Ticket, estimate: float) -> float:
    return estimate


class Dispatcher:
    """Synchronous; one per router. `now` is seconds of one monotonic clock; a step back counts as no step.

    Every request that `submit` answers with a Waiting ends exactly once: it is returned by `due` or by `expired`, or given to
    `withdraw`. Its `ending` says how. Every ticket must be given to `ended`.
    """

    def __init__(
        self,
        policy: Policy,
        settings: AdmissionSettings | None = None,
        *,
        cost_of: Callable[[PlacementRequest], float] | None = None,
        charge_of: Callable[[Ticket, float], float] = _estimate_stands,
        weight_of: Callable[[str], float] = lambda _: 1.0,
    ) -> None:
        """
        Args:
            cost_of: estimated tokens of a request, outputs counted twice; above 0. Default: see `EstimatedCost`.
            charge_of: the same once it is placed, of its ticket and the first estimate, for a policy that knows what is cached.
            weight_of: a tenant's weight, above 0: its share of the tokens relative to others'.
        """
        self.counts = Counts()
        self._policy = policy
        self._settings = AdmissionSettings() if settings is None else settings
        self._cost_of = EstimatedCost() if cost_of is None else cost_of
        self._charge_of = charge_of
        self._weight_of = weight_of
        self._queues: dict[str, FairQueue] = {}  # by model; each that ever had to wait
        self._waiting = 0
        self._waiting_bytes = 0
        self._charges: dict[Ticket, tuple[FairQueue, Charge]] = {}
        self._placed: list[tuple[Waiting, Ticket | None]] = []  # by a search, not yet returned
        self._now = -math.inf
        self._searched_at = -math.inf

    def submit(
        self, request: PlacementRequest, candidates: Candidates, now: float, deadline: float | None = None
    ) -> Ticket | Waiting | Shed:
        """Places the request at once if nobody of its model waits, or nobody who goes before it; else it waits or is refused.

        `deadline` is when the client wants its first token; it orders the requests of one tenant, and ends nothing.
        """
        queue = self._queues.get(request.model)
        if queue is None or not queue.waiting:
            # Whatever is used while nobody waits is lacked by nobody, so it is not charged.
            chosen = candidates()
            if chosen and (ticket := self._policy.place(request, chosen, now)) is not None:
                self.counts.dispatched[request.priority] += 1
                return ticket
        else:
            chosen = candidates()
            if chosen and queue.ranks_first(request.priority, self._clock(now)):
                open_now = _without(chosen, queue.closed)
                if open_now and (ticket := self._policy.place(request, open_now, now)) is not None:
                    self._charge_newcomer(queue, ticket, now)
                    return ticket
        if not chosen:
            return self._shed(request, ShedReason.NO_REPLICA, 0.0, 0.0)
        return self._wait(request, candidates, self._clock(now), deadline)

    def due(self, now: float) -> list[tuple[Waiting, Ticket | None]]:
        """What can be placed now, in fair order. A ticket of None: the request has no candidate any more, or its `error` is
        what the policy or its `candidates` raised; others are placed all the same.

        To be called whenever something may have become free (a first token, an end, a replica added or changed), and at
        `next_deadline`.
        """
        now = self._clock(now)
        self._searched_at = now
        if self._waiting:
            for queue in self._queues.values():
                if queue.waiting:
                    self._search(queue, now)
        placed, self._placed = self._placed, []
        return placed

    def expired(self, now: float) -> list[Waiting]:
        """Those that have waited longer than their class allows; they wait no more. Call `due` before it."""
        now = self._clock(now)
        gone: list[Waiting] = []
        if self._waiting:
            for queue in self._queues.values():
                gone += queue.expired(now)
        for waiting in gone:
            self._ended_waiting(waiting, Ending.EXPIRED)
        return gone

    def withdraw(self, waiting: Waiting, now: float) -> bool:
        """The client has left. False: it waited no more, so its ticket is in the hands of whoever called `due`."""
        if waiting.ending is not None:
            return False
        self._queues[waiting.request.model].withdraw(waiting, Ending.WITHDRAWN, self._clock(now))
        self._ended_waiting(waiting, Ending.WITHDRAWN)
        return True

    def first_token(self, ticket: Ticket, now: float) -> None:
        self._policy.first_token(ticket, now)

    def ended(self, ticket: Ticket, usage: Usage | None, now: float) -> None:
        """The request has left its replica. Without `usage` its tenant pays what was estimated."""
        charged = self._charges.pop(ticket, None)
        if charged is not None:
            queue, charge = charged
            queue.settle(charge, ticket.request.priority, charge.tokens if usage is None else used(usage))
        self._policy.ended(ticket, usage, now)

    def next_deadline(self) -> float | None:
        """When `due` and `expired` should be called though nothing happens; None: nobody waits."""
        if self._placed:
            return self._now
        if not self._waiting:
            return None
        expiries = [at for queue in self._queues.values() if (at := queue.next_expiry()) is not None]
        return min(self._searched_at + self._settings.poll_s, *expiries)

    def predicted_wait(self, priority: Priority, now: float, *, model: str | None = None, tenant: str = "") -> float | None:
        """Seconds that a request would wait if it came now and were not placed at once; of the slowest model if none is named.

        None before it is learned.
        """
        queues = list(self._queues.values()) if model is None else [queue for queue in (self._queues.get(model),) if queue]
        waits = [
            wait for queue in queues if (wait := _predicted_wait(queue, priority, tenant, max(now, self._now))) is not None
        ]
        return max(waits, default=None)

    @property
    def waiting(self) -> int:
        return self._waiting

    def waiting_of(self, priority: Priority) -> int:
        """Requests of the class that wait."""
        return sum(queue.waiting_of(priority) for queue in self._queues.values())

    def tokens_of(self, priority: Priority) -> float:
        """Estimated tokens of the class that wait."""
        return sum(queue.tokens_of(priority) for queue in self._queues.values())

    @property
    def tenants(self) -> int:
        """How many are remembered, once per model and class."""
        return sum(queue.tenants for queue in self._queues.values())

    def _wait(self, request: PlacementRequest, candidates: Candidates, now: float, deadline: float | None) -> Waiting | Shed:
        queue = self._queues.get(request.model)
        if queue is None:
            queue = self._queues[request.model] = FairQueue(self._settings, self._weight_of)
        priority = request.priority
        limits = self._settings.limits[priority]
        predicted = _predicted_wait(queue, priority, request.tenant, now)
        admitted_s = _ADMITTED_SHARE * limits.max_wait_s
        if predicted is not None and predicted > admitted_s:
            return self._shed(request, ShedReason.PREDICTED_WAIT, predicted, predicted - admitted_s)
        free = limits.waiting_max - queue.waiting_of(priority)
        is_heavy = self._waiting_bytes + request.prompt.size > WAITING_BYTES_MAX
        if is_heavy or queue.waiting_of_tenant(priority, request.tenant) >= _PLACES_PER_FREE_ONE * free:
            return self._shed(request, ShedReason.QUEUE_FULL, predicted or 0.0, predicted or 0.0)
        if not self._waiting:
            self._searched_at = now  # it was tried just now
        cost = self._cost_of(request)
        waiting = Waiting(request, candidates, cost=cost, since=now, deadline=deadline)
        queue.push(waiting)
        self._waiting += 1
        self._waiting_bytes += request.prompt.size
        return waiting

    def _search(self, queue: FairQueue, now: float) -> None:
        closed: set[ReplicaId] = set()
        wanted: set[ReplicaId] = set()  # by those that could not be placed
        failures: dict[tuple[ReplicaId, ...], int] = {}
        try:
            while (head := queue.next(now)) is not None:
                waiting = head.waiting
                try:
                    chosen = waiting.candidates()
                    ticket = self._try(waiting.request, tuple(_without(chosen, closed)), failures, now)
                except Exception as error:  # the fault of this one: it must not hold up the others
                    waiting.error = error
                    self._drop(queue, waiting, Ending.FAILED, now)
                    continue
                if not chosen:
                    self._drop(queue, waiting, Ending.NO_REPLICA, now)
                    continue
                if ticket is not None:
                    self._dispatch(queue, head, ticket, now)
                    continue
                had_right_of_way = wanted.isdisjoint(chosen)
                queue.pass_over(head, now, had_right_of_way=had_right_of_way)
                wanted.update(chosen)
                if (had_right_of_way or head.turn is Turn.PASSED_OVER) and queue.is_starving(waiting, now):
                    # One is kept for it: it needs no more, and if it fits nowhere, others still have the rest of the fleet.
                    closed.update([replica for replica in chosen if replica not in closed][:1])
        finally:
            queue.restore(frozenset(closed))

    def _try(
        self,
        request: PlacementRequest,
        open_now: tuple[ReplicaId, ...],
        failures: dict[tuple[ReplicaId, ...], int],
        now: float,
    ) -> Ticket | None:
        failed = failures.get(open_now, 0)
        if not open_now or failed >= self._settings.tries_per_candidates:
            return None
        ticket = self._policy.place(request, open_now, now)
        if ticket is None:
            failures[open_now] = failed + 1
        return ticket

    def _drop(self, queue: FairQueue, waiting: Waiting, ending: Ending, now: float) -> None:
        queue.drop(waiting, ending, now)
        self._ended_waiting(waiting, ending)
        self._placed.append((waiting, None))

    def _dispatch(self, queue: FairQueue, head: Head, ticket: Ticket, now: float) -> None:
        waiting = head.waiting
        charge = queue.take(head, self._charge_of(ticket, waiting.cost), now)
        self._charges[ticket] = (queue, charge)
        self._ended_waiting(waiting, Ending.DISPATCHED)
        self._placed.append((waiting, ticket))
        self.counts.dispatched[waiting.request.priority] += 1
        if head.turn in PROMOTED:
            self.counts.promoted[waiting.request.priority] += 1

    def _charge_newcomer(self, queue: FairQueue, ticket: Ticket, now: float) -> None:
        request = ticket.request
        cost = self._cost_of(request)
        charge = queue.charge(request.priority, request.tenant, cost, self._charge_of(ticket, cost), self._clock(now))
        self._charges[ticket] = (queue, charge)
        self.counts.dispatched[request.priority] += 1

    def _ended_waiting(self, waiting: Waiting, ending: Ending) -> None:
        self._waiting -= 1
        self._waiting_bytes -= waiting.request.prompt.size
        self.counts.ended[waiting.request.priority, ending] += 1

    def _shed(self, request: PlacementRequest, reason: ShedReason, predicted_s: float, until_s: float) -> Shed:
        self.counts.shed[request.priority, reason] += 1
        return Shed(reason, max(1, math.ceil(min(until_s, RETRY_AFTER_MAX_S))), predicted_s)

    def _clock(self, now: float) -> float:
        """Ages are compared in the order of arrival, so the clock must not go back."""
        if now > self._now:
            self._now = now
        return self._now


def _without(chosen: Sequence[ReplicaId], closed: frozenset[ReplicaId] | set[ReplicaId]) -> Sequence[ReplicaId]:
    return [replica for replica in chosen if replica not in closed] if closed else chosen


def _predicted_wait(queue: FairQueue, priority: Priority, tenant: str, now: float) -> float | None:
    """See the head of this module; None before the fleet's rate is learned."""
    rate = queue.rate.per_second(now)
    if rate is None:
        return None
    own, ahead = queue.ahead_of(priority, tenant)
    wait = now - queue.served_at if queue.waiting > queue.stuck else 0.0
    if ahead:
        wait = max(wait, ahead / rate if rate else math.inf)
    class_rate = queue.class_rate(priority, now)
    if own and class_rate is not None:
        wait = max(wait, own / class_rate if class_rate else math.inf)
    return wait
