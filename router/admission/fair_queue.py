"""The requests of one model that wait: fair across tenants within a class, classes in order but none forgotten.

A higher class goes first, with two exceptions while it and a lower one wait, both paid from one account of the lower class:
  - its floor: of every token dispatched the class is owed its share, and is served once it is owed its next request;
  - promotion: when its oldest request has waited longer than `promote_after_s` it is served at once, and its share is
    `promoted_share` as long as that lasts.
Within a class see `router.admission.tenant_shares`; within a tenant the earliest deadline goes first, and a request without one
(or with a late one) counts as due when its promotion would be, so that deadlines starve nobody.

A request that had the right of way, waited longer than its bound and still could not be placed is looked at before all others
from then on: what its replicas can take next is offered to it first.

Starving requests may fit nowhere, so time in which only such wait says nothing about how fast others are served: when a search
finds nothing else, the time from the last dispatch to the next arrival or dispatch is in no rate and no standstill.
"""

import enum
from collections.abc import Callable
from typing import NamedTuple

from router.admission.priorities import RANKED, AdmissionSettings, ClassLimits
from router.admission.service_rate import ServiceRate
from router.admission.tenant import Charge
from router.admission.tenant_shares import TenantShares
from router.admission.waiting import Ending, Waiting
from router.policy.interface import Priority
from router.types import ReplicaId


class Turn(enum.Enum):
    """Why a request is next."""

    IN_ORDER = enum.auto()
    FLOOR = enum.auto()  # its class is owed a share
    STARVING_CLASS = enum.auto()
    STARVING_TENANT = enum.auto()
    PASSED_OVER = enum.auto()  # it had the right of way before, and its bound has passed


PROMOTED = frozenset((Turn.STARVING_CLASS, Turn.STARVING_TENANT, Turn.PASSED_OVER))


class Head(NamedTuple):
    """The request that a search should try next."""

    waiting: Waiting
    turn: Turn


class _Band:
    """One class."""

    __slots__ = ("limits", "looked_at", "owed", "rate", "shares", "stuck")

    def __init__(self, limits: ClassLimits, shares: TenantShares) -> None:
        self.limits = limits
        self.shares = shares
        self.rate = ServiceRate()
        self.owed = 0.0  # tokens, on account of the floor and of promotion
        self.looked_at = 0  # requests that the running search has passed over
        self.stuck = 0  # starving ones among all that it has passed over

    def is_starving(self, now: float) -> bool:
        oldest = self.shares.oldest
        return oldest is not None and oldest.since + self.limits.promote_after_s <= now


