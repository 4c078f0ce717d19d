"""The default policy: a request goes where predicted seconds are fewest, from exact accounts and what was learned online.

For a request with `u` tokens that a replica would have to compute (its prompt less what its KV cache holds), a context of
`x` tokens and an answer of about `E`, on a replica with `q` tokens of prompts queued and `n` sequences decoding:

    wait    = q / r                           prompts before it that are not computed yet
    own     = u / r * (1 + s * n)             its own; those that decode stand still meanwhile
    step    = c0 + c1 * L                     the step that gives the first token; L = n + their tokens / 2000
    decode  = d * E / 2 * c1 * (L + n + n * x / 2000)   how much slower it and the others decode for each other
    evict   = e * (tokens beyond the empty part of the KV cache) / r     cached prefixes that it drives out
    room    = (tokens beyond what nobody needs) * (p / r + E * step / k) preemption, and the wait until KV is released

Prefill rate `r` and the decode step `c0, c1` are learned from each first token and each end; `q`, `n`, `L` and the KV in use
`k` are counted from reservation to release, so they are right at once and need no metrics of the engine. `s`, `d`, `e` and
`p` are the prices of PredictedSettings, found with the simulator. Equal costs are decided by chance.
"""

import math
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
from heapq import heappop, heappush

from protocol.usage import Usage
from router.policy.cost import CostTerms, PredictedSettings
from router.policy.exact_cache import ExactCaches, Rank
from router.policy.interface import Coverage, PlacementRequest, Policy, ReplicaFacts, Ticket
from router.policy.learning import Learned
from router.policy.prefix_index import Hit, PrefixIndex
from router.policy.targets import BATCH_MAX, Account, PredictedTicket, Prices, Target, Unseen
from router.types import ReplicaId

# What the index keeps of a replica that does not say how much its KV cache holds.
CAPACITY_TOKENS = 262_144
# Bytes of prompts that the index keeps in all: some hundred MiB of memory, at 512 to 2048 bytes a chunk.
INDEX_BYTES_MAX = 1 << 30
# Clients' session ids that are remembered, most recently used.
SESSIONS_MAX = 65_536
# What a running request has generated, on average over its time.
HALF_AN_ANSWER = 0.5
# Of a prompt too short for the index the KV counts only if its answer is expected to be this long.
LONG_ANSWER_TOKENS = 512
# Of an image: what vision models make of a common one.
MEDIA_TOKENS = 1500.0
# A stream's prompt counts as computed after so many times its predicted time, and so many seconds more.
LATE_TIMES, LATE_S = 4.0, 2.0
# Samples of the prefill rate after which nothing is waited for on a mere assumption.
WARM_SAMPLES = 16
# Samples of the prefill rate between two refreshes of replicas to which nothing happens.
REFRESH_EVERY = 64
# Seconds between two looks for prompts that must be computed by now.
LOOKS_EVERY_S = 0.002


def _tokens_of(request: PlacementRequest, tokens_per_byte: float) -> float:
    """Of its prompt, expected. The bytes of an image say nothing of them."""
    tokens = request.prompt.size * tokens_per_byte
    if request.media:
        tokens = max(0, request.prompt.size - request.media_bytes) * tokens_per_byte + request.media * MEDIA_TOKENS
    return tokens


