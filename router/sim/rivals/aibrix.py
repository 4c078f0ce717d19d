"""`prefix-cache` of AIBrix's gateway: the best match among the replicas that are not unusually busy."""

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.policy.interface import PlacementRequest, Ticket
from router.sim.rivals.ledger import Target
from router.sim.rivals.pick import cheapest
from router.sim.rivals.prefix import RoutedPrefixes
from router.sim.rivals.rival import Rival
from router.types import ReplicaId


@dataclass(frozen=True, slots=True)
class AibrixSettings:
    """Defaults of its code, where its README says otherwise (16 and 2)."""

    imbalance: int = 8  # requests
    sigmas: float = 1.0
    table_blocks: int = 200_000  # of each replica
    ttl_s: float = 1200.0


SEARCH: Mapping[str, Sequence[object]] = {
    "imbalance": (2, 4, 8, 16, 32, 64),
    "sigmas": (0.0, 0.5, 1.0, 2.0, 3.0),
    "table_blocks": (10_000, 50_000, 200_000),
}


class AibrixPrefixCache(Rival):
    """Source: vllm-project/aibrix, gateway plugin `prefix-cache`.

    max - min > imbalance, of requests running: the least busy. Otherwise replicas in the order of the matched share of the
    prompt (whole per cent, highest first), then of requests running; the first with running <= mean + sigmas * standard
    deviation. The table of what was routed forgets a block that was not routed for `ttl_s`.
    """

    def __init__(self, rng: random.Random, settings: AibrixSettings) -> None:
        super().__init__(rng)
        self._settings = settings
        self._table = RoutedPrefixes()

    def choose(self, request: PlacementRequest, targets: Sequence[Target], now: float) -> Target:
        settings = self._settings
        running = [self.requests.on(target) for target in targets]
        if max(running) - min(running) > settings.imbalance:
            return targets[cheapest(running, self._rng)]
        blocks = request.blocks
        matches = []
        for target in targets:
            self._table.expire(target, now - settings.ttl_s)
            matches.append(self._table.matched(target, blocks) * 100 // len(blocks) if blocks else 0)
        limit = statistics.fmean(running) + settings.sigmas * statistics.pstdev(running)
        # The least busy is never above the mean, so there is always one.
        allowed = [position for position, count in enumerate(running) if count <= limit]
        best = max(matches[position] for position in allowed)
        matching = [position for position in allowed if matches[position] == best]
        return targets[matching[cheapest([running[position] for position in matching], self._rng)]]

    def booked(self, ticket: Ticket, target: Target, now: float) -> None:
        self._table.insert(target, ticket.request.blocks, now)
        self._table.shrink(target, self._settings.table_blocks)

    def removed(self, replica: ReplicaId) -> None:
        super().removed(replica)
        self._table.forget(replica)
