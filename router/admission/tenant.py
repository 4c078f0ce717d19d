"""One tenant within one priority class of one model: what it has had, what it waits for, what it still has to pay."""

import heapq

from router.admission.waiting import Waiting

_SPARE_DEAD = 16  # entries that may lie dead in a heap, besides as many as are alive


class Tenant:
    """The virtual counter and the waiting requests of a tenant. Who is served next is decided by its class."""

    __slots__ = (
        "_aside",
        "_heap",
        "counter",
        "in_flight",
        "is_among_debtors",
        "is_among_starving",
        "lifted",
        "name",
        "order",
        "round",
        "tokens",
        "version",
        "waiting",
        "waits_from",
        "weight",
    )

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.counter = 0.0  # tokens it has had, per weight
        self.lifted = 0.0  # by how much it was raised in all, because it had been away
        self.in_flight = 0  # charges that are not settled
        self.waiting = 0
        self.tokens = 0.0  # that wait
        self.waits_from = 0.0  # since when it waits without having been served
        self.round = 0  # how often the running search has passed over one of its requests
        self.order = 0  # among tenants of the same counter
        self.version = 0  # of its entry in the class's heap; older entries there are dead
        self.is_among_starving = False
        self.is_among_debtors = False
        self._heap: list[tuple[float, int, Waiting]] = []
        self._aside: list[Waiting] = []

    def push(self, entry: Waiting) -> None:
        """Earliest deadline first, and in the order of arrival among those without one."""
        heapq.heappush(self._heap, (entry.due_at, entry.sequence, entry))
        self.waiting += 1
        self.tokens += entry.cost

    def removed(self, entry: Waiting) -> None:
        """`entry` has ended; its place in the heap is cleared later, unless too many are dead already."""
        self.waiting -= 1
        self.tokens = self.tokens - entry.cost if self.waiting else 0.0
        if len(self._heap) > 2 * self.waiting + _SPARE_DEAD:
            self._heap = [place for place in self._heap if place[2].ending is None]
            heapq.heapify(self._heap)

    def head(self) -> Waiting | None:
        """The request that goes first, of those that the running search has not passed over."""
        heap = self._heap
        while heap:
            entry = heap[0][2]
            if entry.ending is None:
                return entry
            heapq.heappop(heap)
        return None

    def pass_over(self) -> None:
        """Leaves the head out until `restore`."""
        self._aside.append(heapq.heappop(self._heap)[2])
        self.round += 1

    def restore(self) -> None:
        for entry in self._aside:
            if entry.ending is None:
                heapq.heappush(self._heap, (entry.due_at, entry.sequence, entry))
        self._aside.clear()
        self.round = 0


class Charge:
    """Tokens that a tenant was charged for one dispatch, until what it really used is known."""

    __slots__ = ("lifted", "tenant", "tokens")

    def __init__(self, tenant: Tenant, tokens: float) -> None:
        self.tenant = tenant
        self.tokens = tokens
        self.lifted = tenant.lifted
        tenant.counter += tokens / tenant.weight
        tenant.in_flight += 1

    def settle(self, used: float) -> None:
        """Charges what was really used instead."""
        tenant = self.tenant
        change = (used - self.tokens) / tenant.weight
        raised = tenant.lifted - self.lifted
        if raised:  # it was away meanwhile, and paid for this with the credit that it had then
            change = max(0.0, change - raised)
        tenant.counter = max(0.0, tenant.counter + change)
        tenant.in_flight -= 1
