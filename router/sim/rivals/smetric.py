"""`smetric` of vllm-router: a session stays while its replica can meet the time to first token, else the least prefill work."""

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.usage import Usage
from router.policy.interface import PlacementRequest, Ticket
from router.sim.rivals.ledger import Ledger, Target
from router.sim.rivals.pick import cheapest
from router.sim.rivals.prefix import RoutedPrefixes, prompt_tokens
from router.sim.rivals.rival import Rival
from router.types import ReplicaId

_RATE_WINDOW = 64
_RATE_MIN_SAMPLES = 8
_RATE_QUANTILE = 0.9


@dataclass(frozen=True, slots=True)
class SmetricSettings:
    """Published defaults; a tree's bound is 2^26 characters there, at 4 a token."""

    hit_ratio: float = 0.5
    slack: float = 1.0
    ttft_slo_s: float = 1.0
    ttft_slo_s_per_1k_tokens: float = 0.0625
    attention_crossover_tokens: float | None = None  # context at which attention costs as much as the linear layers
    evict_every_s: float = 120.0
    max_tree_tokens: int = 2**24


SEARCH: Mapping[str, Sequence[object]] = {
    "hit_ratio": (0.1, 0.3, 0.5, 0.8),
    "slack": (0.25, 0.5, 1.0, 2.0, 4.0),
    "attention_crossover_tokens": (None, 7_000.0, 20_000.0),
    "max_tree_tokens": (2**19, 2**21, 2**24),
}


class Smetric(Rival):
    """Source: vllm-project/router, `policies/smetric.rs`; Wang et al., arXiv 2607.08565.

    cost(n, L) = n + n * (L - n / 2) / crossover, n uncached of L prompt tokens;  load_i = queued cost_i + cost
    Stay on the replica h with the longest routed prefix if hit_h > hit_ratio * history and
    (load_h / rate_h <= slack * (ttft_slo + per_1k * L / 1000), or no replica meets that); else the lowest
    load_i * requests_i. rate = 90th percentile of the last 64 cost / TTFT; a replica with fewer than 8 meets any target.

    `history`, the prompt of the session's turn before, is known from the session id: an id not yet seen is a first turn.
    Without an id it is taken to be the whole prompt.
    """

    def __init__(self, rng: random.Random, settings: SmetricSettings) -> None:
        super().__init__(rng)
        self._settings = settings
        self._trees = RoutedPrefixes()
        self._evict_at = settings.evict_every_s
        self.queued = Ledger()
        self._placed_at: dict[Ticket, float] = {}
        self._samples: dict[Target, deque[float]] = {}
        self._rates: dict[Target, float] = {}
        self._history: dict[str, int] = {}

    def choose(self, request: PlacementRequest, targets: Sequence[Target], now: float) -> Target:
        settings = self._settings
        if now >= self._evict_at:
            self._trees.shrink_all(settings.max_tree_tokens // self._block_tokens)
            self._evict_at = now + settings.evict_every_s
        length = prompt_tokens(request, self._block_tokens)
        hits = [self._trees.matched(target, request.blocks) * self._block_tokens for target in targets]
        loads = [self.queued.on(target) + self._cost(length, hit) for target, hit in zip(targets, hits, strict=True)]
        budget = settings.slack * (settings.ttft_slo_s + settings.ttft_slo_s_per_1k_tokens * length / 1000)
        meets = [
            load <= budget * self._rates[target] if target in self._rates else True
            for target, load in zip(targets, loads, strict=True)
        ]
        longest = max(hits)
        holding = [position for position, hit in enumerate(hits) if hit == longest]
        home = holding[cheapest([loads[position] for position in holding], self._rng)]
        history = length if request.affinity is None else self._history.get(request.affinity)
        if history is not None and longest > settings.hit_ratio * history and (meets[home] or not any(meets)):
            return targets[home]
        return targets[
            cheapest([load * self.requests.on(target) for target, load in zip(targets, loads, strict=True)], self._rng)
        ]

    def booked(self, ticket: Ticket, target: Target, now: float) -> None:
        request = ticket.request
        length = prompt_tokens(request, self._block_tokens)
        self.queued.book(ticket, self._cost(length, self._trees.matched(target, request.blocks) * self._block_tokens))
        self._placed_at[ticket] = now
        self._trees.insert(target, request.blocks, now)
        if request.affinity is not None:
            self._history[request.affinity] = length

    def first_token(self, ticket: Ticket, now: float) -> None:
        cost, placed_at = self.queued.settle(ticket), self._placed_at.pop(ticket, now)
        if cost > 0 and now > placed_at:
            self._learn((ticket.replica, ticket.rank), cost / (now - placed_at))

    def ended(self, ticket: Ticket, usage: Usage | None, now: float) -> None:
        super().ended(ticket, usage, now)
        self.queued.settle(ticket)
        self._placed_at.pop(ticket, None)

    def removed(self, replica: ReplicaId) -> None:
        super().removed(replica)
        self._trees.forget(replica)
        self._samples = {target: samples for target, samples in self._samples.items() if target[0] != replica}
        self._rates = {target: rate for target, rate in self._rates.items() if target[0] != replica}

    def _cost(self, length: int, hit: int) -> int:
        new, crossover = max(length - hit, 0), self._settings.attention_crossover_tokens
        return new if crossover is None else round(new + new * (length - new / 2) / crossover)

    def _learn(self, target: Target, rate: float) -> None:
        samples = self._samples.setdefault(target, deque(maxlen=_RATE_WINDOW))
        samples.append(rate)
        if len(samples) >= _RATE_MIN_SAMPLES:
            self._rates[target] = sorted(samples)[round(_RATE_QUANTILE * (len(samples) - 1))]
