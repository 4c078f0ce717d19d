"""The simulated fleet: how many engines, how large, how fast, how late its news are, and what breaks when."""

import math
from dataclasses import dataclass, field

from router.sim.timing import H200_GLM, StepTiming


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """One data-parallel rank, under vLLM's names where it has one. Units are tokens and sequences."""

    kv_capacity_tokens: int = 262_144
    kv_block_tokens: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    # Admits a prompt only when all of it fits, not just its first chunk (`scheduler_reserve_full_isl`, on in vLLM).
    reserve_full_prompt: bool = True

    def __post_init__(self) -> None:
        for name in ("kv_capacity_tokens", "kv_block_tokens", "max_num_seqs", "max_num_batched_tokens"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        _require(
            self.kv_capacity_tokens >= self.kv_block_tokens, "kv_capacity_tokens", self.kv_capacity_tokens, "a block or more"
        )
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"max_num_seqs ({self.max_num_seqs}) or more, so that every running sequence gets its token",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvents:
    """KV events on their way to the routers. Each engine step publishes one batch; a batch is lost as a whole."""

    delay_s: float = 0.005
    loss: float = 0.0  # probability

    def __post_init__(self) -> None:
        _require(self.delay_s >= 0, "delay_s", self.delay_s, "0 or more")
        _require(0 <= self.loss <= 1, "loss", self.loss, "a probability from 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A replica is killed at `at`, and with it its expert-parallel group; it is back, empty, `startup_s` of the fleet later."""

    at: float
    replica: int  # its number, from 0

    def __post_init__(self) -> None:
        _require(self.at >= 0, "at", self.at, "0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Replicas are named `r0`, `r1`, ... in order."""

    replicas: int = 8
    ranks: int = 1  # data-parallel ranks of each replica
    # Expert-parallel groups: so many consecutive replicas step in lockstep, with all their ranks, and fail together.
    # None: each rank steps on its own.
    replicas_per_group: int | None = None
    limits: EngineLimits = field(default_factory=EngineLimits)
    timing: StepTiming = H200_GLM
    # The replica chooses the rank by its own load (vLLM's internal balancer) and the rank of the ticket is not looked at.
    engine_picks_rank: bool = False
    events: KvEvents | None = None  # None: the engines publish none
    scrape_interval_s: float = 0.2
    scrape_delay_s: float = 0.05  # between the engine's count and the router that hears of it
    network_delay_s: float = 0.0005  # one way, between router and engine
    failures: tuple[Failure, ...] = ()
    startup_s: float = 60.0
    attempts_max: int = 3  # of one request; after that many failures of replicas under it, it has failed

    def __post_init__(self) -> None:
        for name in ("replicas", "ranks", "attempts_max"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        if self.replicas_per_group is not None:
            fits = self.replicas_per_group >= 1 and self.replicas % self.replicas_per_group == 0
            _require(fits, "replicas_per_group", self.replicas_per_group, f"a divisor of replicas ({self.replicas})")
        for name in ("scrape_delay_s", "network_delay_s", "startup_s"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, name, value, "0 or more")
        _require(self.scrape_interval_s > 0, "scrape_interval_s", self.scrape_interval_s, "above 0")
        for failure in self.failures:
            _require(0 <= failure.replica < self.replicas, "failures", failure, f"of a replica from 0 to {self.replicas - 1}")


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value}, but must be {wanted}")
