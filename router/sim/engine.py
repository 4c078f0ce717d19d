"""Continuous batching of one data-parallel rank on virtual time, scheduled as vLLM V1 does it.

Each step has a token budget: running sequences come first, in the order of their admission, one token for each that decodes
and a chunk for one whose prompt is not yet computed; then waiting ones, first come first served, as long as the budget, the
batch and the KV cache have room. Blocks enter the prefix cache when their step is scheduled, so that a sibling admitted in the
same step already finds them. When blocks run out the youngest sequence is preempted: it waits first in line and computes
all its tokens anew (less what it finds in the prefix cache).

Decoding is aggregated: a step costs the same for one sequence and for hundreds. Endings wait in a heap by step number, block
boundaries are counted by step number modulo the block size, and steps in which nothing but decoding happens are planned
together (`plan` says how many). Only one thing is not exact: the blocks that an answer fills are entered into the prefix cache
when the sequence leaves its blocks, not one by one; until then nobody else could ask for them.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from router.sim.blocks import BlockCache, KvEvent
from router.sim.fleet import EngineLimits
from router.sim.longest import LongestSince
from router.sim.sequence import EngineSequence
from router.sim.timing import StepTiming


class StepOutcome(NamedTuple):
    """What became visible at the end of a step."""

    started: list[EngineSequence]  # got their first token
    finished: list[EngineSequence]
    events: list[KvEvent]  # in order


class Engine:
    """Knows steps, not their clock: `plan` decides the next ones, `seconds` times them, `advance` and `finish` apply them."""

    def __init__(self, limits: EngineLimits, timing: StepTiming, *, records_events: bool = False) -> None:
        self.limits = limits
        self.timing = timing
        self._records_events = records_events
        self._block = limits.kv_block_tokens
        self.busy_s = 0.0
        self.steps = 0
        self.prefilled_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.preemptions = 0
        self._admissions = 0
        self._step = 0  # number of the step that is running, or else of the next
        self._clear()

    def _clear(self) -> None:
        self.cache = BlockCache(self.limits.kv_capacity_tokens // self._block, records_events=self._records_events)
        self.running: dict[EngineSequence, None] = {}  # in the order of their admission
        self.waiting: deque[EngineSequence] = deque()
        self._prefilling: EngineSequence | None = None  # running, its prompt computed in part; always the youngest
        self.decoding = 0
        self.context_tokens = 0  # of the sequences that decode
        self._finishes: list[tuple[int, int, EngineSequence]] = []  # heap; entries of preempted ones are stale
        self._crossings = [0] * self._block  # decoding sequences that need a block in steps of this number modulo the size
        self._chunks: list[EngineSequence] = []  # those whose prompts the planned step computes, or a part of them
        self._pairs = 0  # attended by those
        self._prefill = 0  # tokens of those
        self._replayed: list[int] = []  # contexts of resumed sequences of which only one token is computed, as in decoding
        self._aborted: list[EngineSequence] = []
        self._longest = LongestSince()

    @property
    def kv_usage(self) -> float:
        return self.cache.held / self.cache.capacity

    @property
    def prefill_remaining(self) -> int:
        """Tokens of the one prompt in the batch that is computed in part only."""
        sequence = self._prefilling
        return 0 if sequence is None else sequence.tokens - sequence.computed

    @property
    def computing(self) -> Sequence[EngineSequence]:
        """Those whose prompts the step that runs computes, or a part of them."""
        return self._chunks

    def cached_prefix(self, hashes: Sequence[int], tokens: int) -> int:
        """How many of a prompt's tokens an admission now would find in the prefix cache."""
        return self.cache.match(hashes, min(len(hashes), (tokens - 1) // self._block)).blocks * self._block

    def output_of(self, sequence: EngineSequence) -> int:
        """Tokens generated up to the last finished step."""
        if sequence.is_decoding:
            return self._step + sequence.computed_offset + 1 - sequence.request.prompt_tokens
        return sequence.output

    def remaining(self) -> list[tuple[int, EngineSequence]]:
        """Of each decoding sequence: how many tokens it has yet to generate."""
        next_step = self._step - 1
        return [(sequence.finish_step - next_step, sequence) for sequence in self.running if sequence.is_decoding]

    def submit(self, sequence: EngineSequence) -> None:
        """Queues a sequence.

        Raises:
            ValueError: it would not fit into the KV cache even alone, so it would wait for ever.
        """
        request = sequence.request
        total = request.prompt_tokens + request.output_tokens
        if total > self.cache.capacity * self._block:
            raise ValueError(
                f"request {request.id} has {total} tokens of prompt and answer, but a rank holds "
                f"{self.cache.capacity * self._block}: raise kv_capacity_tokens or shorten the request"
            )
        self.waiting.append(sequence)

    def abort(self, sequence: EngineSequence) -> None:
        """Takes a sequence out: at once while it waits, else at the end of the running step."""
        if sequence in self.running:
            sequence.is_aborted = True
            self._aborted.append(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def kill(self) -> list[EngineSequence]:
        """The process dies: cache and sequences are gone. Returns the sequences; totals are kept."""
        lost = [*self.running, *self.waiting]
        for sequence in lost:
            sequence.output, sequence.is_decoding = self.output_of(sequence), False
        self._clear()
        return lost

    def plan(self, now: float) -> int:
        """Schedules the next step. Returns how many steps may be taken as one, since nothing but decoding happens in them.

        0: there is nothing to do.
        """
        if not self.running and not self.waiting:
            return 0
        before = self.preemptions
        needed = self._crossings[self._step % self._block]
        if needed > self.cache.free:
            self._squeeze(now)
        elif needed:
            self.cache.reserve(needed)
        budget = self.limits.max_num_batched_tokens - self.decoding
        if (sequence := self._prefilling) is not None:
            count = min(sequence.tokens - sequence.computed, budget)
            if count and not self._compute(sequence, count):
                self._preempt(sequence, now)
            budget -= count
        if self.preemptions == before or not self.running:
            self._admit(budget)
        if self._chunks or self.preemptions != before:
            return 1
        return self._steps_ahead()

    def seconds(self, steps: int) -> float:
        """How long the first `steps` of the planned steps take."""
        first = self.timing.seconds(
            prefill_tokens=self._prefill,
            attended_pairs=self._pairs,
            sequences=self.decoding + len(self._replayed),
            context_tokens=self.context_tokens + sum(self._replayed),
        )
        return steps * first + self.timing.per_context_token_s * self.decoding * (steps * (steps - 1) // 2)

    def advance(self, steps: int) -> None:
        """`steps` of the planned steps are done and at least one more is under way."""
        self._decode(steps, blocks=self._crossings_in(self._step + 1, steps))

    def finish(self, steps: int, ended_at: float, last_s: float) -> StepOutcome:
        """The last `steps` of the planned ones are done; the very last, which ended at `ended_at`, took `last_s`."""
        self._decode(steps, blocks=self._crossings_in(self._step + 1, steps - 1))
        step = self._step - 1
        if self.decoding:
            self._longest.add(step, last_s)
        started: list[EngineSequence] = []
        finished: list[EngineSequence] = []
        while (ending := self._next_finish()) is not None and ending.finish_step <= step:
            heapq.heappop(self._finishes)
            self._leave_decoding(ending, ended_at)
            self._leave(ending)
            finished.append(ending)
        chunks, self._chunks = self._chunks, []
        self.prefilled_tokens += self._prefill
        self._pairs = self._prefill = 0
        self._replayed.clear()
        for sequence in chunks:
            if sequence.computed < sequence.tokens:
                continue
            self.generated_tokens += 1
            if sequence.first_token_at is None:
                sequence.first_token_at = ended_at
                started.append(sequence)
            else:
                sequence.worst_gap_s = max(sequence.worst_gap_s, ended_at - sequence.last_token_at)
            sequence.output += 1
            sequence.last_token_at = ended_at
            if sequence.output == sequence.request.output_tokens:
                self._leave(sequence)
                finished.append(sequence)
            else:
                self._join(sequence, step)
        for sequence in self._aborted:
            if sequence in self.running:
                if sequence.is_decoding:
                    self._leave_decoding(sequence, ended_at)
                self._leave(sequence)
            elif sequence in self.waiting:  # preempted meanwhile
                self.waiting.remove(sequence)
        self._aborted.clear()
        return StepOutcome(started, finished, self.cache.take_events())

    def _steps_ahead(self) -> int:
        """Up to the next ending, or to the last step for whose blocks there is room."""
        ending = self._next_finish()
        assert ending is not None, "without prompts to compute something decodes"
        steps = ending.finish_step - self._step + 1
        free = self.cache.free
        if self._crossings_in(self._step + 1, steps - 1) <= free:
            return steps
        fits, fails = 1, steps
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self._crossings_in(self._step + 1, middle - 1) <= free:
                fits = middle
            else:
                fails = middle
        return fits

    def _crossings_in(self, first: int, steps: int) -> int:
        """Blocks that decoding needs in `steps` steps from number `first` on."""
        if steps <= 0 or not self.decoding:
            return 0
        rounds, rest = divmod(steps, self._block)
        begin = first % self._block
        blocks = rounds * self.decoding
        for step in range(begin, begin + rest):
            blocks += self._crossings[step % self._block]
        return blocks

    def _decode(self, steps: int, *, blocks: int) -> None:
        if blocks:
            self.cache.reserve(blocks)
        tokens = steps * self.decoding
        self.context_tokens += tokens
        self.generated_tokens += tokens
        self._step += steps
        self.steps += steps

    def _squeeze(self, now: float) -> None:
        """Gives decoding sequences their blocks in order, preempting the youngest until what is left fits."""
        phase = self._step % self._block
        in_need = [sequence for sequence in self.running if sequence.is_decoding and self._phase(sequence) == phase]
        for sequence in in_need:
            while sequence in self.running and not self.cache.free:
                self._preempt(next(reversed(self.running)), now)
            if sequence in self.running:
                self.cache.reserve(1)

    def _phase(self, sequence: EngineSequence) -> int:
        """The step numbers, modulo the block size, in which a decoding sequence begins a block."""
        return -sequence.computed_offset % self._block

    def _compute(self, sequence: EngineSequence, count: int) -> bool:
        """Blocks for the next `count` tokens of a sequence, and their place in the prefix cache; False if none are free."""
        end = sequence.computed + count
        needed = -(-end // self._block) - -(-sequence.computed // self._block)
        if needed > self.cache.free:
            return False
        self.cache.reserve(needed)
        if count == 1 and sequence.output:
            self._replayed.append(sequence.tokens)
        else:
            self._prefill += count
            self._pairs += count * (sequence.computed + end)
        sequence.computed = end
        self._enter(sequence)
        self._chunks.append(sequence)
        self._prefilling = None if end == sequence.tokens else sequence
        return True

    def _enter(self, sequence: EngineSequence) -> None:
        """Enters the blocks that are full into the prefix cache."""
        full = min(sequence.computed // self._block, len(sequence.hashes))
        if full > sequence.in_tree:
            assert sequence.tip is not None
            sequence.tip, copies = self.cache.extend(sequence.tip, sequence.hashes[sequence.in_tree : full])
            sequence.copies += copies
            sequence.in_tree = full

    def _admit(self, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            tokens = sequence.tokens
            match = self.cache.match(sequence.hashes, min(len(sequence.hashes), (tokens - 1) // self._block))
            hit = match.blocks * self._block
            count = min(tokens - hit, budget)
            must_fit = tokens if self.limits.reserve_full_prompt else hit + count
            if -(-must_fit // self._block) - match.blocks + match.idle > self.cache.free:
                return
            self.waiting.popleft()
            self.running[sequence] = None
            sequence.admission = self._admissions = self._admissions + 1
            sequence.tip = self.cache.acquire(match)
            sequence.in_tree = match.blocks
            sequence.computed = hit
            if sequence.cached_tokens is None:
                sequence.cached_tokens = hit
                self.cached_tokens += hit
            has_room = self._compute(sequence, count)
            assert has_room
            budget -= count

    def _join(self, sequence: EngineSequence, step: int) -> None:
        """From the next step on the sequence decodes."""
        sequence.is_decoding = True
        sequence.joined_step = step
        sequence.computed_offset = sequence.computed - step - 1
        sequence.finish_step = step + sequence.request.output_tokens - sequence.output
        heapq.heappush(self._finishes, (sequence.finish_step, sequence.admission, sequence))
        self.decoding += 1
        self.context_tokens += sequence.computed + 1
        self._crossings[self._phase(sequence)] += 1

    def _leave_decoding(self, sequence: EngineSequence, now: float) -> None:
        """Brings the sequence's own numbers up to date; its last token came at `now`."""
        sequence.output = self.output_of(sequence)
        sequence.computed = self._step + sequence.computed_offset
        sequence.is_decoding = False
        self.decoding -= 1
        self.context_tokens -= sequence.computed + 1
        self._crossings[self._phase(sequence)] -= 1
        sequence.last_token_at = now
        sequence.worst_gap_s = max(sequence.worst_gap_s, self._longest.after(sequence.joined_step))
        if not self.decoding:
            self._longest.clear()

    def _preempt(self, sequence: EngineSequence, now: float) -> None:
        if sequence.is_decoding:
            self._leave_decoding(sequence, now)
        self._leave(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: EngineSequence) -> None:
        """Out of the batch; its blocks stay cached until they are evicted."""
        del self.running[sequence]
        if sequence is self._prefilling:
            self._prefilling = None
        self._enter(sequence)
        assert sequence.tip is not None
        private = sequence.copies + -(-sequence.computed // self._block) - sequence.in_tree
        self.cache.release(sequence.tip, private)
        sequence.tip = None
        sequence.computed = sequence.in_tree = sequence.copies = 0

    def _next_finish(self) -> EngineSequence | None:
        while self._finishes:
            step, _, sequence = self._finishes[0]
            if sequence.is_decoding and sequence.finish_step == step:
                return sequence
            heapq.heappop(self._finishes)
        return None

    def __repr__(self) -> str:
        return f"<Engine running={len(self.running)} waiting={len(self.waiting)} held={self.cache.held}/{self.cache.capacity}>"
