"""Scripted faults of the simulated engine: which request they hit, and how they break its answer.

A fault is data (`--fault JSON` or `POST /sim/faults`); a `FaultBook` decides, with a seed, which requests it hits;
`FaultySend` breaks one answer between the application and the server.
"""

import enum
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from server.guard import Message, Send


class FaultKind(enum.StrEnum):
    DELAY = "delay"  # `seconds` before the request is looked at
    STALL = "stall"  # after `after_chunks` chunks the whole engine hangs: no step, no call; /health stays 200
    RESET = "reset"  # TCP RST after `after_chunks` chunks; 0: before any byte
    TRUNCATE = "truncate"  # the connection ends without the terminating chunk after `after_chunks` chunks
    ERROR_FRAME = "error_frame"  # an error object and [DONE] after `after_chunks` chunks; HTTP 500 when not streaming
    STATUS = "status"  # HTTP `status` with an error body in vLLM's shape
    REFUSE = "refuse"  # nothing listens on the port for `seconds`, and idle connections close
    SLOW_START = "slow_start"  # `seconds` more before the port opens; only at launch
    FAIL_RELOAD = "fail_reload"  # reload_weights fails, the old weights stay


_NEEDS_SECONDS = frozenset({FaultKind.DELAY, FaultKind.REFUSE, FaultKind.SLOW_START})
_BREAKS_ANSWERS = frozenset({FaultKind.STALL, FaultKind.RESET, FaultKind.TRUNCATE, FaultKind.ERROR_FRAME})
_HITS_REQUESTS = _BREAKS_ANSWERS | {FaultKind.DELAY, FaultKind.STATUS}


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One scripted fault. It hits generating requests (FAIL_RELOAD: reloads) until `times` of them were hit."""

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

    def reload_fails(self) -> bool:
        """Draws whether the next weights reload fails."""
        return any(armed.fault.kind is FaultKind.FAIL_RELOAD and armed.strikes() for armed in self._armed)


class ConnectionBrokenByFault(Exception):
    """The fault has ended the connection; nothing more can be sent."""


class GenerationFailedByFault(Exception):
    """The fault makes generation fail; the answer ends with an error in vLLM's shape."""


class Connection(Protocol):
    """What a fault may do to the client's connection: provided by the server's protocol."""

    def reset(self) -> None:
        """Ends it with RST; unsent bytes are lost."""

    def close(self) -> None:
        """Ends it with FIN after what was written."""


class FaultySend:
    """An ASGI `send` that passes `after_chunks` body chunks and then does its fault once.

    An answer in one piece counts as broken in its middle: half of the body passes where `after_chunks` is 1 or more.

    Raises (from the call that meets the fault):
        ConnectionBrokenByFault, GenerationFailedByFault.
    """

    def __init__(
        self,
        send: Send,
        fault: Fault,
        connection: Connection,
        *,
        hang: Callable[[], Awaitable[None]],
        is_armed: Callable[[], bool] = lambda: True,
    ) -> None:
        """`hang` hangs the engine and returns when it has recovered; `is_armed` is asked before the fault strikes."""
        self._send = send
        self._fault = fault
        self._connection = connection
        self._hang = hang
        self._is_armed = is_armed
        self._left = fault.after_chunks
        self._is_spent = False

    async def __call__(self, message: Message) -> None:
        if self._is_spent:
            await self._send(message)
            return
        if message["type"] == "http.response.start":
            if self._left == 0 and self._fault.kind is not FaultKind.ERROR_FRAME:
                await self._strike()
            await self._send(message)
            return
        is_last = not message.get("more_body", False)
        if self._left > 0 and is_last and self._left == self._fault.after_chunks:  # and the first: an answer in one piece
            half = message["body"][: len(message["body"]) // 2]
            await self._send({"type": "http.response.body", "body": half, "more_body": True})
            await self._strike()
            await self._send({"type": "http.response.body", "body": message["body"][len(half) :]})
            return
        # After [DONE] it is too late for an error, but not for a connection that breaks.
        if self._left == 0 and not (is_last and self._fault.kind is FaultKind.ERROR_FRAME):
            await self._strike()
        self._left -= 1
        await self._send(message)

    async def _strike(self) -> None:
        self._is_spent = True
        if not self._is_armed():
            return
        match self._fault.kind:
            case FaultKind.STALL:
                await self._hang()
            case FaultKind.ERROR_FRAME:
                raise GenerationFailedByFault("Internal server error")
            case FaultKind.RESET:
                self._connection.reset()
                raise ConnectionBrokenByFault
            case _:
                self._connection.close()
                raise ConnectionBrokenByFault
