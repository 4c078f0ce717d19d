"""Scripted faults of the simulated engine, and which requests they hit. How they break answers: sim_faulty_send.

A fault is data (`--fault JSON` or `POST /sim/faults`); a `FaultBook` decides, with a seed, which requests it hits.
"""

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec


class FaultKind(enum.StrEnum):
    DELAY = "delay"  # `seconds` before the request is looked at
    STALL = "stall"  # after `after_chunks` chunks the whole engine hangs: no step, no call; /health stays 200
    RESET = "reset"  # TCP RST after `after_chunks` chunks; 0: before any byte
    TRUNCATE = "truncate"  # the connection ends without the terminating chunk after `after_chunks` chunks
    HALF_EVENT = "half_event"  # like truncate, but half of the chunk that would have come next is still sent
    NO_DONE = "no_done"  # a clean end after `after_chunks` chunks; 0: just before the last event; whole answers pass
    GARBAGE = "garbage"  # bytes that are not HTTP after `after_chunks` chunks, then the end; 0: in place of the answer
    ENDLESS = "endless"  # after `after_chunks` chunks an event (or a body) begins that never ends
    ERROR_FRAME = "error_frame"  # an error object and [DONE] after `after_chunks` chunks; HTTP 500 when not streaming
    STATUS = "status"  # HTTP `status` with an error body in vLLM's shape
    SLOW_STEP = "slow_step"  # an engine step takes `seconds` at least; the engine makes progress, slowly
    REFUSE = "refuse"  # nothing listens on the port for `seconds`, and idle connections close
    SLOW_START = "slow_start"  # `seconds` more before the port opens; only at launch
    FAIL_RELOAD = "fail_reload"  # reload_weights fails, the old weights stay


_NEEDS_SECONDS = frozenset({FaultKind.DELAY, FaultKind.REFUSE, FaultKind.SLOW_START, FaultKind.SLOW_STEP})
_BREAKS_ANSWERS = frozenset(
    {
        FaultKind.STALL,
        FaultKind.RESET,
        FaultKind.TRUNCATE,
        FaultKind.HALF_EVENT,
        FaultKind.NO_DONE,
        FaultKind.GARBAGE,
        FaultKind.ENDLESS,
        FaultKind.ERROR_FRAME,
    }
)
_HITS_REQUESTS = _BREAKS_ANSWERS | {FaultKind.DELAY, FaultKind.STATUS}


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One scripted fault. It hits generating requests until `times` of them were hit.

    FAIL_RELOAD hits reloads and SLOW_STEP engine steps instead.
    """

    kind: FaultKind
    seconds: float = 0.0
    after_chunks: int = 0  # body chunks that still reach the client; one chunk is one server-sent event
    status: int = 500
    message: str | None = None  # of STATUS
    times: int | None = None  # None: every one
    probability: float = 1.0
    seed: int = 0  # of the draw that `probability` decides

    def __post_init__(self) -> None:
        if self.seconds < 0 or (self.kind in _NEEDS_SECONDS and self.seconds == 0):
            raise ValueError(f"fault {self.kind}: seconds is {self.seconds}, but must be above 0")
        if self.after_chunks < 0:
            raise ValueError(f"fault {self.kind}: after_chunks is {self.after_chunks}, but must be 0 or more")
        if not 400 <= self.status <= 599:
            raise ValueError(f"fault {self.kind}: status is {self.status}, but must be an error from 400 to 599")
        if self.times is not None and self.times < 1:
            raise ValueError(f"fault {self.kind}: times is {self.times}, but must be 1 or more, or absent")
        if not 0.0 < self.probability <= 1.0:
            raise ValueError(f"fault {self.kind}: probability is {self.probability}, but must be above 0 and at most 1")


def decode_faults(data: bytes | str) -> list[Fault]:
    """One fault or a list of them from JSON.

    Raises:
        ValueError: with the field and the reason.
    """
    try:
        return (
            msgspec.json.decode(data, type=list[Fault])
            if data.lstrip()[:1] in (b"[", "[")
            else [msgspec.json.decode(data, type=Fault)]
        )
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read a fault: {error}") from error


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """What will go wrong with one request."""

    delay_s: float = 0.0
    status: Fault | None = None
    breakage: Fault | None = None
    epoch: int = field(default=0, compare=False)  # how often the book had been cleared; see FaultBook.still_holds


class _Armed:
    """A fault with what is left of it."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.left = fault.times
        self._rng = random.Random(fault.seed)

    def strikes(self) -> bool:
        if self.left == 0 or self._rng.random() >= self.fault.probability:
            return False
        if self.left is not None:
            self.left -= 1
        return True


class FaultBook:
    """The faults that are armed now, in the order in which they were added."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._armed = [_Armed(fault) for fault in faults]
        self._epoch = 0

    def add(self, faults: Sequence[Fault]) -> None:
        self._armed.extend(_Armed(fault) for fault in faults)

    def clear(self) -> None:
        self._armed.clear()
        self._epoch += 1

    def still_holds(self, plan: RequestPlan) -> bool:
        """Whether no `clear` came since the plan was drawn; a cleared fault strikes no more."""
        return plan.epoch == self._epoch

    def listing(self) -> list[dict[str, Any]]:
        """The armed faults as JSON-ready values, with how many hits each has `left` (null: no limit)."""
        return [msgspec.to_builtins(armed.fault) | {"left": armed.left} for armed in self._armed]

    def plan_request(self) -> RequestPlan:
        """Draws what hits the next generating request: at most one delay, one status and one breakage."""
        struck: dict[str, Fault] = {}
        for armed in self._armed:
            kind = armed.fault.kind
            slot = "breakage" if kind in _BREAKS_ANSWERS else kind.value
            if kind in _HITS_REQUESTS and slot not in struck and armed.strikes():
                struck[slot] = armed.fault
        delay = struck.get(FaultKind.DELAY)
        seconds = delay.seconds if delay else 0.0
        return RequestPlan(seconds, struck.get(FaultKind.STATUS), struck.get("breakage"), self._epoch)

    def slow_step_s(self) -> float:
        """Draws how long the next engine step takes at least; 0 where no fault slows it."""
        slow = [armed for armed in self._armed if armed.fault.kind is FaultKind.SLOW_STEP]
        return next((armed.fault.seconds for armed in slow if armed.strikes()), 0.0)

    def reload_fails(self) -> bool:
        """Draws whether the next weights reload fails."""
        return any(armed.fault.kind is FaultKind.FAIL_RELOAD and armed.strikes() for armed in self._armed)
