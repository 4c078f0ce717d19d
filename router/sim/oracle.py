"""The oracle: a policy that sees the engines as they are and knows how long each answer will be.

It is the measure that real policies are held against, so its rule is plain. It takes the rank with the least

    cost = first + decode * shared + pressure

in seconds, where

- first: predicted time to this request's first token = the rest of the step that runs + the uncached prompt tokens queued
  before it and its own, at the engine's prefill rate, with a decode step for each step that they take + the wait until
  sequences have ended whose blocks or places in the batch it needs. Prompt tokens count as cached if the engine has them, or
  if a request placed there earlier is about to compute them.
- shared: the time that it and the sequences beside it cost each other: while both decode, each adds its share to the other's
  steps; while it prefills, those that decode stand still, and as many as queue now will queue behind it. Only the next
  `horizon` tokens count: what is beside it later cannot be foreseen even by an oracle of the present.
- pressure: what it would drive out: tokens that must be computed again because sequences outgrow the KV cache and are
  preempted, and cached tokens that are evicted for it, at the prefill rate.

It binds late, as the router does: where a request's best rank could not start it soon (prompts of more than `startable_s`
wait there, or its own does not fit into the free part of the KV cache beside those), the request waits in the router's fair
queue and is placed anew when something has begun or ended.

Ties are random. The weights were searched on few seeds of six workloads, four of them past saturation.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.usage import Usage
from router.policy.interface import PlacementRequest, Policy, Ticket
from router.sim.engine import Engine
from router.sim.lockstep import StepClock
from router.sim.replica import SimReplica
from router.sim.request import SimRequest
from router.types import ReplicaId


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleWeights:
    decode: float = 0.5  # of a second that others lose, against one until the first token
    queued: float = 1.0  # of a request in the queue, against one that decodes
    horizon: int = 500  # tokens
    preempted: float = 1.0  # of a token that must be computed again
    evicted: float = 1.0  # of a cached token that may have to be
    startable_s: float = 1.0  # of prefill that may wait at an engine when one more request is sent


class OracleTicket(Ticket):
    __slots__ = ("uncached",)

    def __init__(self, request: SimRequest, replica: ReplicaId, rank: int, uncached: int) -> None:
        super().__init__(request, replica, rank)
        self.uncached = uncached


class _View:
    """One rank: the true engine, and what was placed there and has not begun to answer."""

    def __init__(self, engine: Engine, clock: StepClock) -> None:
        self.engine = engine
        self.clock = clock
        self.pending: dict[int, OracleTicket] = {}  # by request
        self.uncached = 0  # prompt tokens of those
        self.prompt = 0  # all prompt tokens of those
        self.output = 0  # and what they will answer
        self._blocks: dict[int, int] = {}  # hash -> how many of those have the block in their prompt

    def add(self, request: SimRequest, ticket: OracleTicket) -> None:
        self.pending[request.id] = ticket
        self._count(request, ticket, 1)
        blocks = self._blocks
        for block in request.blocks:
            blocks[block] = blocks.get(block, 0) + 1

    def remove(self, request: SimRequest) -> None:
        if (ticket := self.pending.pop(request.id, None)) is None:
            return
        self._count(request, ticket, -1)
        blocks = self._blocks
        for block in request.blocks:
            if blocks[block] == 1:
                del blocks[block]
            else:
                blocks[block] -= 1

    def cached_soon(self, request: SimRequest) -> int:
        """Tokens of the prompt that the engine has or will have when this request's turn comes."""
        size = self.engine.limits.kv_block_tokens
        usable = min(len(request.blocks), (request.prompt_tokens - 1) // size)
        cached = self.engine.cached_prefix(request.blocks, request.prompt_tokens)
        # Prompts that share a block share all before it.
        coming = bisect_left(range(usable), True, key=lambda index: request.blocks[index] not in self._blocks)
        return max(cached, coming * size)

    def _count(self, request: SimRequest, ticket: OracleTicket, sign: int) -> None:
        self.uncached += sign * ticket.uncached
        self.prompt += sign * request.prompt_tokens
        self.output += sign * request.output_tokens


class Oracle(Policy):
    """Must be revealed to: `simulate(..., reveal_to=[oracle])`. One gateway only, since it keeps account of what it placed."""

    def __init__(self, rng: random.Random, weights: OracleWeights | None = None) -> None:
        self._rng = rng
        self._weights = weights or OracleWeights()
        self._views: dict[ReplicaId, list[_View]] = {}

    def reveal(self, replicas: Sequence[SimReplica]) -> None:
        self._views = {
            replica.id: [_View(engine, clock) for engine, clock in zip(replica.engines, replica.clocks, strict=True)]
            for replica in replicas
        }

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket | None:
        assert isinstance(request, SimRequest), "the oracle lives in the simulator"
        least, best = math.inf, []
        for replica in candidates:
            for rank, view in enumerate(self._views[replica]):
                uncached = request.prompt_tokens - view.cached_soon(request)
                cost = self._cost(view, request, uncached, now)
                if cost < least:
                    least, best = cost, [(replica, rank, uncached)]
                elif cost == least:
                    best.append((replica, rank, uncached))
        replica, rank, uncached = best[int(self._rng.random() * len(best))]
        if not self._can_start(self._views[replica][rank], uncached):
            return None
        ticket = OracleTicket(request, replica, rank, uncached)
        self._views[replica][rank].add(request, ticket)
        return ticket

    def first_token(self, ticket: Ticket, now: float) -> None:
        self._forget(ticket)

    def ended(self, ticket: Ticket, usage: Usage | None, now: float) -> None:
        self._forget(ticket)

    def _can_start(self, view: _View, uncached: int) -> bool:
        engine = view.engine
        if not engine.decoding and not view.pending:
            return True
        if view.uncached > self._weights.startable_s * engine.timing.prefill_tokens_per_s:
            return False
        return view.uncached + uncached <= engine.cache.free * engine.limits.kv_block_tokens

    def _forget(self, ticket: Ticket) -> None:
        assert isinstance(ticket.request, SimRequest)
        self._views[ticket.replica][ticket.rank].remove(ticket.request)

    def _cost(self, view: _View, request: SimRequest, uncached: int, now: float) -> float:
        view.clock.sync(now)
        engine, timing, limits = view.engine, view.engine.timing, view.engine.limits
        remaining = [left for left, _ in engine.remaining()]
        computing = sum(
            view.pending[sequence.request.id].uncached for sequence in engine.computing if sequence.request.id in view.pending
        )
        queued = max(0, view.uncached - computing) + engine.prefill_remaining
        decode_s = timing.seconds(
            prefill_tokens=0, attended_pairs=0, sequences=engine.decoding, context_tokens=engine.context_tokens
        )
        own_s = uncached / timing.prefill_tokens_per_s + timing.per_attended_pair_s * uncached * (
            2 * request.prompt_tokens - uncached
        )
        prefill_steps = math.ceil((queued + uncached) / limits.max_num_batched_tokens)
        first = (
            view.clock.step_left_s(now)
            + queued / timing.prefill_tokens_per_s
            + own_s
            + prefill_steps * decode_s
            + self._wait_steps(view, queued + uncached) * decode_s
        )
        # Those that wait will decode beside it, too.
        output = request.output_tokens
        overlap = min(output, self._weights.horizon)
        beside = sum(left if left < overlap else overlap for left in remaining) + min(view.output, overlap * len(view.pending))
        context = (engine.context_tokens + view.prompt) / (engine.decoding + len(view.pending) or 1)
        shared = beside * (2 * timing.per_sequence_s + timing.per_context_token_s * (context + request.prompt_tokens + overlap))
        shared += own_s * (engine.decoding + self._weights.queued * len(view.pending))
        growth = sum(remaining) + view.uncached + view.output + uncached + output
        over = engine.cache.held * limits.kv_block_tokens + growth - engine.cache.capacity * limits.kv_block_tokens
        if over > 0:  # if all stayed to the end; some will have left before
            over = self._overflow(view, uncached, output)
        evicted = uncached + output - engine.cache.empty * limits.kv_block_tokens
        pressure = self._weights.preempted * max(0, over) + self._weights.evicted * max(0, evicted)
        return first + self._weights.decode * shared + pressure / timing.prefill_tokens_per_s

    def _overflow(self, view: _View, uncached: int, output: int) -> int:
        """By how many tokens the KV cache will be too small at worst, with all that is placed there and this one beside."""
        engine, size = view.engine, view.engine.limits.kv_block_tokens
        used = engine.cache.held * size + view.uncached + uncached
        # Steps until each ends, and what it leaves then.
        leaving = [(output, uncached + output)]
        for ticket in view.pending.values():
            assert isinstance(ticket.request, SimRequest)
            leaving.append((ticket.request.output_tokens, ticket.uncached + ticket.request.output_tokens))
        leaving += [(left, own + done + left) for left, done, own in _decoding(engine)]
        leaving.sort()
        worst, steps, growing = 0, 0, len(leaving)
        for end, leaves in leaving:
            used += (end - steps) * growing
            worst = max(worst, used)
            used -= leaves
            steps, growing = end, growing - 1
        return max(0, worst - engine.cache.capacity * size)

    def _wait_steps(self, view: _View, needed: int) -> int:
        """Decode steps until there is room for `needed` tokens more and a place in the batch."""
        engine = view.engine
        size = engine.limits.kv_block_tokens
        free = engine.cache.free * size
        places = engine.limits.max_num_seqs - len(engine.running) - len(engine.waiting)
        if needed <= free and places > 0:
            return 0
        endings = sorted(_decoding(engine))
        steps, growing = 0, len(endings)
        for left, output, own_prompt in endings:
            free -= (left - steps) * growing
            steps, growing = left, growing - 1
            free += own_prompt + output + left
            places += 1
            if free >= needed and places > 0:
                return steps
        return steps


def _decoding(engine: Engine) -> list[tuple[int, int, int]]:
    """Of each decoding sequence: tokens left to generate, tokens generated, and prompt tokens that it computed itself."""
    return [
        (left, sequence.request.output_tokens - left, sequence.request.prompt_tokens - (sequence.cached_tokens or 0))
        for left, sequence in engine.remaining()
    ]
