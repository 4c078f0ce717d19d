"""The table of replicas and the leases on them: the one owner of who is up and how many requests each has in flight.

Invariant: a replica's `in_flight` equals its leases not yet settled, and a lease settles once however often it is told to.
A lease holds its replica itself, not its id, so one that is removed and added again under the same id starts at zero and
never goes below.
"""

from collections.abc import Collection, Mapping, Sequence

from protocol.status import ReplicaStatus, checkpoint_label
from router.policy.interface import Policy, ReplicaFacts
from router.state.breaker import Breaker, BreakerState
from router.types import PLACEABLE, CacheFacts, Endpoint, Health, Observation, ReplicaId, Verdict


class Replica:
    """One engine behind the router. Only the table changes it."""

    __slots__ = (
        "breaker",
        "cache",
        "draining",
        "endpoint",
        "facts",
        "failed_probes",
        "id",
        "in_flight",
        "is_stalled",
        "models",
        "observed",
        "removed",
        "status",
        "url",
    )

    def __init__(self, replica_id: ReplicaId, url: str) -> None:
        self.id = replica_id
        self.url = url  # as it was added: an agent's or an engine's
        self.endpoint: Endpoint | None = None
        self.models: tuple[str, ...] = ()
        self.observed = Observation(Health.UNKNOWN, "not probed yet")
        self.status: ReplicaStatus | None = None  # the agent's last word, kept while the replica is down; None without agent
        self.cache: CacheFacts | None = None
        self.facts = ReplicaFacts(replica_id)
        self.in_flight = 0
        self.draining = False  # by order of the operator; a drain that the agent reports is in `observed`
        self.removed = False
        self.failed_probes = 0  # in a row
        self.is_stalled = False
        self.breaker = Breaker()

    @property
    def health(self) -> Health:
        if self.draining or self.removed:
            return Health.DRAINING
        if self.observed.health is Health.READY:
            if self.is_stalled:
                return Health.STALLED
            if not self.breaker.admits:
                return Health.TRIPPED
        return self.observed.health

    @property
    def is_paused(self) -> bool:
        """Frozen for a checkpoint swap, so silent with good reason."""
        return self.observed.health is Health.SWAPPING or (self.status is not None and self.status.paused)

    @property
    def checkpoint(self) -> str | None:
        """Label of the version it serves, as far as its agent has said; None without an agent."""
        return None if self.status is None else checkpoint_label(self.status.checkpoint, self.status.epoch)

    def __repr__(self) -> str:
        return f"<Replica {self.id} {self.health} in_flight={self.in_flight} models={','.join(self.models)}>"


class Lease:
    """One request's claim on one replica, counted from selection to settlement."""

    __slots__ = ("_has_slot", "_is_trial", "_settled", "_table", "endpoint", "replica")

    def __init__(self, table: "ReplicaTable", replica: Replica, endpoint: Endpoint, *, is_trial: bool) -> None:
        self._table = table
        self._settled = False
        self._is_trial = is_trial
        self._has_slot = is_trial  # of the one that a half-open breaker has
        self.replica = replica
        self.endpoint = endpoint

    def answered(self) -> None:
        """The engine has begun to answer. The next trial is let in then, since an answer may take minutes.

        How this one ends still counts.
        """
        if self._is_trial and self._has_slot:
            self._has_slot = False
            self._table._free_slot(self.replica)

    def settle(self, verdict: Verdict, now: float) -> None:
        """Gives the claim back. Harmless when repeated, so it can stand in every `finally` on the way out."""
        if not self._settled:
            self._settled = True
            self._table._release(self.replica, verdict, now, is_trial=self._is_trial, has_slot=self._has_slot)


