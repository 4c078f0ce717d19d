"""Whose turn it is within one priority class: tenants get equal shares of the tokens, however much they send.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each dispatch adds its
tokens, divided by the tenant's weight, to the tenant's counter, and the least counter is served next. A tenant that returns
is lifted to the least counter of those that wait, so that being away earns nothing.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable

from router.admission.backlogs import Backlogs
from router.admission.tenant import Charge, Tenant
from router.admission.waiting import Ending, Waiting

_SPARE_DEAD = 64  # entries that may lie dead in a heap, besides as many as are alive


class TenantShares:
    """The requests of one class and model that wait, and their tenants. Every operation is O(log n), amortised.

    A search looks at heads (`head`), and takes each (`take`) or passes it over (`pass_over`); `restore` ends it.
    """

    def __init__(
        self, *, promote_after_s: float, promoted_share: float, idle_max: int, weight_of: Callable[[str], float]
    ) -> None:
        self.waiting = 0
        self.tokens = 0.0  # that wait
        self._promote_after_s = promote_after_s
        # Tokens to be dispatched in turn for each one that a starving tenant got out of turn.
        self._in_turn_per_promoted = (1.0 - promoted_share) / promoted_share
        self._promotion_debt = 0.0
        self._idle_max = idle_max
        self._weight_of = weight_of
        self._tenants: dict[str, Tenant] = {}
        self._by_age: OrderedDict[Waiting, None] = OrderedDict()
        self._backlogs = Backlogs()
        self._orders = itertools.count()
        self._active = 0  # tenants that wait
        self._turns: list[tuple[int, float, int, int, Tenant]] = []  # (round, counter, order, version, tenant)
        self._starving: list[tuple[float, int, Tenant]] = []  # (when it starves, or before that, order, tenant)
        self._debtors: list[tuple[float, int, Tenant]] = []  # (counter, or less, order, tenant): idle, above their share
        self._touched: list[Tenant] = []  # passed over by the running search
        self._resting: list[Tenant] = []  # that may have become idle
        self._last = 0.0  # counter at which the last tenant was served
        self._floor = 0.0  # greatest counter that was forgotten for want of room

    @property
    def oldest(self) -> Waiting | None:
        return next(iter(self._by_age), None)

    @property
    def tenants(self) -> int:
        """How many are remembered."""
        return len(self._tenants)

    def waiting_of(self, name: str) -> int:
        tenant = self._tenants.get(name)
        return 0 if tenant is None else tenant.waiting

    def push(self, entry: Waiting) -> None:
        """Between searches only. `entry.since` must not be less than that of any before it."""
        tenant = self._returning(entry.request.tenant)
        before = tenant.tokens
        tenant.push(entry)
        self._backlogs.changed(before, tenant.tokens, tenant.weight)
        self._by_age[entry] = None
        self.waiting += 1
        self.tokens += entry.cost
        if tenant.waiting == 1:
            self._active += 1
            tenant.waits_from = entry.since
            self._queue_turn(tenant)
            self._watch(tenant)

    def remove(self, entry: Waiting, ending: Ending) -> None:
        """`entry` waits no more, and was not dispatched. `restore` must follow."""
        tenant = self._tenants[entry.request.tenant]
        self._remove(tenant, entry, ending)
        self._resting.append(tenant)

    def head(self, now: float) -> tuple[Waiting, bool] | None:
        """The next in turn that was not passed over, and whether a starving tenant goes before its turn."""
        turn = self._next_turn()
        if turn is None:
            return None
        starving = self._next_starving(now) if self._promotion_debt <= 0.0 else None
        tenant = turn if starving is None else starving
        entry = tenant.head()
        if entry is None:  # a tenant is in either heap only while it has a request to offer
            raise RuntimeError(f"tenant {tenant.name!r} has its turn but no request")
        return entry, tenant is not turn

    def pass_over(self, entry: Waiting) -> None:
        """The head cannot be placed now. Its tenant's next request comes behind all other tenants' heads."""
        tenant = self._tenants[entry.request.tenant]
        if not tenant.round:
            self._touched.append(tenant)
        tenant.pass_over()
        if tenant.head() is None:
            tenant.version += 1
        else:
            self._queue_turn(tenant, keeps_order=True)

    def restore(self) -> None:
        """What was passed over is in its place again."""
        for tenant in self._touched:
            tenant.restore()
            if tenant.waiting:
                self._queue_turn(tenant, keeps_order=True)
                self._watch(tenant)
        self._touched.clear()
        self._forget()

    def take(self, entry: Waiting, tokens: float, now: float, *, is_promoted: bool) -> Charge:
        """`entry` is dispatched, and its tenant charged `tokens`."""
        tenant = self._tenants[entry.request.tenant]
        self._last = max(self._last, tenant.counter)
        if is_promoted:
            self._promotion_debt += tokens * self._in_turn_per_promoted
        else:
            self._promotion_debt = max(0.0, self._promotion_debt - tokens)
        charge = Charge(tenant, tokens)
        tenant.waits_from = now
        self._remove(tenant, entry, Ending.DISPATCHED)
        if tenant.waiting and tenant.head() is not None:
            self._queue_turn(tenant)
        return charge

    def charge(self, name: str, tokens: float) -> Charge:
        """A request that did not have to wait is dispatched while others do."""
        tenant = self._returning(name)
        if not self.waiting:
            self._last = max(self._last, tenant.counter)
        return Charge(tenant, tokens)

    def settle(self, charge: Charge, used: float) -> None:
        """The request has ended, and used so many tokens. Exactly once for each charge; between searches only."""
        charge.settle(used)
        tenant = charge.tenant
        if tenant.waiting:
            self._queue_turn(tenant)
        else:
            self._resting.append(tenant)
            self._forget()

    def ahead_of(self, name: str) -> float:
        """Tokens that fair service dispatches before a request that arrives now."""
        lift = self._lift()
        tenant = self._tenants.get(name)
        if tenant is None:
            return 0.0
        return self._backlogs.up_to(max(0.0, tenant.counter - lift) + tenant.tokens / tenant.weight)

    def _lift(self) -> float:
        """The counter below which nobody starts."""
        turn = self._next_turn()
        return max(self._floor, self._last if turn is None else turn.counter)

    def _returning(self, name: str) -> Tenant:
        """The tenant, lifted unless it waits already."""
        tenant = self._tenants.get(name)
        if tenant is None:
            weight = self._weight_of(name)
            if not 0.0 < weight < float("inf"):
                raise ValueError(f"the weight of tenant {name!r} is {weight}; it must be above 0, e.g. 1")
            tenant = self._tenants[name] = Tenant(name, weight)
        if not tenant.waiting:
            lift = self._lift()
            if tenant.counter < lift:
                tenant.lifted += lift - tenant.counter
                tenant.counter = lift
        return tenant

    def _remove(self, tenant: Tenant, entry: Waiting, ending: Ending) -> None:
        entry.ending = ending
        before = tenant.tokens
        tenant.removed(entry)
        self._backlogs.changed(before, tenant.tokens, tenant.weight)
        del self._by_age[entry]
        self.waiting -= 1
        self.tokens = self.tokens - entry.cost if self.waiting else 0.0
        if not tenant.waiting:
            self._active -= 1
            tenant.version += 1
        elif tenant.head() is None:
            tenant.version += 1

    def _next_turn(self) -> Tenant | None:
        turns = self._turns
        while turns:
            _, _, _, version, tenant = turns[0]
            if version == tenant.version:
                return tenant
            heapq.heappop(turns)
        return None

    def _next_starving(self, now: float) -> Tenant | None:
        starving = self._starving
        while starving and starving[0][0] <= now:
            tenant = starving[0][2]
            starves_at = tenant.waits_from + self._promote_after_s
            if not tenant.waiting or tenant.round:
                heapq.heappop(starving)  # `restore` puts those back that were only passed over
                tenant.is_among_starving = False
            elif starves_at > now:
                heapq.heapreplace(starving, (starves_at, next(self._orders), tenant))
            else:
                return tenant
        return None

    def _queue_turn(self, tenant: Tenant, *, keeps_order: bool = False) -> None:
        tenant.version += 1
        if not keeps_order:
            tenant.order = next(self._orders)
        heapq.heappush(self._turns, (tenant.round, tenant.counter, tenant.order, tenant.version, tenant))
        if len(self._turns) > 2 * self._active + _SPARE_DEAD:
            self._turns = [turn for turn in self._turns if turn[3] == turn[4].version]
            heapq.heapify(self._turns)

    def _watch(self, tenant: Tenant) -> None:
        if tenant.is_among_starving:
            return
        tenant.is_among_starving = True
        heapq.heappush(self._starving, (tenant.waits_from + self._promote_after_s, next(self._orders), tenant))
        if len(self._starving) > 2 * self._active + _SPARE_DEAD:
            for _, _, other in self._starving:
                other.is_among_starving = other.waiting > 0
            self._starving = [watched for watched in self._starving if watched[2].is_among_starving]
            heapq.heapify(self._starving)

    def _forget(self) -> None:
        """Keeps idle tenants in mind only as long as their counters say more than that of a newcomer would."""
        if not self._resting and not self._debtors:
            return
        for tenant in self._resting:
            if not tenant.waiting and not tenant.in_flight and not tenant.is_among_debtors:
                self._owes(tenant)
        self._resting.clear()
        debtors = self._debtors
        lift = self._lift()
        while debtors and (debtors[0][0] <= lift or len(debtors) > self._idle_max):
            counter, _, tenant = heapq.heappop(debtors)
            tenant.is_among_debtors = False
            if tenant.waiting or tenant.in_flight:
                continue  # it comes back when it is idle again
            if tenant.counter > counter:
                self._owes(tenant)  # it was in use meanwhile, and owes more
                continue
            if tenant.counter > lift:
                # No room: from now on everybody starts where it stood, so that it gains nothing by being forgotten.
                lift = self._floor = tenant.counter
            del self._tenants[tenant.name]

    def _owes(self, tenant: Tenant) -> None:
        tenant.is_among_debtors = True
        heapq.heappush(self._debtors, (tenant.counter, next(self._orders), tenant))
