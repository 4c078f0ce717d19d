"""Runs the scheduler of the simulated engine on the event loop's clock and hands tokens to their requests.

The loop takes a step, lets its duration pass, then shows its tokens. Requests come and go between and during steps; a
sequence that was aborted during a step gets nothing more from it.
"""

import asyncio
import contextlib
import enum
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from server.sim_blocks import CacheEvent
from server.sim_generation import Emission, FinishReason
from server.sim_metrics import EngineMetrics
from server.sim_scheduler import PauseState, Scheduler, SequenceState, StepResult, abort_emission
from server.sim_weights import Weights, check_same_layout, load_weights

_LOG = logging.getLogger(__name__)
_MAX_LAG_S = 0.05  # how much of a late start the following steps may make up for


class PauseMode(enum.StrEnum):
    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class CacheEventSink(Protocol):
    def publish(self, events: Sequence[CacheEvent]) -> None: ...


class NoCacheEvents:
    """The sink of an engine that publishes no KV events."""

    def publish(self, events: Sequence[CacheEvent]) -> None:
        pass


class TokenStream:
    """The emissions of one request's sequences. A slow reader gets several at once, as from vLLM."""

    __slots__ = ("_open", "_pending", "_ready", "sequences")

    def __init__(self, sequences: Sequence[SequenceState]) -> None:
        self.sequences = tuple(sequences)
        self._open = len(sequences)
        self._pending: deque[Emission] = deque()
        self._ready = asyncio.Event()

    def push(self, emission: Emission) -> None:
        self._pending.append(emission)
        self._ready.set()

    async def take(self) -> list[Emission]:
        """What has arrived, after waiting for at least one emission; empty once every sequence has ended."""
        if not self._open:
            return []
        await self._ready.wait()
        self._ready.clear()
        taken = list(self._pending)
        self._pending.clear()
        self._open -= sum(emission.finish_reason is not None for emission in taken)
        return taken


@dataclass(frozen=True, slots=True)
class _Entry:
    sequence: SequenceState
    stream: TokenStream


