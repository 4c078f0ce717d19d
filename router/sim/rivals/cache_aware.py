"""`cache_aware` of sglang's router (now SMG) and of vllm-router: the longest routed prefix, unless loads are too uneven."""

import enum
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.policy.interface import PlacementRequest, Ticket
from router.sim.rivals.ledger import Target
from router.sim.rivals.pick import cheapest
from router.sim.rivals.prefix import RoutedPrefixes, prompt_tokens
from router.sim.rivals.rival import Rival
from router.types import ReplicaId


class Fallback(enum.StrEnum):
    """Where a prompt goes of which too little was seen before."""

    LEAST_LOADED = "least_loaded"
    SMALLEST_TREE = "smallest_tree"  # sglang until it was found to send everything to a replica that had just come back


@dataclass(frozen=True, slots=True)
class CacheAwareSettings:
    """Defaults of vllm-router 0.1.17's command line. A tree's bound is 2^25 characters there, at 4 a token."""

    threshold: float = 0.3  # share of the prompt that must have been routed to a replica
    balance_abs: int = 64  # requests
    balance_rel: float = 1.5
    evict_every_s: float = 120.0
    max_tree_tokens: int = 2**23
    fallback: Fallback = Fallback.LEAST_LOADED
    sessions: bool = False  # the newest vllm-router: a session id that it has seen goes where it went, whatever its prompt


# SMG counts 10 000 nodes of a tree with pages of 16 tokens; taken as that many pages.
SMG = CacheAwareSettings(threshold=0.5, balance_abs=32, balance_rel=1.1, evict_every_s=30.0, max_tree_tokens=160_000)
OLD_SGLANG = CacheAwareSettings(
    threshold=0.5, balance_abs=32, balance_rel=1.1, evict_every_s=30.0, max_tree_tokens=2**22, fallback=Fallback.SMALLEST_TREE
)

SEARCH: Mapping[str, Sequence[object]] = {
    "threshold": (0.1, 0.2, 0.3, 0.5, 0.7),
    "balance_abs": (2, 4, 8, 16, 32, 64, 10_000),
    "balance_rel": (1.0001, 1.1, 1.5, 2.0),
    "max_tree_tokens": (160_000, 2**19, 2**21, 2**23),
    "sessions": (False, True),
}


class CacheAware(Rival):
    """Source: sglang / lightseekorg/smg and vllm-project/router, `policies/cache_aware.rs`.

    imbalanced := max - min > balance_abs and max > balance_rel * min, of requests in flight
    imbalanced: the least loaded. Otherwise the replica to which the longest prefix of the prompt was routed, if that is more
    than `threshold` of the prompt (ties: the less loaded), else the fallback. The prompt joins the chosen replica's tree;
    every `evict_every_s` each tree is cut to `max_tree_tokens`, least recently used leaves first.
    """

    def __init__(self, rng: random.Random, settings: CacheAwareSettings) -> None:
        super().__init__(rng)
        self._settings = settings
        self._trees = RoutedPrefixes()
        self._sessions: dict[str, Target] = {}
        self._evict_at = settings.evict_every_s

    def choose(self, request: PlacementRequest, targets: Sequence[Target], now: float) -> Target:
        settings = self._settings
        self._evict(now)
        loads = [self.requests.on(target) for target in targets]
        least, most = min(loads), max(loads)
        if most - least > settings.balance_abs and most > settings.balance_rel * least:
            return targets[cheapest(loads, self._rng)]
        if settings.sessions and request.affinity is not None:
            at = self._sessions.get(request.affinity)
            if at is not None and at in targets:
                return at
        matches = [self._trees.matched(target, request.blocks) for target in targets]
        longest = max(matches)
        rate = longest * self._block_tokens / prompt_tokens(request, self._block_tokens)
        if rate > settings.threshold:
            best = [position for position, match in enumerate(matches) if match == longest]
            return targets[best[cheapest([loads[position] for position in best], self._rng)]]
        if settings.fallback is Fallback.SMALLEST_TREE:
            return targets[cheapest([self._trees.size(target) for target in targets], self._rng)]
        return targets[cheapest(loads, self._rng)]

    def booked(self, ticket: Ticket, target: Target, now: float) -> None:
        self._trees.insert(target, ticket.request.blocks, now)
        if self._settings.sessions and ticket.request.affinity is not None:
            self._sessions[ticket.request.affinity] = target

    def removed(self, replica: ReplicaId) -> None:
        super().removed(replica)
        self._trees.forget(replica)
        self._sessions = {session: target for session, target in self._sessions.items() if target[0] != replica}

    def _evict(self, now: float) -> None:
        if now >= self._evict_at:
            self._trees.shrink_all(self._settings.max_tree_tokens // self._block_tokens)
            self._evict_at = now + self._settings.evict_every_s
