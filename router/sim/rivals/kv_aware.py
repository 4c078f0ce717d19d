"""`kv_aware` of vllm-router: uncached prefill times the requests it shares the replica with, by the engines' events alone."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.usage import Usage
from router.policy.interface import PlacementRequest, Ticket
from router.sim.rivals.ledger import Ledger, Target
from router.sim.rivals.pick import sampled
from router.sim.rivals.prefix import ReportedBlocks, prompt_tokens
from router.sim.rivals.rival import Rival
from router.types import ReplicaId


@dataclass(frozen=True, slots=True)
class KvAwareSettings:
    device_credit: float = 1.0
    temperature: float = 0.0  # of a softmax over the costs; 0: always the cheapest


SEARCH: Mapping[str, Sequence[object]] = {
    "device_credit": (0.5, 0.8, 1.0),
    "temperature": (0.0, 10.0, 100.0, 1_000.0, 10_000.0),
}


class KvAware(Rival):
    """Source: vllm-project/router, `kv_aware`; of its tiers only the device's.

    cost_i = (new_i + active_prefill_tokens_i) * (active_requests_i + 1)
    new_i  = prompt tokens - credit * tokens of contiguous blocks that events say replica i holds

    The block with the prompt's last token earns no credit, since that token is computed anew. What a request adds to
    `active_prefill_tokens` is released at its first token.
    """

    def __init__(self, rng: random.Random, settings: KvAwareSettings) -> None:
        super().__init__(rng)
        self._settings = settings
        self._index = ReportedBlocks()
        self._prefill = Ledger()

    def costs(self, request: PlacementRequest, targets: Sequence[Target]) -> list[float]:
        return [
            (new + self._prefill.on(target)) * (self.requests.on(target) + 1)
            for target, new in zip(targets, self._new_tokens(request, targets), strict=True)
        ]

    def choose(self, request: PlacementRequest, targets: Sequence[Target], now: float) -> Target:
        return targets[sampled(self.costs(request, targets), self._settings.temperature, self._rng)]

    def booked(self, ticket: Ticket, target: Target, now: float) -> None:
        self._prefill.book(ticket, round(self._new_tokens(ticket.request, [target])[0]))

    def first_token(self, ticket: Ticket, now: float) -> None:
        self._prefill.settle(ticket)

    def ended(self, ticket: Ticket, usage: Usage | None, now: float) -> None:
        super().ended(ticket, usage, now)
        self._prefill.settle(ticket)

    def removed(self, replica: ReplicaId) -> None:
        super().removed(replica)
        self._index.forget(replica)

    def restarted(self, replica: ReplicaId) -> None:
        self._index.forget(replica)

    def stored(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self._index.stored((replica, rank), blocks)

    def evicted(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self._index.evicted((replica, rank), blocks)

    def _new_tokens(self, request: PlacementRequest, targets: Sequence[Target]) -> list[float]:
        tokens, block = prompt_tokens(request, self._block_tokens), self._block_tokens
        creditable = request.blocks[: (tokens - 1) // block]
        credit = self._settings.device_credit
        return [tokens - credit * hit * block for hit in self._index.matched(creditable, targets)]
