"""What a run of the simulation leaves: one record per request and one per rank. Reports are computed from these."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from router.policy.interface import Priority
from router.types import ReplicaId


class RequestOutcome(enum.StrEnum):
    COMPLETED = "completed"
    REFUSED = "refused"  # by the router: too much was waiting
    FAILED = "failed"  # its replicas died under it too often
    UNFINISHED = "unfinished"  # still waiting or running when the run was cut off, at the end of the grace


class RequestRecord(NamedTuple):
    """Times are virtual seconds as the router sees them. What concerns an engine is of the last attempt."""

    id: int
    tenant: str
    session: str
    turn: int
    priority: Priority
    ttft_target_s: float
    outcome: RequestOutcome
    arrives_at: float
    prompt_tokens: int
    gateway: int
    attempts: int  # how often it was sent to a replica
    ended_at: float  # the end of the run, where it is unfinished
    replica: ReplicaId | None = None  # None: never sent anywhere
    rank: int = 0
    sent_at: float | None = None  # when it was placed
    first_token_at: float | None = None
    cached_tokens: int = 0  # of the prompt, read from the engine's prefix cache
    output_tokens: int = 0  # generated
    preemptions: int = 0
    itl_mean_s: float | None = None  # mean time between two tokens; None: no second token
    itl_worst_s: float | None = None  # the longest gap
    retry_after_s: float | None = None  # what a refused request was told

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrives_at

    @property
    def is_good(self) -> bool:
        """Completed, with its first token within its target."""
        return (
            self.outcome is RequestOutcome.COMPLETED
            and self.first_token_at is not None
            and self.first_token_at - self.arrives_at <= self.ttft_target_s
        )


class LoadSample(NamedTuple):
    """One rank at one moment."""

    running: int  # sequences in the batch
    waiting: int  # sequences in the engine's own queue
    kv_usage: float  # share of the KV cache that sequences hold, 0 to 1
    context_tokens: int  # of the sequences that decode


@dataclass(frozen=True, slots=True)
class RankRecord:
    """Totals of one rank of one replica, over the whole run; those of attempts that failed are in them."""

    replica: ReplicaId
    rank: int
    busy_s: float  # during which it stepped
    steps: int
    prefilled_tokens: int  # computed, what was computed again after a preemption included
    cached_tokens: int  # prompt tokens read from the prefix cache instead
    generated_tokens: int
    preemptions: int
    samples: tuple[LoadSample, ...]  # one every `sample_interval_s` of the result, from 0 on


@dataclass(frozen=True, slots=True)
class Result:
    workload: str
    horizon_s: float  # arrivals stopped
    ended_at: float  # the last request ended
    sample_interval_s: float
    requests: tuple[RequestRecord, ...]  # by id
    ranks: tuple[RankRecord, ...]  # by replica, then rank
    # Processor time of each call of `place`, in nanoseconds; empty where no clock was given. Not part of what is equal
    # between two runs of one seed.
    decision_ns: tuple[int, ...] = field(default=(), compare=False)
    gateway_facts: Mapping[str, float] = field(default_factory=dict)  # what gateways report of themselves
