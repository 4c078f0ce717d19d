"""The checkpoint swap: the order of its steps, its deadlines, and the way back when a step fails.

    verify -> pause -> load -> invalidate -> label -> resume
                 `-> on any failure: load the former weights -> invalidate -> label -> resume

Serving goes on during `verify`. From `pause` to `resume` the engine schedules nothing, so no token and no KV block is ever
computed with half-loaded weights, and requests that arrive wait.

Why no request can hit KV of other weights: `pause` leaves the cache alone (vLLM's `clear_cache` argument is deprecated,
and if the swap is given up before `load` all of the cache is still good). After the new weights are complete, and before
anything is scheduled, `invalidate` resets it with `reset_running_requests`: vLLM then preempts every running request, which
frees all blocks, and drops all block hashes, and it raises if a block is still held. Preempted requests are computed
again from their tokens under the new weights when they are scheduled. Without that option vLLM keeps the blocks and only
answers `success: false`, so the client reads `success` in any case. `reset_external` does the same for what a KV
connector holds outside of the engine. Blocks are written only by scheduled steps, hence none can appear before `resume`.

This module knows neither HTTP nor the store; it drives an `EngineControl`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from protocol.manifest import CheckpointError
from protocol.status import SwapOutcome, SwapReport, checkpoint_label
from server.checkpoint_check import SwapRefused
from server.engine_client import EngineError
from server.settings import SwapDeadlines

logger = logging.getLogger(__name__)


class EngineControl(Protocol):
    """What a swap asks of an engine. Every method raises EngineError when it did not do it."""

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def load(self, weights: str) -> None: ...
    async def reset_cache(self) -> None: ...
    async def set_label(self, label: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Weights that a replica serves: under which name, since which swap, from where."""

    version: str
    epoch: int
    weights: str  # folder or hub id, as the engine takes it

    @property
    def label(self) -> str:
        return checkpoint_label(self.version, self.epoch)


class _StepFailed(Exception):
    def __init__(self, phase: str, why: str) -> None:
        super().__init__(f"{phase}: {why}")
        self.code = f"{phase}_failed"


async def swap(
    engine: EngineControl,
    *,
    former: Served,
    target: Served,
    verify: Callable[[], Awaitable[None]],
    deadlines: SwapDeadlines,
    clock: Callable[[], float],
) -> SwapReport:
    """Replaces `former` by `target` in a serving engine; the report says what it serves afterwards.

    `verify` raises CheckpointError or SwapRefused for weights that must not be loaded; any other exception of it is logged
    and a refusal too, with code `internal`. After outcome FAILED nobody knows what the engine holds: the caller must
    restart it. The same is true if this coroutine is cancelled or raises after `verify` has returned.
    """
    started = clock()
    steps = _Steps(clock)

    def report(outcome: SwapOutcome, served: Served, *, code: str | None = None, reason: str | None = None) -> SwapReport:
        return SwapReport(
            outcome=outcome,
            version=served.version,
            epoch=served.epoch,
            requested=target.version,
            seconds=clock() - started,
            phases=steps.seconds,
            code=code,
            reason=reason,
        )

    try:
        await steps.run("verify", verify, deadlines.verify_s)
    except CheckpointError as error:
        return report(SwapOutcome.REFUSED, former, code=error.fault, reason=str(error))
    except (SwapRefused, _StepFailed) as error:
        return report(SwapOutcome.REFUSED, former, code=error.code, reason=str(error))
    except Exception as error:
        logger.exception("verifying %s failed in a way that nobody foresaw", target.version)
        reason = f"verify: {type(error).__name__}: {error}; the agent's log has more. The engine was not touched"
        return report(SwapOutcome.REFUSED, former, code="internal", reason=reason)

    weights_touched = False
    try:
        await steps.run("pause", engine.pause, deadlines.pause_s)
        weights_touched = True
        await steps.run("load", lambda: engine.load(target.weights), deadlines.load_s)
        await steps.run("invalidate", engine.reset_cache, deadlines.invalidate_s)
        await steps.run("label", lambda: engine.set_label(target.label), deadlines.label_s)
        await steps.run("resume", engine.resume, deadlines.resume_s)
        return report(SwapOutcome.SWAPPED, target)
    except _StepFailed as error:
        failure = error

    try:
        if weights_touched:
            await steps.run("restore", lambda: engine.load(former.weights), deadlines.load_s)
            await steps.run("restore", engine.reset_cache, deadlines.invalidate_s)
            await steps.run("restore", lambda: engine.set_label(former.label), deadlines.label_s)
        await steps.run("restore", engine.resume, deadlines.resume_s)
        return report(SwapOutcome.RESTORED, former, code=failure.code, reason=str(failure))
    except _StepFailed as error:
        return report(SwapOutcome.FAILED, former, code=error.code, reason=f"{failure}; then {error}")


class _Steps:
    """Runs steps under their deadlines and adds up the seconds of each phase."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}

    async def run(self, phase: str, step: Callable[[], Awaitable[None]], deadline_s: float) -> None:
        """Raises _StepFailed, or whatever `step` raises that is not about the engine."""
        with self._timed(phase):
            try:
                async with asyncio.timeout(deadline_s):
                    await step()
            except TimeoutError as error:
                raise _StepFailed(phase, f"not done within {deadline_s:g} s") from error
            except EngineError as error:
                raise _StepFailed(phase, str(error)) from error

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = self._clock()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + self._clock() - started
