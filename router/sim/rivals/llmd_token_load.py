"""llm-d's newest recipe: stay with the cache unless that costs too much time, then the fewest tokens in flight."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.usage import Usage
from router.policy.interface import PlacementRequest, Ticket
from router.sim.rivals.ledger import Ledger, Target
from router.sim.rivals.llmd_prefix import LlmdPrefixes
from router.sim.rivals.pick import cheapest
from router.sim.rivals.prefix import prompt_tokens
from router.sim.rivals.rival import Rival
from router.types import ReplicaId


@dataclass(frozen=True, slots=True)
class LlmdTokenLoadSettings:
    affinity_threshold: float = 0.80
    max_ttft_penalty_s: float = 18.0  # 0: always stay
    prefill_tokens_per_s: float = 15_928.0  # calibrated on the hardware: set it to what the simulated engine reaches
    exploration: float = 0.0  # probability of passing the filter by
    full_tokens: int = 4_194_304  # in flight, at which the score is 0
    precise: bool = False
    lru_blocks: int = 31_250
    speculative_ttl_s: float = 0.0


PRECISE = LlmdTokenLoadSettings(precise=True)

SEARCH: Mapping[str, Sequence[object]] = {
    "affinity_threshold": (0.2, 0.4, 0.6, 0.8, 0.95),
    "max_ttft_penalty_s": (0.25, 0.5, 1.0, 2.0, 5.0, 18.0, 0.0),
    "exploration": (0.0, 0.01),
}
SEARCH_PRECISE: Mapping[str, Sequence[object]] = {**SEARCH, "speculative_ttl_s": (0.0, 2.0)}


class LlmdTokenLoad(Rival):
    """Source: llm-d/llm-d-router, `prefix-cache-affinity-filter` and `token-load-scorer` (recipe of llm-d/llm-d#2071).

    sticky := replicas that hold at least `affinity_threshold` of the prompt's blocks. They alone remain, unless their best
    TTFT is more than `max_ttft_penalty_s` above the others' best; TTFT = tokens in flight / prefill_tokens_per_s.
    Of what remains, the highest 1 - min(1, tokens in flight / full_tokens).
    Tokens in flight are the uncached ones of prompts whose first token has not come.
    """

    def __init__(self, rng: random.Random, settings: LlmdTokenLoadSettings) -> None:
        super().__init__(rng)
        self._settings = settings
        self._tokens = Ledger()
        self._prefixes = LlmdPrefixes(
            precise=settings.precise, lru_blocks=settings.lru_blocks, speculative_ttl_s=settings.speculative_ttl_s
        )

    def choose(self, request: PlacementRequest, targets: Sequence[Target], now: float) -> Target:
        remaining = self._filtered(request, targets, now)
        full = self._settings.full_tokens
        return remaining[cheapest([min(1.0, self._tokens.on(target) / full) for target in remaining], self._rng)]

    def booked(self, ticket: Ticket, target: Target, now: float) -> None:
        (matched,), _ = self._prefixes.matched(ticket.request, [target], self._block_tokens, now)
        self._tokens.book(ticket, max(prompt_tokens(ticket.request, self._block_tokens) - matched, 0))
        self._prefixes.routed(ticket.request, target, self._block_tokens, now)

    def first_token(self, ticket: Ticket, now: float) -> None:
        self._tokens.settle(ticket)

    def ended(self, ticket: Ticket, usage: Usage | None, now: float) -> None:
        super().ended(ticket, usage, now)
        self._tokens.settle(ticket)

    def removed(self, replica: ReplicaId) -> None:
        super().removed(replica)
        self._prefixes.removed(replica)

    def restarted(self, replica: ReplicaId) -> None:
        self._prefixes.restarted(replica)

    def stored(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self._prefixes.stored((replica, rank), blocks)

    def evicted(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self._prefixes.evicted((replica, rank), blocks)

    def _filtered(self, request: PlacementRequest, targets: Sequence[Target], now: float) -> Sequence[Target]:
        settings = self._settings
        if settings.exploration and self._rng.random() < settings.exploration:
            return targets
        matched, sought = self._prefixes.matched(request, targets, self._block_tokens, now)
        sticky: list[Target] = []
        others: list[Target] = []
        for target, match in zip(targets, matched, strict=True):
            (sticky if sought and match / sought >= settings.affinity_threshold else others).append(target)
        if not sticky:
            return targets
        if others and settings.max_ttft_penalty_s > 0:
            penalty_tokens = min(map(self._tokens.on, sticky)) - min(map(self._tokens.on, others))
            if penalty_tokens / settings.prefill_tokens_per_s > settings.max_ttft_penalty_s:
                return targets
        return sticky
