"""A request that waits in the router, and the answer to one that may not."""

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

from router.policy.interface import PlacementRequest
from router.types import ReplicaId

Candidates = Callable[[], Sequence[ReplicaId]]  # asked at each try: where the request may go now


class Ending(enum.StrEnum):
    """How waiting ends, exactly once."""

    DISPATCHED = "dispatched"
    EXPIRED = "expired"  # it waited longer than its class allows
    WITHDRAWN = "withdrawn"  # its client left
    NO_REPLICA = "no_replica"  # nothing is left that could take it
    FAILED = "failed"  # placing it raised an error


class ShedReason(enum.StrEnum):
    PREDICTED_WAIT = "predicted_wait"  # longer than its class allows
    QUEUE_FULL = "queue_full"  # of its class, or the part of it that one tenant may take; or too many bytes wait in all
    NO_REPLICA = "no_replica"  # it had no candidate


class Shed(NamedTuple):
    """A request that was refused on arrival."""

    reason: ShedReason
    retry_after_s: int  # 1 to 60: when it would be let in, if what is known now holds and nobody else comes
    predicted_wait_s: float  # for which it was refused; 0 where nothing is known


class Waiting:
    """One request in the queue. Compared by identity."""

    __slots__ = ("candidates", "cost", "deadline", "due_at", "ending", "error", "request", "sequence", "since")

    def __init__(
        self, request: PlacementRequest, candidates: Candidates, *, cost: float, since: float, deadline: float | None = None
    ) -> None:
        self.request = request
        self.candidates = candidates
        self.cost = cost  # estimated tokens, outputs counted twice
        self.since = since
        self.deadline = deadline  # by which the client wants its first token, on the clock of `since`
        self.ending: Ending | None = None  # None: it still waits
        self.error: Exception | None = None  # what placing it raised, where that ended it
        self.due_at = since  # its place among its tenant's requests; the queue's
        self.sequence = 0  # the queue's