class SimulatedEngine:
    """One engine: scheduler, weights and the loop that runs them. All methods belong to one event loop."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        weights: Weights,
        metrics: EngineMetrics,
        cache_events: CacheEventSink,
        clock: Callable[[], float],
        weights_load_s: float,
        slow_step_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`slow_step_s` is asked before each step how long it must take at least."""
        self._scheduler = scheduler
        self._weights = weights
        self._metrics = metrics
        self._cache_events = cache_events
        self._clock = clock
        self._weights_load_s = weights_load_s
        self._slow_step_s = slow_step_s
        self._entries: dict[str, _Entry] = {}
        self._work = asyncio.Event()
        self._not_hung = asyncio.Event()
        self._not_hung.set()
        self._hurry = asyncio.Event()  # ends a slow step early
        self._ending: tuple[SequenceState, ...] = ()  # ended in the current step, not yet shown
        self._in_step = False
        self._step_waiters: list[asyncio.Future[None]] = []
        self._is_closing = False
        self.weight_version = "default"

    @property
    def in_flight(self) -> int:
        """Sequences that have not ended."""
        return len(self._entries)

    @property
    def ending(self) -> int:
        """Sequences whose last token the current step computes: to a client, and in the metrics, they still run."""
        return sum(sequence.id in self._entries for sequence in self._ending)

    @property
    def is_paused(self) -> bool:
        return self._scheduler.pause is not PauseState.RUNNING

    def now(self) -> float:
        return self._clock()

    async def run(self) -> None:
        """Steps as long as there is work, for ever. A hanging engine hangs inside a step, with what then runs in it."""
        deadline = self._clock()
        while True:
            if not self._scheduler.has_work:
                self._work.clear()
                await self._work.wait()
                deadline = self._clock()
                continue
            now = self._clock()
            self._in_step = True
            slow_s = self._slow_step_s()
            step = self._scheduler.step(now, least_s=slow_s)
            self._ending = step.finished
            deadline = max(deadline, now - _MAX_LAG_S) + step.seconds
            await self._pass_time(max(0.0, deadline - self._clock()), is_slow=slow_s > 0)
            await self._not_hung.wait()
            self._publish(step)
            self._ending = ()
            self._in_step = False
            self._wake_step_waiters()

    def submit(self, sequences: Sequence[SequenceState]) -> TokenStream:
        """Queues the sequences of one request. A closing engine aborts them at once, as vLLM does.

        Raises:
            ValueError: a prompt that does not fit (see Scheduler.add).
        """
        stream = TokenStream(sequences)
        for sequence in sequences:
            if self._is_closing:
                stream.push(abort_emission(sequence))
                continue
            self._scheduler.add(sequence)
            self._entries[sequence.id] = _Entry(sequence, stream)
        self._metrics.on_submitted(n=len(sequences))
        self._work.set()
        return stream

    def abort(self, sequence_ids: Iterable[str]) -> int:
        """Ends sequences now, with finish reason `abort`; returns how many were still going."""
        ended = 0
        for sequence_id in list(sequence_ids):
            entry = self._entries.pop(sequence_id, None)
            # The scheduler may have finished a sequence whose last token the current step has not shown yet.
            self._scheduler.abort(sequence_id, self._clock())
            if entry is not None:
                entry.stream.push(abort_emission(entry.sequence))
                self._metrics.on_finished(FinishReason.ABORT)
                ended += 1
        self._wake_step_waiters()
        return ended

    def abort_answers(self, answer_ids: Iterable[str]) -> int:
        """Like `abort`, by the ids of answers: a sequence's id is its answer's id and what makes it unique, after a `/`."""
        wanted = frozenset(answer_ids)
        return self.abort(sequence_id for sequence_id in self._entries if sequence_id.rsplit("/", 2)[0] in wanted)

    def abort_all(self) -> int:
        return self.abort(self._entries)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """vLLM's pause: returns when the engine is idle. Every mode queues what arrives from now on.

        `abort` ends what is in flight, `wait` lets running sequences finish, `keep` freezes them. With `clear_cache` the
        prefix cache is emptied, for which frozen sequences lose their KV and are computed again after `resume`.
        """
        await self._not_hung.wait()
        if mode is PauseMode.ABORT:
            self.abort_all()
        self._scheduler.pause = PauseState.ALL_WAIT if mode is PauseMode.KEEP else PauseState.NEW_WAIT
        self._work.set()
        while self._in_step or (self.is_paused and self._scheduler.has_work):
            await self._step_shown()
        if clear_cache and self.is_paused:
            self._scheduler.reset_prefix_cache(preempt_running=True)
            self._publish_cache_events()

    async def resume(self) -> None:
        await self._not_hung.wait()
        self._scheduler.pause = PauseState.RUNNING
        self._work.set()
        self._wake_step_waiters()

    async def reset_prefix_cache(self, *, preempt_running: bool) -> bool:
        """False, and nothing is forgotten, while sequences hold blocks."""
        await self._not_hung.wait()
        succeeded = self._scheduler.reset_prefix_cache(preempt_running=preempt_running)
        self._publish_cache_events()
        self._work.set()
        return succeeded

    async def reload_weights(self, folder: Path) -> None:
        """Replaces the weights by those of `folder`; the old ones stay where that fails.

        Raises:
            WeightsError: the folder cannot be loaded, or has other tensors, shapes or types than the engine's model.
        """
        await self._not_hung.wait()
        weights = await asyncio.to_thread(load_weights, folder)
        check_same_layout(weights, self._weights)
        await asyncio.sleep(self._weights_load_s)
        self._weights = weights
        self._scheduler.fingerprint = weights.fingerprint
        _LOG.info("weights reloaded, fingerprint %s", weights.fingerprint.hex()[:12])

    def hang(self) -> None:
        """The engine stops stepping and answers no call, though its HTTP server lives; until `recover`."""
        self._not_hung.clear()

    def recover(self) -> None:
        """Ends a hang and a slow step."""
        self._not_hung.set()
        self._hurry.set()
        self._work.set()

    async def until_not_hung(self) -> None:
        await self._not_hung.wait()

    async def close(self, timeout_s: float) -> None:
        """Takes nothing new, gives what is in flight `timeout_s` to end, then aborts the rest."""
        self._is_closing = True
        deadline = self._clock() + timeout_s
        while self._entries and not self.is_paused and (left := deadline - self._clock()) > 0:
            try:
                async with asyncio.timeout(left):
                    await self._step_shown()
            except TimeoutError:
                break
        self.abort_all()

    async def _pass_time(self, seconds: float, *, is_slow: bool) -> None:
        if not is_slow:
            await asyncio.sleep(seconds)
            return
        self._hurry.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()

    def _publish(self, step: StepResult) -> None:
        now = self._clock()
        self._metrics.on_step(step)
        for emission in step.emissions:
            entry = self._entries.get(emission.sequence_id)
            if entry is None:
                continue
            if emission.token is not None:
                self._metrics.on_token(entry.sequence, now)
            if emission.finish_reason is not None:
                del self._entries[emission.sequence_id]
                self._metrics.on_finished(emission.finish_reason)
            entry.stream.push(emission)
        self._publish_cache_events()

    def _publish_cache_events(self) -> None:
        if events := self._scheduler.take_cache_events():
            self._cache_events.publish(events)

    async def _step_shown(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._step_waiters.append(waiter)
        await waiter

    def _wake_step_waiters(self) -> None:
        waiters, self._step_waiters = self._step_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def __repr__(self) -> str:
        return f"SimulatedEngine({self._scheduler!r}, in_flight={self.in_flight}, hung={not self._not_hung.is_set()})"
