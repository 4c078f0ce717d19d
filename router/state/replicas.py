"""The table of replicas and the leases on them: the one owner of who is up and how many requests each has in flight.

Invariant: a replica's `in_flight` equals its leases not yet settled, and a lease settles once however often it is told to.
A lease holds its replica itself, not its id, so one that is removed and added again under the same id starts at zero and
never goes below.
"""

from collections.abc import Collection, Mapping, Sequence

from protocol.status import ReplicaStatus, checkpoint_label
from router.types import PLACEABLE, Endpoint, Health, Observation, ReplicaId


class Replica:
    """One engine behind the router. Only the table changes it."""

    __slots__ = ("draining", "endpoint", "failed_probes", "id", "in_flight", "models", "observed", "removed", "status", "url")

    def __init__(self, replica_id: ReplicaId, url: str) -> None:
        self.id = replica_id
        self.url = url  # as it was added: an agent's or an engine's
        self.endpoint: Endpoint | None = None
        self.models: tuple[str, ...] = ()
        self.observed = Observation(Health.UNKNOWN, "not probed yet")
        self.status: ReplicaStatus | None = None  # the agent's last word, kept while the replica is down; None without agent
        self.in_flight = 0
        self.draining = False  # by order of the operator; a drain that the agent reports is in `observed`
        self.removed = False
        self.failed_probes = 0  # in a row

    @property
    def health(self) -> Health:
        return Health.DRAINING if self.draining or self.removed else self.observed.health

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

    __slots__ = ("_settled", "_table", "endpoint", "replica")

    def __init__(self, table: "ReplicaTable", replica: Replica, endpoint: Endpoint) -> None:
        self._table = table
        self._settled = False
        self.replica = replica
        self.endpoint = endpoint

    def settle(self) -> None:
        """Gives the claim back. Harmless when repeated, so it can stand in every `finally` on the way out."""
        if not self._settled:
            self._settled = True
            self._table._release(self.replica)


class ReplicaTable:
    def __init__(self) -> None:
        self._replicas: dict[ReplicaId, Replica] = {}
        self._departing: set[Replica] = set()  # removed, with requests still in flight
        # Both are rebuilt when health or models change, so that a request only looks them up.
        self._served: dict[str, list[Replica]] = {}
        self._placeable: dict[str, list[Replica]] = {}

    def add(self, replica_id: ReplicaId, url: str) -> Replica:
        """Raises KeyError if the id is already in the table."""
        if replica_id in self._replicas:
            raise KeyError(replica_id)
        replica = self._replicas[replica_id] = Replica(replica_id, url)
        return replica

    def remove(self, replica_id: ReplicaId) -> Replica:
        """Takes the replica out; requests on it finish and are still counted. Raises KeyError for an unknown id."""
        replica = self._replicas.pop(replica_id)
        replica.removed = True
        if replica.in_flight:
            self._departing.add(replica)
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

    def observe(self, replica: Replica, observation: Observation, failed_probes: int) -> None:
        """Takes over what a probe, or a failed request, has shown. A replica that was removed meanwhile stays removed."""
        replica.failed_probes = failed_probes
        replica.observed = observation
        if observation.engine is not None:
            replica.endpoint = observation.engine
        if observation.models is not None:
            replica.models = observation.models
        if observation.status is not None:
            replica.status = observation.status
        self._rebuild()

    def candidates(self, model: str, exclude: Collection[Replica] = ()) -> list[Replica]:
        """Where a new request for this model may go: ready replicas, or, if none is left, paused ones, where it will wait."""
        best = self._placeable.get(model)
        if best is None:
            return []
        return [replica for replica in best if replica not in exclude] if exclude else best

    def lease(self, replica: Replica) -> Lease:
        assert replica.endpoint is not None, "only replicas with a known engine are candidates"
        replica.in_flight += 1
        return Lease(self, replica, replica.endpoint)

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

    def _release(self, replica: Replica) -> None:
        replica.in_flight -= 1
        assert replica.in_flight >= 0
        if replica.removed and not replica.in_flight:
            self._departing.discard(replica)

    def _rebuild(self) -> None:
        self._served, self._placeable = {}, {}
        for replica in self._replicas.values():
            for model in replica.models:
                self._served.setdefault(model, []).append(replica)
        for model, replicas in self._served.items():
            for health in PLACEABLE:
                if chosen := [r for r in replicas if r.health is health and r.endpoint is not None]:
                    self._placeable[model] = chosen
                    break
