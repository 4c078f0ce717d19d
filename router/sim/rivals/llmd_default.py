"""llm-d's scheduler in its default profile: a weighted sum of scores from scraped metrics and the prefix index."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.policy.interface import EngineLoad, PlacementRequest, Ticket
from router.sim.rivals.ledger import Target
from router.sim.rivals.llmd_prefix import LlmdPrefixes
from router.sim.rivals.pick import cheapest
from router.sim.rivals.rival import Rival
from router.types import ReplicaId

_LONG_MATCH_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class LlmdDefaultSettings:
    queue_weight: float = 2.0
    kv_weight: float = 2.0
    prefix_weight: float = 3.0
    active_weight: float = 0.0  # of its own requests in flight, which no scrape delays
    long_match_share: float = 0.0  # w below
    precise: bool = False  # the prefix index by events instead of by what was routed
    lru_blocks: int = 31_250  # of 64 tokens, for each replica
    speculative_ttl_s: float = 0.0  # with events: how long what was just routed counts; 2 s where it is turned on


PRECISE = LlmdDefaultSettings(precise=True)
# prime-rl's: scraped scores lag, and gather bursts of the same prefix.
PRIME_RL = LlmdDefaultSettings(queue_weight=0.0, kv_weight=0.0, active_weight=2.0)

SEARCH: Mapping[str, Sequence[object]] = {
    "queue_weight": (0.0, 1.0, 2.0, 4.0),
    "kv_weight": (0.0, 1.0, 2.0, 4.0),
    "prefix_weight": (1.0, 2.0, 3.0, 5.0, 8.0),
    "active_weight": (0.0, 1.0, 2.0, 4.0),
    "long_match_share": (0.0, 0.5),
}
SEARCH_PRECISE: Mapping[str, Sequence[object]] = {**SEARCH, "speculative_ttl_s": (0.0, 2.0)}

_NOT_SCRAPED = EngineLoad(running=0, waiting=0, kv_usage=0.0)


class LlmdDefault(Rival):
    """Source: llm-d/llm-d-router (the endpoint picker of the Gateway API inference extension), default scheduling profile.

    total_i = sum of weight * clamp(score_i, 0, 1), the highest wins
    queue: (max - waiting_i) / (max - min)      kv: 1 - usage_i      active: (max - requests_i) / max, 1 without any
    prefix: w * min(1, matched_tokens / 8192)^2 + (1 - w) * matched blocks / total blocks

    Queue and KV usage are the last scrape's, however old; a replica that was never scraped seems empty.
    """

    def __init__(self, rng: random.Random, settings: LlmdDefaultSettings) -> None:
        super().__init__(rng)
        self._settings = settings
        self._loads: dict[ReplicaId, EngineLoad] = {}
        self._prefixes = LlmdPrefixes(
            precise=settings.precise, lru_blocks=settings.lru_blocks, speculative_ttl_s=settings.speculative_ttl_s
        )

    def scores(self, request: PlacementRequest, targets: Sequence[Target], now: float) -> list[float]:
        settings = self._settings
        loads = [self._loads.get(replica, _NOT_SCRAPED) for replica, _ in targets]
        waiting = [load.waiting for load in loads]
        longest, shortest = max(waiting), min(waiting)
        active = [self.requests.on(target) for target in targets]
        busiest = max(active)
        matched, sought = self._prefixes.matched(request, targets, self._block_tokens, now)
        share = settings.long_match_share
        scores = []
        for load, mine, match in zip(loads, active, matched, strict=True):
            queue = (longest - load.waiting) / (longest - shortest) if longest > shortest else 1.0
            idle = (busiest - mine) / busiest if busiest else 1.0
            prefix = share * min(1.0, match / _LONG_MATCH_TOKENS) ** 2 + (1 - share) * (match / sought if sought else 0.0)
            scores.append(
                settings.queue_weight * queue
                + settings.kv_weight * min(max(1 - load.kv_usage, 0.0), 1.0)
                + settings.active_weight * idle
                + settings.prefix_weight * prefix
            )
        return scores

    def choose(self, request: PlacementRequest, targets: Sequence[Target], now: float) -> Target:
        return targets[cheapest([-score for score in self.scores(request, targets, now)], self._rng)]

    def booked(self, ticket: Ticket, target: Target, now: float) -> None:
        self._prefixes.routed(ticket.request, target, self._block_tokens, now)

    def scraped(self, replica: ReplicaId, load: EngineLoad, now: float) -> None:
        self._loads[replica] = load

    def removed(self, replica: ReplicaId) -> None:
        super().removed(replica)
        self._loads.pop(replica, None)
        self._prefixes.removed(replica)

    def restarted(self, replica: ReplicaId) -> None:
        self._prefixes.restarted(replica)

    def stored(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self._prefixes.stored((replica, rank), blocks)

    def evicted(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self._prefixes.evicted((replica, rank), blocks)
