"""The KV router of NVIDIA Dynamo: blocks to prefill plus blocks to decode, in one sum."""

import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.usage import Usage
from router.policy.interface import PlacementRequest, Ticket
from router.sim.rivals.ledger import Ledger, Target
from router.sim.rivals.pick import cheapest, normalised, sampled
from router.sim.rivals.prefix import PredictedPrefixes, ReportedBlocks, prompt_tokens
from router.sim.rivals.rival import Rival
from router.types import ReplicaId


@dataclass(frozen=True, slots=True)
class DynamoSettings:
    """Published defaults, with the side index that is recommended for bursts of the same prompt."""

    overlap_credit: float = 1.0  # may exceed 1
    prefill_scale: float = 1.0
    temperature: float = 0.0  # of a softmax over costs scaled to 0..1; 0: always the cheapest
    predicted_ttl_s: float | None = 5.0  # None: events only
    lmetric: bool = False  # adjusted prefill * (decode requests + 1) instead of the sum
    shared_once: bool = True  # a block that several requests decode from counts once (its code), or once for each (its formula)


SEARCH: Mapping[str, Sequence[object]] = {
    "overlap_credit": (0.5, 1.0, 1.5, 2.0, 4.0, 16.0, 64.0),
    "prefill_scale": (0.5, 1.0, 2.0, 4.0),
    "temperature": (0.0, 0.1, 0.5),
    "lmetric": (False, True),
    "shared_once": (False, True),
}


class Dynamo(Rival):
    """Source: ai-dynamo/dynamo, documentation of the KV router and `kv-router/src/scheduling/selector.rs`.

    cost_i = prefill_scale * max(active_prefill_blocks_i + incoming_blocks - credit_i, 0)
             + active_decode_blocks_i + incoming_blocks
    credit_i = overlap_credit * blocks on the device of replica i, by events or by what was routed there within the last
    `predicted_ttl_s`. Active prefill (the uncached part) ends with the first token, active decode with the request. With
    `shared_once` the incoming blocks of the second line are only those that no request on the replica has yet.
    """

    def __init__(self, rng: random.Random, settings: DynamoSettings) -> None:
        super().__init__(rng)
        self._settings = settings
        self._index = ReportedBlocks()
        self._predicted = None if settings.predicted_ttl_s is None else PredictedPrefixes(settings.predicted_ttl_s)
        self._prefill = Ledger()  # tokens
        self._decode = _DecodeBlocks(settings.shared_once)

    def costs(self, request: PlacementRequest, targets: Sequence[Target], now: float) -> list[float]:
        settings, block = self._settings, self._block_tokens
        incoming = prompt_tokens(request, block) / block
        costs = []
        for target, overlap in zip(targets, self._overlaps(request, targets, now), strict=True):
            prefill = max(self._prefill.on(target) / block + incoming - settings.overlap_credit * overlap, 0.0)
            if settings.lmetric:
                costs.append(settings.prefill_scale * prefill * (self.requests.on(target) + 1))
            else:
                decode = self._decode.on(target) + incoming - self._decode.shared(target, request.blocks)
                costs.append(settings.prefill_scale * prefill + decode)
        return costs

    def choose(self, request: PlacementRequest, targets: Sequence[Target], now: float) -> Target:
        costs = self.costs(request, targets, now)
        if self._settings.temperature <= 0:
            return targets[cheapest(costs, self._rng)]
        return targets[sampled(normalised(costs), self._settings.temperature, self._rng)]

    def booked(self, ticket: Ticket, target: Target, now: float) -> None:
        request, block = ticket.request, self._block_tokens
        tokens = prompt_tokens(request, block)
        overlap = self._overlaps(request, [target], now)[0]
        self._prefill.book(ticket, max(tokens - overlap * block, 0))
        self._decode.book(ticket, -(-tokens // block) - len(request.blocks))
        if self._predicted is not None:
            self._predicted.insert(target, request.blocks, now)

    def first_token(self, ticket: Ticket, now: float) -> None:
        self._prefill.settle(ticket)

    def ended(self, ticket: Ticket, usage: Usage | None, now: float) -> None:
        super().ended(ticket, usage, now)
        self._prefill.settle(ticket)
        self._decode.settle(ticket)

    def removed(self, replica: ReplicaId) -> None:
        super().removed(replica)
        self.restarted(replica)

    def restarted(self, replica: ReplicaId) -> None:
        self._index.forget(replica)
        if self._predicted is not None:
            self._predicted.forget(replica)

    def stored(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self._index.stored((replica, rank), blocks)

    def evicted(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self._index.evicted((replica, rank), blocks)

    def _overlaps(self, request: PlacementRequest, targets: Sequence[Target], now: float) -> list[int]:
        reported = self._index.matched(request.blocks, targets)
        if self._predicted is None:
            return reported
        predicted = self._predicted.matched(request.blocks, now)
        return [max(held, predicted.get(target, 0)) for target, held in zip(targets, reported, strict=True)]


class _DecodeBlocks:
    """Blocks that requests in flight decode from, on each target."""

    def __init__(self, shared_once: bool) -> None:
        self._shared_once = shared_once
        self._tails = Ledger()  # blocks that are not whole, and so nobody else's
        self._open: set[Ticket] = set()
        self._uses: dict[Target, dict[int, int]] = {}
        self._all = Ledger()

    def book(self, ticket: Ticket, tail: int) -> None:
        target, blocks = (ticket.replica, ticket.rank), ticket.request.blocks
        self._open.add(ticket)
        self._tails.book(ticket, tail)
        self._all.book(ticket, len(blocks))
        if self._shared_once and blocks:
            uses = self._uses.setdefault(target, {})
            for block in blocks:
                uses[block] = uses.get(block, 0) + 1

    def settle(self, ticket: Ticket) -> None:
        if ticket not in self._open:
            return
        self._open.remove(ticket)
        self._tails.settle(ticket)
        self._all.settle(ticket)
        if self._shared_once and ticket.request.blocks:
            uses = self._uses[(ticket.replica, ticket.rank)]
            for block in ticket.request.blocks:
                uses[block] -= 1
                if not uses[block]:
                    del uses[block]
            if not uses:
                del self._uses[(ticket.replica, ticket.rank)]

    def on(self, target: Target) -> int:
        whole = len(self._uses.get(target, ())) if self._shared_once else self._all.on(target)
        return whole + self._tails.on(target)

    def shared(self, target: Target, blocks: Sequence[int]) -> int:
        """How many of a request's blocks are counted already."""
        uses = self._uses.get(target)
        if uses is None:
            return 0
        return bisect_left(range(len(blocks)), True, key=lambda position: blocks[position] not in uses)
