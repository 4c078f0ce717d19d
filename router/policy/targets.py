"""The accounts of each KV cache that requests can be placed on: what is queued, decoding and held there right now.

Every number is counted from a reservation to its release, so all of them are zero when nothing is in flight.
"""

import math
from typing import NamedTuple

from router.policy.estimates import Line, Mean
from router.policy.interface import PlacementRequest, Ticket
from router.types import ReplicaId

# Sequences at once of a replica that does not say: vLLM's default on large GPUs.
BATCH_MAX = 1024
# Tokens of context whose KV takes as long to read in a decode step as one sequence takes besides: 160 kB of KV a token beside
# 0.3 GB of experts, for a 106 B-parameter mixture of experts. The rest of a step's cost is learned.
TOKENS_PER_SEQUENCE = 2000.0
# A replica's own pace is a mean over this many first tokens.
PACE_MEMORY = 50
# A replica is taken to be like the others until about this many say otherwise.
PACE_DOUBT = 20
# Replicas of one kind differ by less than this for a while without being faster or slower.
PACE_NOISE = 0.25


class Prices(NamedTuple):
    """What counts how much in a cost. Seconds and plain factors."""

    decode: float  # a second that others or the request itself decode longer, against a second before the first token
    stall: float  # a second that a decoding sequence stands still for a prompt, against one before the first token
    preempted: float  # recomputing what is preempted, against computing
    evicted: float  # recomputing what is forgotten: it may never be asked for
    startable_s: float  # of prefill queued, up to which a request could start soon
    output_tokens: float  # of an answer of those that are running


class Unseen:
    """When the prompt of a request counts as computed though no first token was seen. Ordered by that time."""

    __slots__ = ("due_at", "number", "ticket")

    def __init__(self, due_at: float, number: int, ticket: "PredictedTicket") -> None:
        self.due_at = due_at
        self.number = number
        self.ticket: PredictedTicket | None = ticket  # None: it has ended

    def __lt__(self, other: "Unseen") -> bool:
        return (self.due_at, self.number) < (other.due_at, other.number)


class PredictedTicket(Ticket):
    """What was reserved and predicted for one placement. Tokens and seconds."""

    __slots__ = (
        "ahead",
        "began_at",
        "cached_tokens",
        "computed_then",
        "context",
        "epoch",
        "hit_chunks",
        "is_indexed",
        "is_seen",
        "kind",
        "load_then",
        "output",
        "placed_at",
        "predicted_s",
        "reserved",
        "target",
        "uncached",
        "unseen",
    )

    def __init__(self, request: PlacementRequest, target: "Target", placed_at: float) -> None:
        super().__init__(request, target.replica, target.rank)
        self.target = target
        self.epoch = target.epoch
        self.placed_at = placed_at
        self.is_indexed = False  # the prefix index counts it
        self.is_seen = False  # its first token was told of
        self.began_at: float | None = None  # when the first token came, or was to come where nobody tells
        self.uncached = 0.0  # of the prompt, to be computed
        self.cached_tokens = 0.0
        self.ahead = 0.0  # to be computed until its first token, its own included
        self.output = 0.0  # expected
        self.context = 0.0  # of prompt and answer, halfway through
        self.hit_chunks = 0  # whole chunks of the prompt that the cache held
        self.kind = 0  # what its answer's length is expected by
        self.reserved = 0  # bytes of the prefix index, for its answer
        self.predicted_s = 0.0  # to the first token
        self.load_then = 0.0  # of the replica when the first token came
        self.computed_then = 0.0  # by the replica until then
        self.unseen: Unseen | None = None


class Account(NamedTuple):
    """What is in use on one replica, all its ranks together."""

    replica: ReplicaId
    chunks: int  # of prompts, and ends of them, believed to be cached
    kv_tokens: float  # in use when all answers are whole
    capacity_tokens: float | None  # None: not known


def _load_of(target: "Target") -> float:
    return target.load