class FairQueue:
    """Pure and synchronous. Times are seconds of one monotonic clock, and must not go back.

    A search calls `next`, answers each head with `take`, `drop` or `pass_over`, and ends with `restore`. Everything else is
    called between searches.
    """

    def __init__(self, settings: AdmissionSettings, weight_of: Callable[[str], float] = lambda _: 1.0) -> None:
        """`weight_of` is a tenant's weight, above 0: its share of the tokens relative to others'."""
        self.closed: frozenset[ReplicaId] = frozenset()  # replicas that a starving request waits for, as of the last search
        self.waiting = 0
        self.rate = ServiceRate()
        self.served_at = 0.0  # the last dispatch, or when the first came of those that wait besides the stuck
        self.stuck = 0  # starving requests that the last search could not place
        self._settings = settings
        self._bands = {
            priority: _Band(
                settings.limits[priority],
                TenantShares(
                    promote_after_s=settings.limits[priority].promote_after_s,
                    promoted_share=settings.promoted_share,
                    idle_max=settings.idle_tenants_max,
                    weight_of=weight_of,
                ),
            )
            for priority in RANKED
        }
        self._sequence = 0
        self._passed_over: list[Waiting] = []  # with a right to be looked at first
        self._looked_at = 0  # how many of those the running search has passed over

    def waiting_of(self, priority: Priority) -> int:
        return self._bands[priority].shares.waiting

    def tokens_of(self, priority: Priority) -> float:
        return self._bands[priority].shares.tokens

    def waiting_of_tenant(self, priority: Priority, tenant: str) -> int:
        return self._bands[priority].shares.waiting_of(tenant)

    @property
    def tenants(self) -> int:
        """How many are remembered, each once per class."""
        return sum(band.shares.tenants for band in self._bands.values())

    def push(self, waiting: Waiting) -> None:
        """From its `since` on the request waits."""
        band = self._bands[waiting.request.priority]
        due_at = waiting.since + band.limits.promote_after_s
        if waiting.deadline is not None:
            due_at = min(due_at, max(waiting.deadline, waiting.since))
        waiting.due_at = due_at
        waiting.sequence = self._sequence
        self._sequence += 1
        band.shares.push(waiting)
        if self.waiting <= self.stuck:
            self.served_at = waiting.since
        self.waiting += 1
        self.rate.began(waiting.since)
        band.rate.began(waiting.since)

    def ranks_first(self, priority: Priority, now: float) -> bool:
        """Whether a request that arrives now goes before all that wait, but for those that `closed` is kept for."""
        is_higher = True
        for ranked, band in self._bands.items():
            if band.shares.waiting and (is_higher or self._lifted(band, now) is not None):
                return False
            is_higher = is_higher and ranked is not priority
        return True

    def next(self, now: float) -> Head | None:
        """The next head that the search has not passed over; None: it is at its end."""
        if self._looked_at < len(self._passed_over):
            return Head(self._passed_over[self._looked_at], Turn.PASSED_OVER)
        first: Head | None = None
        is_contended = False
        for band in self._bands.values():
            if not band.shares.waiting:
                continue
            turn = self._lifted(band, now) if is_contended else Turn.IN_ORDER
            is_contended = True
            if band.looked_at >= self._settings.heads_max or (first is not None and turn in (None, Turn.IN_ORDER)):
                continue
            found = band.shares.head(now)
            if found is None:
                continue
            waiting, is_promoted = found
            if turn is Turn.STARVING_CLASS:
                return Head(waiting, turn)
            if turn is Turn.FLOOR:
                first = Head(waiting, turn)
            elif first is None:
                first = Head(waiting, Turn.STARVING_TENANT if is_promoted else Turn.IN_ORDER)
        return first

    def pass_over(self, head: Head, now: float, *, had_right_of_way: bool) -> None:
        """It cannot be placed now. `had_right_of_way`: none that wants its replicas was passed over before it."""
        band = self._bands[head.waiting.request.priority]
        if self.is_starving(head.waiting, now):
            self._is_stuck(band)
        if head.turn is Turn.PASSED_OVER:
            self._looked_at += 1
            return
        band.looked_at += 1
        band.shares.pass_over(head.waiting)
        if had_right_of_way and self.is_starving(head.waiting, now) and head.waiting not in self._passed_over:
            self._passed_over.append(head.waiting)
            self._looked_at += 1

    def take(self, head: Head, tokens: float, now: float) -> Charge:
        """The head is dispatched, and its tenant charged `tokens`."""
        waiting = head.waiting
        self._account(waiting.request.priority, waiting.cost, now)
        band = self._bands[waiting.request.priority]
        charge = band.shares.take(waiting, tokens, now, is_promoted=head.turn is Turn.STARVING_TENANT)
        self._removed(band, waiting, now)
        return charge

    def drop(self, waiting: Waiting, ending: Ending, now: float) -> None:
        """Within a search: the request waits no more, undispatched."""
        band = self._bands[waiting.request.priority]
        band.shares.remove(waiting, ending)
        self._removed(band, waiting, now)

    def restore(self, closed: frozenset[ReplicaId] = frozenset()) -> None:
        """Ends a search. `closed`: the replicas that it left to starving requests."""
        self.closed = closed
        self._looked_at = 0
        self.stuck = sum(band.stuck for band in self._bands.values())
        for band in self._bands.values():
            band.looked_at = band.stuck = 0
            band.shares.restore()

    def withdraw(self, waiting: Waiting, ending: Ending, now: float) -> None:
        """Between searches: as `drop`."""
        self.drop(waiting, ending, now)
        self._bands[waiting.request.priority].shares.restore()

    def charge(self, priority: Priority, tenant: str, cost: float, tokens: float, now: float) -> Charge:
        """A request that ranks first is dispatched on arrival, while others wait."""
        self._account(priority, cost, now)
        return self._bands[priority].shares.charge(tenant, tokens)

    def settle(self, charge: Charge, priority: Priority, used: float) -> None:
        """A dispatched request has ended, and used so many tokens. Exactly once for each charge."""
        self._bands[priority].shares.settle(charge, used)

    def expired(self, now: float) -> list[Waiting]:
        """Takes out those that have waited longer than their class allows."""
        gone: list[Waiting] = []
        for band in self._bands.values():
            while (oldest := band.shares.oldest) is not None and oldest.since + band.limits.max_wait_s <= now:
                self.drop(oldest, Ending.EXPIRED, now)
                gone.append(oldest)
            band.shares.restore()
        return gone

    def next_expiry(self) -> float | None:
        return min(
            (
                oldest.since + band.limits.max_wait_s
                for band in self._bands.values()
                if (oldest := band.shares.oldest) is not None
            ),
            default=None,
        )

    def is_starving(self, waiting: Waiting, now: float) -> bool:
        return waiting.since + self._bands[waiting.request.priority].limits.promote_after_s <= now

    def ahead_of(self, priority: Priority, tenant: str) -> tuple[float, float]:
        """Tokens before a request that arrives now: those of its own class, and those of it and the classes above."""
        own = self._bands[priority].shares.ahead_of(tenant)
        above = sum(self._bands[higher].shares.tokens for higher in RANKED[: RANKED.index(priority)])
        return own, own + above

    def class_rate(self, priority: Priority, now: float) -> float | None:
        """Tokens per second dispatched from one class while it waited."""
        return self._bands[priority].rate.per_second(now)

    def _lifted(self, band: _Band, now: float) -> Turn | None:
        """Why the class goes before the higher one that waits, if it does."""
        if band.is_starving(now) and band.owed >= 0.0:
            return Turn.STARVING_CLASS
        if band.owed <= 0.0:
            return None
        found = band.shares.head(now)
        if found is None:
            return None
        # What it is owed beyond its next request, because that could not be placed, is forgone: it would come in one burst.
        cost = found[0].cost
        if band.owed < cost:
            return None
        band.owed = cost
        return Turn.FLOOR

    def _account(self, dispatched: Priority, cost: float, now: float) -> None:
        self.served_at = now
        if self.waiting:
            self.rate.began(now)
        self.rate.served(cost, now)
        is_contended = False
        for priority, band in self._bands.items():
            if priority is dispatched:
                if band.shares.waiting:
                    band.rate.began(now)
                band.rate.served(cost, now)
            if band.shares.waiting and is_contended:
                share = self._settings.promoted_share if band.is_starving(now) else band.limits.floor
                band.owed += share * cost
                if priority is dispatched:
                    band.owed = max(band.owed - cost, -cost)
            is_contended = is_contended or band.shares.waiting > 0 or priority is dispatched

    def _is_stuck(self, band: _Band) -> None:
        band.stuck += 1
        if band.stuck == band.shares.waiting:
            band.rate.discounted()
        if sum(other.stuck for other in self._bands.values()) == self.waiting:
            self.rate.discounted()

    def _removed(self, band: _Band, waiting: Waiting, now: float) -> None:
        self.waiting -= 1
        if waiting in self._passed_over:
            if self._passed_over.index(waiting) < self._looked_at:
                self._looked_at -= 1
            self._passed_over.remove(waiting)
        if not band.shares.waiting:
            band.owed = 0.0
            band.rate.ceased(now)
        if not self.waiting:
            self.rate.ceased(now)
            self.closed = frozenset()
            self.stuck = 0
