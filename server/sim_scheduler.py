"""Continuous batching of the simulated engine: chunked prefill, prefix reuse, preemption by recompute, FCFS waiting queue.

Pure and synchronous: `step(now)` decides one engine step, advances every sequence in it, and says how long the step takes
on the simulated accelerator. The caller shows the emissions only after that time. Follows the order of vLLM's scheduler:
running sequences first, in their order; waiting ones only when nobody was preempted; the youngest is preempted first.
"""

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from server.sim_blocks import Block, BlockPool, CacheEvent, chain_hash
from server.sim_generation import Emission, FinishReason
from server.sim_settings import SchedulerSettings, TimingModel


class PauseState(enum.Enum):
    RUNNING = "running"
    NEW_WAIT = "new_wait"  # running sequences go on, nothing waiting is admitted
    ALL_WAIT = "all_wait"  # nothing is scheduled


class Output(Protocol):
    """What a sequence gives once its prompt is computed: a `Generation`, or the vector of an embedding."""

    def mark_stale(self) -> None: ...

    def advance(self, fingerprint: bytes, *, room: int) -> Emission: ...


class SequenceState:
    """One sequence inside the scheduler: its tokens, the blocks that hold their KV, and its times.

    `computed` tokens have KV; when all have, the next token is generated. Times are the scheduler's `now`.
    """

    __slots__ = (
        "arrived_at",
        "blocks",
        "cached_tokens",
        "computed",
        "created_cache_tokens",
        "finished_at",
        "first_token_at",
        "generation",
        "hashes",
        "id",
        "last_token_at",
        "max_tokens",
        "preemptions",
        "prompt_tokens",
        "salt",
        "scheduled_at",
        "tokens",
    )

    def __init__(
        self,
        sequence_id: str,
        prompt: Sequence[int],
        generation: Output,
        *,
        arrived_at: float,
        max_tokens: int = 0,
        salt: str | None = None,
    ) -> None:
        self.id = sequence_id
        self.tokens = list(prompt)
        self.prompt_tokens = len(prompt)
        self.generation = generation
        self.max_tokens = max_tokens  # as asked for; only reported
        self.salt = salt
        self.computed = 0
        self.blocks: list[Block] = []
        self.hashes: list[bytes] = []
        self.cached_tokens: int | None = None  # prompt tokens found in the prefix cache at first admission
        self.created_cache_tokens = 0  # prompt tokens newly written to the prefix cache
        self.preemptions = 0
        self.arrived_at = arrived_at
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.finished_at: float | None = None

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def __repr__(self) -> str:
        return f"SequenceState({self.id}, {self.prompt_tokens}+{self.output_tokens} tokens, computed={self.computed})"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One engine step. Nothing in it may be shown before `seconds` have passed."""

    seconds: float
    emissions: tuple[Emission, ...]
    prefilled_tokens: int  # prompt (or recomputed) tokens whose KV this step computed
    generated_tokens: int
    admitted: tuple[SequenceState, ...]  # sequences admitted for the first time
    started: tuple[SequenceState, ...]  # sequences that got their first token
    finished: tuple[SequenceState, ...]
    preempted: int


class Scheduler:
    def __init__(self, settings: SchedulerSettings, timing: TimingModel, fingerprint: bytes) -> None:
        self._settings = settings
        self._timing = timing
        self._pool = BlockPool(settings.num_blocks)
        self._waiting: deque[SequenceState] = deque()
        self._running: list[SequenceState] = []
        self._sequences: dict[str, SequenceState] = {}
        self.fingerprint = fingerprint  # of the weights that compute from now on
        self.pause = PauseState.RUNNING

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that sequences hold, 0 to 1."""
        return self._pool.used / self._pool.total

    @property
    def has_work(self) -> bool:
        """Whether a step would do something now."""
        match self.pause:
            case PauseState.RUNNING:
                return bool(self._running or self._waiting)
            case PauseState.NEW_WAIT:
                return bool(self._running)
            case PauseState.ALL_WAIT:
                return False

    def add(self, sequence: SequenceState) -> None:
        """Queues a sequence.

        Raises:
            ValueError: its prompt leaves no room for an answer, or its id is in use.
        """
        if sequence.prompt_tokens >= self._settings.max_model_len:
            raise ValueError(
                f"a prompt of {sequence.prompt_tokens} tokens leaves no room in a context of {self._settings.max_model_len}"
            )
        if sequence.id in self._sequences:
            raise ValueError(f"sequence id {sequence.id!r} is already in use")
        self._sequences[sequence.id] = sequence
        self._waiting.append(sequence)

    def abort(self, sequence_id: str, now: float) -> SequenceState | None:
        """Ends a sequence and frees its blocks at once; None if it is not here (any more)."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return None
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._finish(sequence, now)
        return sequence

    def abort_all(self, now: float) -> list[SequenceState]:
        return [ended for sequence_id in list(self._sequences) if (ended := self.abort(sequence_id, now)) is not None]

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forgets all cached prefixes. Without `preempt_running` it fails (False) while sequences hold blocks."""
        if preempt_running:
            while self._running:
                self._preempt(self._running.pop())
        return self._pool.clear()

    def take_cache_events(self) -> list[CacheEvent]:
        return self._pool.take_events()

    def step(self, now: float, *, least_s: float = 0.0) -> StepResult:
        """Schedules one step at `now` and advances its sequences. It takes `least_s` or longer."""
        if not self.has_work:
            return StepResult(
                seconds=0.0,
                emissions=(),
                prefilled_tokens=0,
                generated_tokens=0,
                admitted=(),
                started=(),
                finished=(),
                preempted=0,
            )
        batch, preempted = self._schedule_running()
        admitted: list[SequenceState] = []
        if not preempted and self.pause is PauseState.RUNNING:
            admitted = self._admit_waiting(batch, now)
        return self._execute(batch, admitted, preempted, now, least_s)

    def _schedule_running(self) -> tuple[list[tuple[SequenceState, int]], int]:
        """Gives each running sequence its tokens of this step, preempting the youngest where blocks run out."""
        budget = self._settings.max_num_batched_tokens
        batch: list[tuple[SequenceState, int]] = []
        preempted = 0
        while len(batch) < len(self._running) and budget > 0:
            sequence = self._running[len(batch)]
            count = min(len(sequence.tokens) - sequence.computed, budget)
            while not self._reserve(sequence, count):
                victim = self._running.pop()
                self._preempt(victim)
                preempted += 1
                if victim is sequence:
                    return batch, preempted
            batch.append((sequence, count))
            budget -= count
        return batch, preempted

    def _admit_waiting(self, batch: list[tuple[SequenceState, int]], now: float) -> list[SequenceState]:
        budget = self._settings.max_num_batched_tokens - sum(count for _, count in batch)
        admitted: list[SequenceState] = []
        while self._waiting and budget > 0 and len(self._running) < self._settings.max_num_seqs:
            sequence = self._waiting[0]
            hits = self._lookup(sequence)
            for block in hits:
                self._pool.acquire(block)
            sequence.blocks = list(hits)
            sequence.computed = len(hits) * self._settings.block_size
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if not self._reserve(sequence, count):
                self._drop_blocks(sequence)
                break
            if any(block.fingerprint != self.fingerprint for block in hits):
                sequence.generation.mark_stale()
            if sequence.cached_tokens is None:
                sequence.cached_tokens = sequence.computed
                sequence.scheduled_at = now
                admitted.append(sequence)
            self._waiting.popleft()
            self._running.append(sequence)
            batch.append((sequence, count))
            budget -= count
        return admitted

    def _execute(
        self,
        batch: list[tuple[SequenceState, int]],
        admitted: list[SequenceState],
        preempted: int,
        now: float,
        least_s: float,
    ) -> StepResult:
        prefilled = decoding = context = 0
        ready: list[SequenceState] = []
        for sequence, count in batch:
            is_decode = sequence.output_tokens > 0 and count == 1
            if is_decode:
                decoding += 1
                context += len(sequence.tokens)
            else:
                prefilled += count
            self._compute(sequence, count)
            if sequence.computed == len(sequence.tokens):
                ready.append(sequence)
        seconds = self._timing.step_seconds(prefill_tokens=prefilled, decode_sequences=decoding, context_tokens=context)
        seconds = max(seconds, least_s)
        emissions: list[Emission] = []
        started: list[SequenceState] = []
        finished: list[SequenceState] = []
        for sequence in ready:
            if sequence.first_token_at is None:
                sequence.first_token_at = now + seconds
                started.append(sequence)
            emission = sequence.generation.advance(self.fingerprint, room=self._settings.max_model_len - len(sequence.tokens))
            if emission.token is not None:
                sequence.tokens.append(emission.token)
            emissions.append(emission)
            if emission.finish_reason is not None:
                self._running.remove(sequence)
                self._finish(sequence, now + seconds)
                finished.append(sequence)
        return StepResult(
            seconds=seconds,
            emissions=tuple(emissions),
            prefilled_tokens=prefilled,
            generated_tokens=sum(emission.token is not None for emission in emissions),
            admitted=tuple(admitted),
            started=tuple(started),
            finished=tuple(finished),
            preempted=preempted,
        )

    def _compute(self, sequence: SequenceState, count: int) -> None:
        """Computes the KV of the next `count` tokens under today's weights and caches the blocks that became full."""
        size = self._settings.block_size
        full_before = sequence.computed // size
        end = sequence.computed + count
        for block in sequence.blocks[full_before : -(-end // size)]:
            block.computed_by(self.fingerprint)
        sequence.computed = end
        full = end // size
        if self._settings.prefix_caching and full > full_before:
            self._extend_hashes(sequence, full)
            self._pool.store(
                sequence.blocks[full_before:full],
                sequence.hashes[full_before:full],
                parent=sequence.hashes[full_before - 1] if full_before else None,
                tokens=sequence.tokens[full_before * size : full * size],
                salt=sequence.salt,
            )
            written = min(full * size, sequence.prompt_tokens // size * size) - (sequence.cached_tokens or 0)
            sequence.created_cache_tokens = max(0, written)

    def _lookup(self, sequence: SequenceState) -> list[Block]:
        """Cached whole blocks at the beginning of the sequence; at least one token is left to compute."""
        if not self._settings.prefix_caching:
            return []
        usable = (len(sequence.tokens) - 1) // self._settings.block_size
        self._extend_hashes(sequence, usable)
        return self._pool.match(sequence.hashes[:usable])

    def _extend_hashes(self, sequence: SequenceState, count: int) -> None:
        size = self._settings.block_size
        for index in range(len(sequence.hashes), count):
            parent = sequence.hashes[-1] if sequence.hashes else None
            tokens = sequence.tokens[index * size : (index + 1) * size]
            sequence.hashes.append(chain_hash(parent, tokens, sequence.salt))

    def _reserve(self, sequence: SequenceState, count: int) -> bool:
        """Blocks for `count` more tokens; False if there are not enough."""
        needed = -(-(sequence.computed + count) // self._settings.block_size) - len(sequence.blocks)
        if needed > self._pool.free:
            return False
        if needed > 0:
            sequence.blocks.extend(self._pool.allocate(needed))
        return True

    def _preempt(self, sequence: SequenceState) -> None:
        """Takes a sequence's blocks away; it waits first in line and computes its tokens again."""
        self._drop_blocks(sequence)
        sequence.preemptions += 1
        self._waiting.appendleft(sequence)

    def _finish(self, sequence: SequenceState, at: float) -> None:
        self._drop_blocks(sequence)
        sequence.finished_at = at
        del self._sequences[sequence.id]

    def _drop_blocks(self, sequence: SequenceState) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0

    def __repr__(self) -> str:
        return f"Scheduler(running={self.running}, waiting={self.waiting}, pause={self.pause.value}, {self._pool!r})"


def abort_emission(sequence: SequenceState) -> Emission:
    """What the client of an aborted sequence gets last."""
    return Emission(sequence.id, None, finish_reason=FinishReason.ABORT)
