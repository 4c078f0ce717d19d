"""Follows the KV events of a fleet's replicas: where each publishes them is found out once for each start of its engine."""

from collections.abc import Iterable

from protocol.status import ReplicaStatus
from router.edge.kv_endpoints import KvEndpoints, ask_engine, of_status
from router.edge.kv_events import KvEvents
from router.edge.upstream import UpstreamPool
from router.state.kv_blocks import CAPACITY_BLOCKS_DEFAULT
from router.state.replicas import Replica
from router.types import Endpoint, ReplicaId

_Start = tuple[Endpoint, int | None]  # an engine, and its process where an agent tells it


class KvFollowing:
    def __init__(self, events: KvEvents, engine_headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """`engine_headers` go with the question to the engine."""
        self.events = events
        self._engine_headers = tuple(engine_headers)
        self._found: dict[ReplicaId, tuple[_Start, dict[int, KvEndpoints]]] = {}

    async def ready(self, replica: Replica, pool: UpstreamPool) -> None:
        """After each probe that found the replica ready. Asks its engine at most once for each start."""
        start = (pool.endpoint, None if replica.status is None else replica.status.engine_pid)
        before = self._found.get(replica.id)
        if before is None or before[0] != start:
            found = await ask_engine(pool, self._engine_headers)
            if replica.removed:
                return
            if before is not None:
                self.restarted(replica.id)
            self._found[replica.id] = start, found or _of_agent(replica, replica.status, pool.endpoint.host)
        facts = replica.facts
        capacity = CAPACITY_BLOCKS_DEFAULT
        if facts.kv_capacity_tokens and facts.kv_block_tokens:
            capacity = max(1, facts.kv_capacity_tokens // facts.kv_block_tokens)
        for rank, endpoints in self._found[replica.id][1].items():
            self.events.follow(replica.id, rank, endpoints, capacity)

    def gone(self, replica: ReplicaId) -> None:
        """Nobody listens where its engine was: what does so next is another process."""
        if self._found.pop(replica, None) is not None:
            self.restarted(replica)

    def restarted(self, replica: ReplicaId) -> None:
        """Its engine was started anew."""
        self.events.restarted(replica)

    def removed(self, replica: ReplicaId) -> None:
        self._found.pop(replica, None)
        self.events.unfollow(replica)

    async def close(self) -> None:
        await self.events.close()


def _of_agent(replica: Replica, status: ReplicaStatus | None, host: str) -> dict[int, KvEndpoints]:
    return {} if status is None else of_status(status.kv_events_endpoint, host, max(1, replica.facts.ranks))
