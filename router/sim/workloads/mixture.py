"""Several senders at once, each a tenant of its own."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from random import Random

from router.sim.request import SimRequest
from router.sim.workload import Workload


class Mixture:
    """`parts` by tenant; the requests of each carry that tenant, and ids that no other part gives."""

    def __init__(self, name: str, parts: Mapping[str, Workload]) -> None:
        self.name = name
        self.horizon_s = max(part.horizon_s for part in parts.values())
        self._parts = parts

    def initial(self, rng: Random) -> Iterable[SimRequest]:
        own = [part.initial(Random(rng.getrandbits(64))) for part in self._parts.values()]
        return heapq.merge(*own, key=lambda request: request.arrives_at)

    def follow_up(self, request: SimRequest, now: float, rng: Random) -> Sequence[SimRequest]:
        return self._parts[request.tenant].follow_up(request, now, rng)