class ReplicaTable:
    """`policy` is told of each change of what it may know."""

    def __init__(self, policy: Policy | None = None) -> None:
        self._policy = Policy() if policy is None else policy
        self._replicas: dict[ReplicaId, Replica] = {}
        self._departing: set[Replica] = set()  # removed, with requests still in flight
        # Both are rebuilt when health or models change, so that a request only looks them up.
        self._served: dict[str, list[Replica]] = {}
        self._placeable: dict[str, list[Replica]] = {}
        self._placeable_ids: dict[str, list[ReplicaId]] = {}

    def add(self, replica_id: ReplicaId, url: str) -> Replica:
        """Raises KeyError if the id is already in the table."""
        if replica_id in self._replicas:
            raise KeyError(replica_id)
        replica = self._replicas[replica_id] = Replica(replica_id, url)
        self._policy.changed(replica.facts)
        return replica

    def remove(self, replica_id: ReplicaId) -> Replica:
        """Takes the replica out; requests on it finish and are still counted. Raises KeyError for an unknown id."""
        replica = self._replicas.pop(replica_id)
        replica.removed = True
        if replica.in_flight:
            self._departing.add(replica)
        self._policy.removed(replica_id)
        self._rebuild()
        return replica

    def drain(self, replica_id: ReplicaId, draining: bool) -> Replica:
        """Raises KeyError for an unknown id."""
        replica = self._replicas[replica_id]
        replica.draining = draining
        self._rebuild()
        return replica

    def get(self, replica_id: ReplicaId) -> Replica:
        """Raises KeyError for an unknown id."""
        return self._replicas[replica_id]

    def find(self, replica_id: ReplicaId) -> Replica | None:
        return self._replicas.get(replica_id)

    def observe(self, replica: Replica, observation: Observation, failed_probes: int) -> None:
        """Takes over what a probe, or a failed request, has shown. A replica that was removed meanwhile stays removed."""
        has_restarted = observation.is_gone and not replica.observed.is_gone
        replica.failed_probes = failed_probes
        replica.observed = observation
        if observation.engine is not None:
            replica.endpoint = observation.engine
        if observation.models is not None:
            replica.models = observation.models
        if observation.cache is not None:
            replica.cache = observation.cache
        if observation.status is not None:
            before, replica.status = replica.status, observation.status
            has_restarted = has_restarted or (before is not None and before.engine_pid != observation.status.engine_pid)
        if not replica.removed:
            self._tell_policy(replica, has_restarted)
        self._rebuild()

    def candidates(self, model: str, exclude: Collection[Replica] = ()) -> list[Replica]:
        """Where a new request for this model may go: ready replicas, or, if none is left, the next best (`PLACEABLE`)."""
        if not exclude:
            return self._placeable.get(model) or []
        return self._best_of([replica for replica in self._served.get(model, ()) if replica not in exclude])

    def candidate_ids(self, model: str, exclude: Collection[Replica] = ()) -> Sequence[ReplicaId]:
        """The ids of `candidates`, in a sequence that stays the same object until something changes."""
        if not exclude:
            return self._placeable_ids.get(model) or ()
        return [replica.id for replica in self.candidates(model, exclude)]

    def lease(self, replica: Replica) -> Lease:
        assert replica.endpoint is not None, "only replicas with a known engine are candidates"
        replica.in_flight += 1
        is_trial = replica.breaker.state is BreakerState.HALF_OPEN and replica.breaker.trial_began()
        if is_trial:
            self._rebuild()
        return Lease(self, replica, replica.endpoint, is_trial=is_trial)

    def set_stalled(self, replica: Replica, is_stalled: bool) -> None:
        if replica.is_stalled is not is_stalled:
            replica.is_stalled = is_stalled
            self._rebuild()

    def has_other(self, replica: Replica) -> bool:
        """Whether a sound replica serves a model of this one's, too."""
        others = (other for model in replica.models for other in self._placeable.get(model, ()))
        return any(other is not replica and other.health in (Health.READY, Health.SWAPPING) for other in others)

    def tick(self, now: float) -> None:
        """Lets time pass for the breakers. Call about once a second."""
        changed = [replica for replica in self._replicas.values() if replica.breaker.tick(now)]
        if changed:
            self._rebuild()

    def all(self) -> list[Replica]:
        return list(self._replicas.values())

    def departing(self) -> list[Replica]:
        """Removed replicas that still have requests in flight."""
        return list(self._departing)

    @property
    def served(self) -> Mapping[str, Sequence[Replica]]:
        """Model -> replicas that serve it, whatever their health: a model is not unknown because its replicas restart."""
        return self._served

    @property
    def is_ready(self) -> bool:
        return bool(self._placeable)

    def _tell_policy(self, replica: Replica, has_restarted: bool) -> None:
        facts = facts_of(replica)
        if facts != replica.facts:
            replica.facts = facts
            self._policy.changed(facts)
        if has_restarted:
            self._policy.restarted(replica.id)

    def _free_slot(self, replica: Replica) -> None:
        if replica.breaker.trial_abandoned():
            self._rebuild()

    def _release(self, replica: Replica, verdict: Verdict, now: float, *, is_trial: bool, has_slot: bool) -> None:
        replica.in_flight -= 1
        assert replica.in_flight >= 0
        breaker = replica.breaker
        if verdict is Verdict.GOOD:
            has_changed = breaker.succeeded(now, is_trial=is_trial)
        elif verdict is Verdict.BAD:
            has_changed = breaker.failed(now, is_trial=is_trial)
        else:
            has_changed = has_slot and breaker.trial_abandoned()
        if has_changed:
            self._rebuild()
        if replica.removed and not replica.in_flight:
            self._departing.discard(replica)

    def _rebuild(self) -> None:
        self._served, self._placeable, self._placeable_ids = {}, {}, {}
        for replica in self._replicas.values():
            for model in replica.models:
                self._served.setdefault(model, []).append(replica)
        for model, replicas in self._served.items():
            if chosen := self._best_of(replicas):
                self._placeable[model] = chosen
                self._placeable_ids[model] = [replica.id for replica in chosen]

    @staticmethod
    def _best_of(replicas: Sequence[Replica]) -> list[Replica]:
        for health in PLACEABLE:
            if chosen := [replica for replica in replicas if replica.health is health and replica.endpoint is not None]:
                return chosen
        return []


def facts_of(replica: Replica) -> ReplicaFacts:
    """What placement may know of a replica."""
    status, cache = replica.status, replica.cache
    return ReplicaFacts(
        replica.id,
        version=replica.checkpoint or "",
        kv_capacity_tokens=(None if cache is None else cache.capacity_tokens)
        or (None if status is None else status.kv_capacity_tokens),
        kv_block_tokens=(None if cache is None else cache.block_tokens) or (None if status is None else status.kv_block_size),
        ranks=1 if cache is None else cache.ranks,
        group=None if status is None else status.expert_parallel_group,
    )
