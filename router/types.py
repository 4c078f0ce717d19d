"""Values that the parts of the router hand to each other."""

import enum
from dataclasses import dataclass
from typing import NamedTuple, NewType

from protocol.status import ReplicaStatus

ReplicaId = NewType("ReplicaId", str)  # host:port of the URL it was added with; metric label and admin key


class Health(enum.StrEnum):
    UNKNOWN = "unknown"  # added, not yet heard of
    READY = "ready"
    SWAPPING = "swapping"  # alive and paused for a checkpoint: used only when nothing is ready
    TRIPPED = "tripped"  # its breaker is open: it failed too often, and is given single trials
    STALLED = "stalled"  # answers its health probe but computes nothing
    DRAINING = "draining"  # finishes what it has, gets nothing new
    STARTING = "starting"  # its agent says that the engine is not up
    DOWN = "down"


# Where a new request may go, best first. The last two only when nothing else is left: never is the last replica taken out.
PLACEABLE = (Health.READY, Health.SWAPPING, Health.TRIPPED, Health.STALLED)


class Verdict(enum.StrEnum):
    """What the ending of a request says about its replica."""

    GOOD = "good"
    BAD = "bad"
    NEUTRAL = "neutral"  # nothing: the client left, or the engine was only busy


class Endpoint(NamedTuple):
    """Where an engine listens for HTTP."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class CacheFacts(NamedTuple):
    """An engine's KV cache, as its metrics describe it. Tokens; None: not known."""

    capacity_tokens: int | None  # of each rank
    block_tokens: int | None
    ranks: int  # data-parallel ranks behind its port, each with a cache of its own


@dataclass(frozen=True, slots=True)
class Observation:
    """What one probe of a replica found. `problem` is set when it must not get requests, and says why."""

    health: Health
    problem: str | None = None
    engine: Endpoint | None = None  # unknown until the first answer of an agent
    models: tuple[str, ...] | None = None  # None: not asked in this probe
    status: ReplicaStatus | None = None  # only from an agent
    cache: CacheFacts | None = None  # None: not asked in this probe, or not told
    is_gone: bool = False  # nobody listens: what does so next is another process, with an empty cache
