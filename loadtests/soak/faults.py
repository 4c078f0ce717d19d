"""Which fault strikes which replica next. Pure: acting is the injector's."""

import random
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from server.sim_faults import FaultKind


class FaultName(StrEnum):
    """A fault of the whole replica, which ends after a while, or one that the simulated engine plays to some requests."""

    KILL = "kill -9"
    KILL_SLOW_START = "kill -9, slow start"
    TERMINATE = "SIGTERM"
    FREEZE = "SIGSTOP"
    PAUSE_KEEP = "pause keep"
    PAUSE_WAIT = "pause wait"
    PAUSE_ABORT = "pause abort"
    DRAIN = "drain"
    REMOVE = "remove"
    ABORT_ALL = "abort all"
    REFUSE = "refuse"
    STALL = "stall"
    SLOW_STEP = "slow_step"
    DELAY = "delay"
    RESET = "reset"
    RESET_AT_ONCE = "reset at once"
    TRUNCATE = "truncate"
    HALF_EVENT = "half_event"
    NO_DONE = "no_done"
    NO_DONE_INSIDE = "no_done inside"
    GARBAGE = "garbage"
    GARBAGE_AT_ONCE = "garbage at once"
    ENDLESS = "endless"
    ERROR_FRAME = "error_frame"
    STATUS_429 = "status 429"
    STATUS_500 = "status 500"
    STATUS_503 = "status 503"


# While one of these lasts its replica serves nobody new.
DISABLING = frozenset(
    {FaultName.KILL, FaultName.KILL_SLOW_START, FaultName.TERMINATE, FaultName.FREEZE, FaultName.PAUSE_KEEP}
    | {FaultName.PAUSE_WAIT, FaultName.PAUSE_ABORT, FaultName.DRAIN, FaultName.REMOVE, FaultName.REFUSE, FaultName.STALL}
)
_STATUSES = {FaultName.STATUS_429: 429, FaultName.STATUS_500: 500, FaultName.STATUS_503: 503}
_AT_ONCE = {FaultName.RESET_AT_ONCE: FaultKind.RESET, FaultName.GARBAGE_AT_ONCE: FaultKind.GARBAGE}
_INSIDE = {
    FaultName.RESET: FaultKind.RESET,
    FaultName.TRUNCATE: FaultKind.TRUNCATE,
    FaultName.HALF_EVENT: FaultKind.HALF_EVENT,
    FaultName.NO_DONE_INSIDE: FaultKind.NO_DONE,
    FaultName.GARBAGE: FaultKind.GARBAGE,
    FaultName.ENDLESS: FaultKind.ENDLESS,
    FaultName.ERROR_FRAME: FaultKind.ERROR_FRAME,
}
_CHUNKS_MAX = 20
_DISABLED_S = (0.5, 5.0)
_START_S = 2.0


@dataclass(frozen=True, slots=True)
class Strike:
    name: FaultName
    replica: int
    seconds: float  # that a disabling fault lasts
    fault: dict[str, Any] | None = None  # for the simulated engine


class FaultDeck:
    """Deals every fault once before any comes again, to replicas that have none, and leaves one replica alone always."""

    def __init__(self, rng: random.Random, *, replicas: int) -> None:
        self._rng = rng
        self._replicas = replicas
        self._deck: list[FaultName] = []

    def deal(self, disabled: Collection[int]) -> Strike | None:
        """The next strike while the replicas `disabled` are out already; None if there is none that may strike now."""
        if not self._deck:
            self._deck = list(FaultName)
            self._rng.shuffle(self._deck)
        may_disable = len(disabled) < self._replicas - 1
        name = next((name for name in reversed(self._deck) if may_disable or name not in DISABLING), None)
        if name is None:
            return None
        self._deck.remove(name)
        replica = self._rng.choice([replica for replica in range(self._replicas) if replica not in disabled])
        seconds = self._rng.uniform(*_DISABLED_S)
        return Strike(name, replica, seconds, self._fault(name, seconds))

    def _fault(self, name: FaultName, seconds: float) -> dict[str, Any] | None:
        rng = self._rng
        if name in _STATUSES:
            return {"kind": FaultKind.STATUS, "status": _STATUSES[name], "times": rng.randint(1, 4)}
        if name in _AT_ONCE:
            return {"kind": _AT_ONCE[name], "times": rng.randint(1, 2)}
        if name in _INSIDE:
            return {"kind": _INSIDE[name], "after_chunks": rng.randint(1, _CHUNKS_MAX), "times": rng.randint(1, 2)}
        match name:
            case FaultName.NO_DONE:
                return {"kind": FaultKind.NO_DONE, "times": 1}
            case FaultName.STALL:
                return {"kind": FaultKind.STALL, "after_chunks": rng.randint(0, _CHUNKS_MAX), "times": 1}
            case FaultName.SLOW_STEP:
                return {"kind": FaultKind.SLOW_STEP, "seconds": rng.uniform(0.1, 0.5), "times": 5}
            case FaultName.DELAY:
                return {"kind": FaultKind.DELAY, "seconds": rng.uniform(0.2, 1.0), "times": 3}
            case FaultName.REFUSE:
                return {"kind": FaultKind.REFUSE, "seconds": seconds}
            case FaultName.KILL_SLOW_START:
                return {"kind": FaultKind.SLOW_START, "seconds": _START_S}
            case _:
                return None