class Predicted(Policy):
    uses_prompt = True

    def __init__(self, rng: random.Random, settings: PredictedSettings | None = None) -> None:
        self._rng = rng
        self._settings = PredictedSettings() if settings is None else settings
        self._learned = Learned()
        self._index = PrefixIndex()
        self._exact = ExactCaches()
        self._targets: dict[ReplicaId, list[Target]] = {}
        self._facts: dict[ReplicaId, ReplicaFacts] = {}
        self._sessions: OrderedDict[str, tuple[Target, int, int]] = OrderedDict()  # -> where, in which epoch, how many bytes
        self._unseen_at = 0.0  # not looked at before
        self._unseen: list[Unseen] = []  # heap
        self._placed = 0
        # Of what was learned, as it was at the last refresh of all.
        self._refreshed_at = 0  # samples
        self._prices = self._new_prices()
        self._bytes_per_token = self._learned.bytes_per_token_max  # caches are not taken for larger than they are
        self._stale: dict[Target, None] = {}  # whose accounts have changed since they were refreshed
        self._asked: Sequence[ReplicaId] = ()
        self._asked_targets: list[Target] = []

    @property
    def targets(self) -> Sequence[Target]:
        """The accounts of each KV cache, for metrics."""
        return [target for ranks in self._targets.values() for target in ranks]

    def accounts(self) -> list[Account]:
        """The same of each replica as a whole."""
        self._refresh_stale()
        accounts = []
        for replica, ranks in self._targets.items():
            chunks = sum(self._index.entries_of(target.slot) for target in ranks if target.slot is not None)
            capacities = [target.capacity for target in ranks if target.capacity is not None]
            kv_tokens = sum(target.kv_tokens for target in ranks)
            accounts.append(Account(replica, chunks, kv_tokens, sum(capacities) if capacities else None))
        return accounts

    def in_flight(self, replica: ReplicaId) -> int:
        return sum(target.in_flight for target in self._targets.get(replica, ()))

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket | None:
        return self._place(request, candidates, now, is_forced=False)

    def place_anyway(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket:
        ticket = self._place(request, candidates, now, is_forced=True)
        assert ticket is not None
        return ticket

    def _place(
        self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float, *, is_forced: bool
    ) -> Ticket | None:
        if now >= self._unseen_at and self._unseen:
            self._begin_unseen(now)
        targets = self._asked_targets if candidates is self._asked else self._targets_of(candidates)
        if self._stale:
            self._refresh_stale()
        learned = self._learned
        tokens_per_byte = 1.0 / learned.bytes_per_token(request.model)
        prompt = request.prompt
        chunks = prompt.chunks
        hits = self._index.lookup(prompt) if chunks else ()
        held = self._held(request, hits) if hits or request.affinity is not None or request.blocks else {}
        output = self._expected_output(request)
        uncached = tokens = _tokens_of(request, tokens_per_byte)
        context = tokens + HALF_AN_ANSWER * output
        ties_s = self._settings.ties_s
        best: list[Target] = []
        least = bound = math.inf
        for target in targets:
            if held:
                uncached = max(0.0, tokens - held.get(target.slot, 0) * tokens_per_byte)
            cost = (
                target.base_s + uncached * target.token_price + output * (target.decode_price + context * target.context_price)
            )
            needed = uncached + output
            if needed > target.empty:
                cost += (needed - target.empty) * target.evict_price
                if needed > target.free:
                    cost += (needed - target.free) * target.room_price
            if cost < bound:
                if cost < least - ties_s:
                    best = [target]
                    least = cost
                    bound = least + ties_s
                else:
                    best.append(target)
        target = best[0] if len(best) == 1 else best[int(self._rng.random() * len(best))]
        if not is_forced and not self._can_start(target, max(0.0, tokens - held.get(target.slot, 0) * tokens_per_byte)):
            return None
        return self._reserve(request, target, hits, held, output, now)

    def explain(self, request: PlacementRequest, candidates: Iterable[ReplicaId]) -> list[CostTerms]:
        """The terms of each candidate's cost, as `place` would see them now."""
        tokens_per_byte = 1.0 / self._learned.bytes_per_token(request.model)
        prompt = request.prompt
        held = self._held(request, self._index.lookup(prompt))
        output = self._expected_output(request)
        tokens = _tokens_of(request, tokens_per_byte)
        context = tokens + HALF_AN_ANSWER * output
        terms = []
        targets = self._targets_of(list(candidates))
        self._refresh_stale()
        for target in targets:
            cached = min(tokens, held.get(target.slot, 0) * tokens_per_byte)
            uncached = tokens - cached
            wait = target.queued * target.token_s
            needed = uncached + output
            terms.append(
                CostTerms(
                    target.replica,
                    target.rank,
                    cached,
                    wait=wait,
                    own=uncached * target.token_price,
                    step=target.base_s - wait,
                    decode=output * (target.decode_price + context * target.context_price),
                    evict=max(0.0, needed - target.empty) * target.evict_price,
                    room=max(0.0, needed - target.free) * target.room_price,
                    is_startable=self._can_start(target, uncached),
                )
            )
        return terms

    def adopt(self, request: PlacementRequest, replica: ReplicaId, rank: int, now: float) -> Ticket:
        ranks = self._of(replica)
        target = ranks[min(rank, len(ranks) - 1)]
        self._refresh_stale()
        hits = self._index.lookup(request.prompt)
        return self._reserve(request, target, hits, self._held(request, hits), self._expected_output(request), now)

    def first_token(self, ticket: Ticket, now: float) -> None:
        assert isinstance(ticket, PredictedTicket)
        ticket.is_seen = True
        if ticket.began_at is None:
            ticket.target.begin(ticket, now)
        self._learned.first_token(ticket, now - ticket.placed_at)
        self._touch(ticket.target)

    def ended(self, ticket: Ticket, usage: Usage | None, now: float) -> None:
        assert isinstance(ticket, PredictedTicket)
        target, request = ticket.target, ticket.request
        prompt = request.prompt
        target.release(ticket)
        if ticket.unseen is not None:
            ticket.unseen.ticket = None  # the heap may keep the entry for long, but not a request's body
        trust = target.trust
        if usage is not None:
            self._learned.ended(ticket, usage, now)
        if request.blocks:
            self._exact.learn(prompt, request.blocks)
        if ticket.is_indexed and target.slot is not None and target.epoch == ticket.epoch:
            # Without a first token or an answer the prompt may never have been computed.
            was_computed = usage is not None or ticket.began_at is not None
            computed = None if was_computed else ticket.hit_chunks
            self._index.end(target.slot, prompt.chunks, computed=computed, reserved=ticket.reserved)
            if usage is not None:
                answer_size = int(usage.completion * self._learned.bytes_per_token(request.model))
                self._index.answered(target.slot, prompt, answer_size)
            if target.trust < trust:
                self._bound(target)
        self._touch(target)

    def changed(self, facts: ReplicaFacts) -> None:
        before = self._facts.get(facts.id)
        self._facts[facts.id] = facts
        if before is None or before.ranks != facts.ranks:
            self._close(facts.id)
            self._targets[facts.id] = [Target(facts.id, rank) for rank in range(max(1, facts.ranks))]
            self._asked = ()
        elif before.version != facts.version:
            self._renew(self._targets[facts.id])
        for target in self._targets[facts.id]:
            target.capacity = None if not facts.kv_capacity_tokens else float(facts.kv_capacity_tokens)
            target.batch_max = facts.batch_max or BATCH_MAX
            if target.slot is None:
                target.slot = self._index.open(0)
            self._bound(target)
        self._regroup()

    def removed(self, replica: ReplicaId) -> None:
        self._close(replica)
        self._exact.removed(replica)
        self._targets.pop(replica, None)
        self._facts.pop(replica, None)
        self._asked = ()
        self._regroup()

    def restarted(self, replica: ReplicaId) -> None:
        self._renew(self._targets.get(replica, ()))
        self._exact.restarted(replica)

    def stored(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        if replica in self._targets:  # the last events of a replica may come after its removal
            self._exact.stored((replica, rank), blocks)

    def evicted(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        target = self._target_of((replica, rank))
        if target is not None and target.slot is not None:
            self._exact.evicted((replica, rank), blocks, partial(self._index.drop, target.slot))

    def cleared(self, replica: ReplicaId, rank: int, now: float) -> None:
        if replica in self._targets:
            self._exact.cleared((replica, rank))
            self._renew(self._targets[replica][rank : rank + 1])

    def forgotten(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        if replica in self._targets:
            self._exact.evicted((replica, rank), blocks)

    def trusted(self, replica: ReplicaId, rank: int, coverage: Coverage) -> None:
        if replica in self._targets:
            self._exact.trusted((replica, rank), coverage)

    def _renew(self, targets: Sequence[Target]) -> None:
        """Their caches are lost."""
        for target in targets:
            self._close_alone(target)
            target.slot = self._index.open(0)
            target.trust = 1.0
            self._bound(target)

    def _close(self, replica: ReplicaId) -> None:
        for target in self._targets.get(replica, ()):
            self._close_alone(target)

    def _close_alone(self, target: Target) -> None:
        if target.slot is not None:
            self._index.close(target.slot)
            target.slot = None
            target.epoch += 1

    def _target_of(self, rank: Rank) -> Target | None:
        """None for a rank that does not exist, or not any more."""
        ranks = self._targets.get(rank[0], ())
        return ranks[rank[1]] if rank[1] < len(ranks) else None

    def _of(self, replica: ReplicaId) -> list[Target]:
        ranks = self._targets.get(replica)
        if ranks is None:
            self.changed(ReplicaFacts(replica))
            ranks = self._targets[replica]
        return ranks

    def _targets_of(self, candidates: Sequence[ReplicaId]) -> list[Target]:
        """In the order of the candidates. A sequence that is asked about again and again is looked up once."""
        targets = [target for replica in candidates for target in self._of(replica)]
        self._asked, self._asked_targets = candidates, targets
        return targets

    def _regroup(self) -> None:
        groups: dict[str, list[Target]] = {}
        for replica, ranks in self._targets.items():
            name = self._facts[replica].group or f"\n{replica}"  # the ranks of one port run in lockstep as well
            groups.setdefault(name, []).extend(ranks)
        for members in groups.values():
            for target in members:
                target.group = members
                self._stale[target] = None

    def _bound(self, target: Target) -> None:
        """How much the index keeps of the target: what its KV cache holds, within what the router can hold of all."""
        if target.slot is not None:
            capacity = CAPACITY_TOKENS if target.capacity is None else target.capacity
            fair = INDEX_BYTES_MAX // max(1, sum(map(len, self._targets.values())))
            self._index.set_bound(target.slot, min(int(capacity * target.trust * self._bytes_per_token), fair))

    def _expected_output(self, request: PlacementRequest) -> float:
        if not request.generates:
            return 0.0
        chunks = request.prompt.chunks
        return self._learned.lengths.expected(request.model, chunks[0] if chunks else 0, request.output_max)

    def _held(self, request: PlacementRequest, hits: Sequence[Hit]) -> dict[int | None, int]:
        """Bytes of the prompt that each slot holds, by slot; those that hold nothing are left out."""
        held: dict[int | None, int] = {}
        for hit in hits:
            slots = hit.slots
            while slots:
                bit = slots & -slots
                slots ^= bit
                held[bit.bit_length() - 1] = hit.size
        session = None if request.affinity is None else self._sessions.get(request.affinity)
        if session is not None and session[0].epoch == session[1]:
            # Worth what such a promise was worth before; where the index knows more, that counts.
            slot = session[0].slot
            promised = int(min(session[2], request.prompt.size) * self._learned.session_word.value)
            if promised > held.get(slot, 0):
                held[slot] = promised
        if self._exact.is_heard:
            self._exact.correct(held, request, self._index, self._target_of)
        return held

    def _can_start(self, target: Target, needed: float) -> bool:
        """Whether a request that needs so many tokens of KV at its first token would begin there soon."""
        if target.capacity is None or not target.in_flight:
            return target.has_room
        if needed > self._settings.kv_full * target.capacity:
            return True  # it would never fit: the engine refuses it, or it is smaller than it looks
        if not target.has_room:
            return False
        used = target.kv_tokens - HALF_AN_ANSWER * target.outputs
        return used + needed <= self._settings.kv_full * target.capacity

    def _reserve(
        self,
        request: PlacementRequest,
        target: Target,
        hits: Sequence[Hit],
        held: dict[int | None, int],
        output: float,
        now: float,
    ) -> PredictedTicket:
        prompt = request.prompt
        chunks = prompt.chunks
        bytes_per_token = self._learned.bytes_per_token(request.model)
        tokens = _tokens_of(request, 1.0 / bytes_per_token)
        ticket = PredictedTicket(request, target, now)
        ticket.cached_tokens = min(tokens, held.get(target.slot, 0) / bytes_per_token)
        ticket.uncached = tokens - ticket.cached_tokens
        ticket.output = output
        ticket.context = tokens + HALF_AN_ANSWER * output
        ticket.kind = chunks[0] if chunks else 0
        first_s = target.base_s + ticket.uncached * target.token_s
        ticket.predicted_s = first_s + self._learned.prefill.intercept * target.pace_now
        target.reserve(ticket)
        self._placed += 1
        # A first token that is seen may still not come for long, though others are served meanwhile.
        due_s = LATE_TIMES * ticket.predicted_s + LATE_S if request.streams else ticket.predicted_s
        ticket.unseen = Unseen(now + due_s, self._placed, ticket)
        heappush(self._unseen, ticket.unseen)
        if target.slot is not None:
            for hit in hits:
                if hit.slots >> target.slot & 1:
                    ticket.hit_chunks = hit.chunks
                    if hit.tail:
                        self._index.drop(target.slot, hit.tail)
                    break
            if chunks or output >= LONG_ANSWER_TOKENS:
                ticket.is_indexed = True
                ticket.reserved = int(HALF_AN_ANSWER * output * bytes_per_token)
                self._index.begin(target.slot, chunks, reserved=ticket.reserved)
            if request.affinity is not None:
                self._sessions[request.affinity] = (target, target.epoch, prompt.size)
                self._sessions.move_to_end(request.affinity)
                if len(self._sessions) > SESSIONS_MAX:
                    self._sessions.popitem(last=False)
        self._touch(target)
        return ticket

    def _begin_unseen(self, now: float) -> None:
        """Takes those prompts for computed whose time has come, where no stream shows it."""
        self._unseen_at = now + LOOKS_EVERY_S
        while self._unseen and self._unseen[0].due_at <= now:
            ticket = heappop(self._unseen).ticket
            if ticket is not None and ticket.began_at is None:
                ticket.target.begin(ticket, now)
                self._touch(ticket.target)

    def _new_prices(self) -> Prices:
        settings = self._settings
        return Prices(
            settings.decode,
            settings.stall,
            settings.preempted,
            settings.evicted,
            # Nothing is held back for a pace that is only assumed: a burst at the start would wait for nothing.
            settings.startable_s if self._learned.samples >= WARM_SAMPLES else math.inf,
            self._learned.lengths.mean,
        )

    def _touch(self, target: Target) -> None:
        """Its accounts have changed: what is derived from them is derived again before it is read."""
        for member in target.group:
            self._stale[member] = None

    def _refresh_stale(self) -> None:
        samples = self._learned.samples
        if samples - self._refreshed_at >= min(REFRESH_EVERY, 1 + self._refreshed_at):  # often at first
            # What was learned reaches those to which nothing happens, too.
            self._refreshed_at = self._learned.samples
            self._prices = self._new_prices()
            self._bytes_per_token = self._learned.bytes_per_token_max
            for target in self.targets:
                self._bound(target)
                self._stale[target] = None
        for target in self._stale:
            self._refresh_alone(target)
        self._stale.clear()

    def _refresh_alone(self, target: Target) -> None:
        used = held = 0
        if target.slot is not None and target.capacity is not None:
            used, held = self._index.sizes(target.slot)
        learned, ratio = self._learned, self._bytes_per_token
        cached = held / ratio
        if target.slot is not None and self._exact.is_heard:
            # What others have sent there, and what the index has dropped too early, takes room as well.
            block_tokens = self._facts[target.replica].kv_block_tokens or 0
            cached = max(cached, self._exact.blocks((target.replica, target.rank)) * block_tokens)
        target.refresh(learned.prefill, learned.step, self._prices, prompts=used / ratio, held=cached)
