"""What the simulation asks of a workload: who arrives when, and what follows on an answer."""

import random
from collections.abc import Iterable, Sequence
from typing import Protocol

from router.sim.request import SimRequest


class Workload(Protocol):
    """A source of requests. It may keep state (sessions), so that each run needs one of its own."""

    @property
    def name(self) -> str: ...

    @property
    def horizon_s(self) -> float:
        """Arrivals stop here; what has arrived by then is still served, for a time of grace."""
        ...

    def initial(self, rng: random.Random) -> Iterable[SimRequest]:
        """The requests that come whatever becomes of others, in the order of their arrival. May be a generator."""
        ...

    def follow_up(self, request: SimRequest, now: float, rng: random.Random) -> Sequence[SimRequest]:
        """The requests that come because `request` was answered at `now`, each with `arrives_at` >= now.

        Called once for each request that completed, never for one that was refused or failed: that ends a session.
        Requests that would arrive behind the horizon are dropped.
        """
        ...