class Target:
    """One KV cache with the engine on it: a replica, or one data-parallel rank of it."""

    __slots__ = (
        "base_s",
        "batch_max",
        "capacity",
        "computed",
        "context",
        "context_price",
        "decode_price",
        "empty",
        "epoch",
        "evict_price",
        "free",
        "group",
        "has_room",
        "in_flight",
        "kv_tokens",
        "learned_at",
        "outputs",
        "pace",
        "queued",
        "rank",
        "replica",
        "room_price",
        "running",
        "slot",
        "token_price",
        "token_s",
        "trust",
    )

    def __init__(self, replica: ReplicaId, rank: int) -> None:
        self.replica = replica
        self.rank = rank
        self.slot: int | None = None  # in the prefix index; None once the replica is gone
        self.epoch = 0  # counts the times that its cache was lost
        self.capacity: float | None = None  # tokens; None: not known
        self.batch_max = BATCH_MAX
        self.group: list[Target] = [self]  # those that run in lockstep with it, itself included
        self.in_flight = 0
        self.running = 0  # past their first token
        self.context = 0.0  # tokens of those, as they are halfway through their answers
        self.queued = 0.0  # tokens of prompts that are not computed yet
        self.computed = 0.0  # tokens of prompts, ever
        self.outputs = 0.0  # tokens of all answers in flight, when they are whole
        self.pace = Mean(1.0, memory=PACE_MEMORY, doubt=PACE_DOUBT)  # its durations against everyone's
        self.learned_at = -math.inf  # when its pace was last measured
        self.trust = 1.0  # share of its capacity that has shown to hold what was believed
        # Derived by `refresh`: what placement reads.
        self.base_s = 0.0  # until a first token, before anything of the request's own
        self.token_s = 0.0  # to compute one token of a prompt
        self.token_price = 0.0  # the same, with what it costs those that are decoding
        self.decode_price = 0.0  # seconds for each token of an answer
        self.context_price = 0.0  # and for each token of it and token of its context
        self.empty = math.inf  # tokens of KV that nothing is in
        self.free = math.inf  # tokens of KV that no request needs
        self.evict_price = 0.0  # seconds for each token beyond `empty`
        self.room_price = 0.0  # seconds for each token beyond `free`
        self.kv_tokens = 0.0  # in use when all answers are whole
        self.has_room = True

    def __repr__(self) -> str:
        return (
            f"<Target {self.replica}/{self.rank} in_flight={self.in_flight} queued={self.queued:.0f} kv={self.kv_tokens:.0f}>"
        )

    def reserve(self, ticket: PredictedTicket) -> None:
        """Counts a placement."""
        self.in_flight += 1
        self.queued += ticket.uncached
        ticket.ahead = self.queued
        self.outputs += ticket.output

    def begin(self, ticket: PredictedTicket, now: float) -> None:
        """Its prompt is computed."""
        ticket.began_at = now
        ticket.load_then = self.load
        self.queued -= ticket.uncached
        self.computed += ticket.uncached
        ticket.computed_then = self.computed
        self.running += 1
        self.context += ticket.context

    def release(self, ticket: PredictedTicket) -> None:
        """The counterpart of `reserve`."""
        self.in_flight -= 1
        if ticket.began_at is None:
            self.queued -= ticket.uncached
        else:
            self.running -= 1
            self.context -= ticket.context
        self.outputs -= ticket.output
        if not self.in_flight:  # sums of fractions do not come back to zero by themselves
            self.queued = self.context = self.outputs = 0.0

    @property
    def pace_now(self) -> float:
        """Its durations against everyone's."""
        pace = self.pace.value
        return 1.0 if 1.0 / (1.0 + PACE_NOISE) < pace < 1.0 + PACE_NOISE else pace

    @property
    def load(self) -> float:
        """What a decode step works on, in sequences."""
        return self.running + self.context / TOKENS_PER_SEQUENCE

    def refresh(self, prefill: Line, step: Line, prices: Prices, *, prompts: float, held: float) -> None:
        """Derives what placement reads. Of the prefix index: tokens that running prompts use, and all that are cached."""
        pace = self.pace_now
        load, running = self.load, self.running
        if len(self.group) > 1:
            fullest = max(self.group, key=_load_of)
            load, running = fullest.load, fullest.running
        step_s = step.at(load) * pace
        token_s = self.token_s = prefill.slope * pace
        wait_s = self.queued * token_s
        self.base_s = wait_s + step_s
        self.token_price = token_s * (1.0 + prices.stall * running)
        each_s = 0.5 * prices.decode * step.slope * pace  # those beside it are halfway through their answers
        self.decode_price = each_s * (load + running)
        self.context_price = each_s * running / TOKENS_PER_SEQUENCE
        self.kv_tokens = prompts + self.outputs
        if self.capacity is not None:
            self.free = self.capacity - self.kv_tokens
            self.empty = min(self.free, self.capacity * self.trust - held)
            self.evict_price = prices.evicted * token_s
            # Sequences leave their KV behind in the time that an answer takes, all of it in all of that time.
            self.room_price = prices.preempted * token_s + (
                prices.output_tokens * step_s / self.kv_tokens if self.kv_tokens > 1.0 else 0.0
            )
        self.has_room = not self.in_flight or (wait_s <= prices.startable_s and self.in_flight < self.batch_max)
