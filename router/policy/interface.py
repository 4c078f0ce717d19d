"""What a placement policy is asked, what it may know, and what it is told of what became of a request.

A policy is synchronous and pure: time and randomness are given to it. The router calls it for every request; the simulator
runs the very same object on virtual time. Times are seconds of one monotonic clock.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

from protocol.usage import Usage
from router.policy.cost import CostTerms
from router.policy.prompt import Prompt
from router.types import ReplicaId


class Priority(enum.StrEnum):
    """How a request ranks among those that wait; the words of the `x-intellect-priority` header."""

    INTERACTIVE = "interactive"
    DEFAULT = "default"
    BATCH = "batch"


class ReplicaFacts(NamedTuple):
    """What is known of a replica. A policy is told again whenever one of them changes."""

    id: ReplicaId
    version: str = ""  # label of the checkpoint it serves, with the swap epoch: KV of another label is worth nothing
    kv_capacity_tokens: int | None = None  # of each rank; None: not known
    kv_block_tokens: int | None = None
    batch_max: int | None = None  # sequences that one rank runs at once (--max-num-seqs)
    ranks: int = 1  # data-parallel ranks behind this replica's port, each with a KV cache of its own
    group: str | None = None  # replicas of one expert-parallel group run in lockstep and fail together


class EngineLoad(NamedTuple):
    """What a scrape of an engine's metrics said. It is old when it arrives."""

    running: int  # sequences in the batch
    waiting: int  # sequences in the engine's own queue
    kv_usage: float  # share of the KV cache in use, 0 to 1


class Coverage(enum.Enum):
    """What is known of a rank's cache from its KV events."""

    ALL = enum.auto()  # all that it holds
    SOME = enum.auto()  # a part of what it holds
    UNSURE = enum.auto()  # something may have been missed: nothing, for the time being


class PlacementRequest:
    """One request, as far as placement may know it. The same object is placed again after a failure."""

    __slots__ = (
        "__weakref__",
        "affinity",
        "blocks",
        "generates",
        "is_whole",
        "media",
        "media_bytes",
        "model",
        "output_max",
        "priority",
        "prompt",
        "streams",
        "tenant",
    )

    def __init__(
        self,
        model: str,
        prompt: Prompt,
        *,
        tenant: str = "",
        affinity: str | None = None,
        priority: Priority = Priority.DEFAULT,
        output_max: int | None = None,
        blocks: Sequence[int] = (),
        streams: bool = True,
        generates: bool = True,
        is_whole: bool = True,
        media: int = 0,
        media_bytes: int = 0,
    ) -> None:
        self.model = model
        self.prompt = prompt
        self.tenant = tenant
        self.affinity = affinity  # the client's word which requests belong together: a session id or a prompt cache key
        self.priority = priority
        self.output_max = output_max  # tokens; None: the client set no limit
        self.streams = streams  # whether its first token will be seen; else only its end is
        self.generates = generates  # whether it is answered with generated tokens; else with a vector or a count
        self.is_whole = is_whole  # whether the prompt has all that the engine computes; else the engine adds what it keeps
        self.media = media  # images and the like in the prompt, of which `media_bytes` say nothing of their tokens
        self.media_bytes = media_bytes
        # Hashes of the prompt's whole KV blocks, chained; empty where its tokens are not known. They may become so meanwhile.
        self.blocks = blocks


class Ticket:
    """One placement: where a request was sent, and what the policy reserved there. Given back to it with each event."""

    __slots__ = ("rank", "replica", "request", "terms")

    def __init__(self, request: PlacementRequest, replica: ReplicaId, rank: int = 0) -> None:
        self.request = request
        self.replica = replica
        self.rank = rank
        self.terms: Sequence[CostTerms] = ()  # of all candidates, where somebody wanted to know


class Policy:
    """Places requests. Only `place` must be written; the rest does nothing unless a policy has use for it.

    Between `place` and `ended` a request counts as in flight on its ticket's replica. `first_token` is called at most once,
    and not at all for a request that failed before it.
    """

    uses_prompt = False  # whether `request.prompt` is looked at

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket | None:
        """Chooses among `candidates`, of which there is at least one, and reserves there.

        None: none of them could start the request soon; it should wait, and be placed anew when something has ended.
        """
        raise NotImplementedError

    def place_anyway(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket:
        """As `place`, for a request that had its turn and must not wait again: where it would start soonest, however late."""
        return self.place(request, candidates, now) or self.adopt(request, candidates[0], 0, now)

    def adopt(self, request: PlacementRequest, replica: ReplicaId, rank: int, now: float) -> Ticket:
        """Reserves where somebody else has chosen: another router, or a rule that leaves no choice."""
        return Ticket(request, replica, rank)

    def explain(self, request: PlacementRequest, candidates: Sequence[ReplicaId]) -> Sequence[CostTerms]:
        """The terms of each candidate's cost as `place` would see them now; nothing from a policy without costs."""
        return ()

    def first_token(self, ticket: Ticket, now: float) -> None:
        """The engine has begun to answer: the prompt's KV is computed."""

    def ended(self, ticket: Ticket, usage: Usage | None, now: float) -> None:
        """The request has left the replica, for whatever reason; `usage` where the engine has told it."""

    def changed(self, facts: ReplicaFacts) -> None:
        """A replica was added, or something about it has changed."""

    def removed(self, replica: ReplicaId) -> None:
        """A replica is gone, and its cache with it. Tickets on it still end."""

    def restarted(self, replica: ReplicaId) -> None:
        """A replica's engine lost its cache: it was started anew, or told to forget."""

    def scraped(self, replica: ReplicaId, load: EngineLoad, now: float) -> None:
        """The engine's own metrics."""

    def stored(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        """A KV event: blocks (hashes as in `PlacementRequest.blocks`) that the engine holds from now on."""

    def evicted(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        """A KV event: blocks that it holds no longer."""

    def cleared(self, replica: ReplicaId, rank: int, now: float) -> None:
        """A KV event: it holds nothing."""

    def forgotten(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        """Events were missed: whether it still holds these blocks is not known. It may."""

    def trusted(self, replica: ReplicaId, rank: int, coverage: Coverage) -> None:
        """How far KV events tell what it holds, from now on. Until this is called, all of it from the first event on."""
