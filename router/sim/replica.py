"""A simulated replica: its ranks, their clocks, and what is known of it."""

from collections.abc import Sequence

from router.policy.interface import EngineLoad, ReplicaFacts
from router.sim.engine import Engine
from router.sim.fleet import FleetSettings
from router.sim.lockstep import StepClock
from router.sim.result import LoadSample
from router.types import ReplicaId


class SimReplica:
    __slots__ = ("clocks", "engines", "facts", "is_up", "samples", "together")

    def __init__(self, facts: ReplicaFacts, engines: Sequence[Engine]) -> None:
        self.facts = facts
        self.engines = engines  # by rank
        self.clocks: Sequence[StepClock] = ()  # by rank; one for all ranks of an expert-parallel group
        self.together: Sequence[SimReplica] = (self,)  # itself and those that fail with it
        self.is_up = True
        self.samples: list[list[LoadSample]] = [[] for _ in engines]  # by rank

    @property
    def id(self) -> ReplicaId:
        return self.facts.id

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(
            running=sum(len(engine.running) for engine in self.engines),
            waiting=sum(len(engine.waiting) for engine in self.engines),
            kv_usage=sum(engine.kv_usage for engine in self.engines) / len(self.engines),
        )

    def least_loaded_rank(self) -> int:
        """As vLLM's internal balancer: a waiting sequence weighs as much as four running ones; the first of equals."""
        return min(
            range(len(self.engines)), key=lambda rank: 4 * len(self.engines[rank].waiting) + len(self.engines[rank].running)
        )

    def sync(self, now: float) -> None:
        """Brings the engines' numbers up to the last step that ended before `now`."""
        for clock in self.clocks:
            clock.sync(now)

    def sample(self) -> None:
        for engine, samples in zip(self.engines, self.samples, strict=True):
            samples.append(LoadSample(len(engine.running), len(engine.waiting), engine.kv_usage, engine.context_tokens))

    def __repr__(self) -> str:
        return f"<SimReplica {self.id} up={self.is_up} {self.load}>"


def build_replicas(fleet: FleetSettings) -> list[SimReplica]:
    replicas = []
    for number in range(fleet.replicas):
        group = None if fleet.replicas_per_group is None else f"g{number // fleet.replicas_per_group}"
        facts = ReplicaFacts(
            ReplicaId(f"r{number}"),
            kv_capacity_tokens=fleet.limits.kv_capacity_tokens,
            kv_block_tokens=fleet.limits.kv_block_tokens,
            batch_max=fleet.limits.max_num_seqs,
            ranks=fleet.ranks,
            group=group,
        )
        engines = [Engine(fleet.limits, fleet.timing, records_events=fleet.events is not None) for _ in range(fleet.ranks)]
        replicas.append(SimReplica(facts, engines))
    if fleet.replicas_per_group is None:
        for replica in replicas:
            replica.clocks = [StepClock([engine]) for engine in replica.engines]
        return replicas
    for first in range(0, fleet.replicas, fleet.replicas_per_group):
        members = replicas[first : first + fleet.replicas_per_group]
        clock = StepClock([engine for replica in members for engine in replica.engines])
        for replica in members:
            replica.clocks = [clock] * fleet.ranks
            replica.together = members
    return replicas
