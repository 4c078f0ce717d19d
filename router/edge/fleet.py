"""Keeps the replica table true: probes every replica, learns models and versions, and owns the pools to their engines."""

import asyncio
import dataclasses
import logging
import time
from urllib.parse import urlsplit

from protocol.status import ReplicaStatus
from router.config import ConfigError, check_replica_url
from router.edge.agent_client import ControlClient, ControlError, ControlRefused, ControlTimeout, observation_of
from router.edge.engine_metrics import read_cache, read_progress
from router.edge.kv_following import KvFollowing
from router.edge.upstream import UpstreamPool
from router.state.health import after_refused, after_timeout
from router.state.progress import ProgressWatch
from router.state.replicas import Replica, ReplicaTable
from router.types import CacheFacts, Endpoint, Health, Observation, ReplicaId

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 2.0
# A sound engine says at once whether it is paused; a hung one does not say it at all.
PAUSE_TIMEOUT_S = 0.5
# A bare engine's models change only when someone loads an adapter, so they are asked for seldom.
PROBES_PER_MODEL_LIST = 10
# Metrics that a stalled engine did not give, in a row, until it gets requests again: they will show how it is.
UNHEARD_TO_TRUST = 5


def endpoint_of(url: str) -> Endpoint:
    """Of a URL that check_replica_url let through."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return Endpoint(parts.hostname, parts.port)


def replica_id_of(url: str) -> ReplicaId:
    return ReplicaId(str(endpoint_of(url)))


class Fleet:
    def __init__(
        self,
        table: ReplicaTable,
        control: ControlClient,
        *,
        interval_s: float,
        stall_after_s: float,
        connect_timeout_s: float,
        sweep_s: float,
        tasks: asyncio.TaskGroup,
        kv: KvFollowing | None = None,
    ) -> None:
        """`kv` None: KV events are not followed."""
        self.table = table
        self.control = control
        self._interval_s = interval_s
        self._stall_after_s = stall_after_s
        self._connect_timeout_s = connect_timeout_s
        self._sweep_s = sweep_s
        self._tasks = tasks
        self._kv = kv
        self._watches: dict[ReplicaId, list[asyncio.Task[None]]] = {}
        self._pools: dict[Endpoint, UpstreamPool] = {}

    def add(self, url: str) -> Replica:
        """Raises ConfigError for an unusable URL, KeyError if the replica is already there."""
        check_replica_url(url)
        replica = self.table.add(replica_id_of(url), url.rstrip("/"))
        self._watches[replica.id] = [
            self._tasks.create_task(self._watch(replica), name=f"watch {replica.id}"),
            self._tasks.create_task(self._watch_progress(replica), name=f"watch the progress of {replica.id}"),
        ]
        return replica

    def remove(self, replica_id: ReplicaId) -> Replica:
        """Raises KeyError for an unknown id. Requests on it run to their end."""
        replica = self.table.remove(replica_id)
        for watch in self._watches.pop(replica_id):
            watch.cancel()
        if self._kv is not None:
            self._kv.removed(replica_id)
        return replica

    def pool(self, endpoint: Endpoint) -> UpstreamPool:
        pool = self._pools.get(endpoint)
        if pool is None:
            pool = self._pools[endpoint] = UpstreamPool(endpoint, connect_timeout_s=self._connect_timeout_s)
        return pool

    def report_unreachable(self, replica: Replica, reason: str) -> None:
        """A request found nobody there: no need to wait for the next probe."""
        if replica.health is not Health.DOWN:
            log.warning("replica %s is down: %s", replica.id, reason)
        self.table.observe(replica, *after_refused(reason))

    async def run(self) -> None:
        """Sweeps until cancelled."""
        while True:
            await asyncio.sleep(self._sweep_s)
            self.sweep()

    def sweep(self) -> None:
        """Ends silent answers and expired connections, and forgets the engines that no replica has any more."""
        self.table.tick(time.monotonic())
        replicas = [*self.table.all(), *self.table.departing()]
        known = {replica.endpoint for replica in replicas}
        paused = {replica.endpoint for replica in replicas if replica.is_paused}
        for endpoint, pool in list(self._pools.items()):
            if endpoint in known:
                pool.sweep(is_paused=endpoint in paused)
            else:
                self._pools.pop(endpoint).close()

    def close(self) -> None:
        for watches in self._watches.values():
            for watch in watches:
                watch.cancel()
        for pool in self._pools.values():
            pool.close()

    async def _watch(self, replica: Replica) -> None:
        probe = _Probe(self.control, replica.url)
        while True:
            before = replica.observed
            try:
                kept, failures = await probe.ask(), 0
            except ControlTimeout as error:
                kept, failures = after_timeout(before, replica.failed_probes, str(error))
            except ControlRefused as error:
                kept, failures = after_refused(str(error))
            except ControlError as error:
                kept, failures = Observation(Health.DOWN, str(error)), 0
            except Exception as error:  # a fault of ours in a probe must not end the requests that run
                log.exception("probing replica %s failed", replica.id)
                kept, failures = Observation(Health.DOWN, f"the probe failed: {error!r}"), 0
            self.table.observe(replica, kept, failures)
            if (
                kept.health is Health.DOWN is not before.health
                and replica.endpoint is not None
                and self.table.has_other(replica)
            ):
                # What it has not begun to answer others can; connections that are still open would not tell for minutes.
                self.pool(replica.endpoint).give_up_waiting()
            if kept.health is not before.health:
                log.info("replica %s is %s%s", replica.id, kept.health, f": {kept.problem}" if kept.problem else "")
            await self._follow_kv(replica, kept)
            await asyncio.sleep(self._interval_s)

    async def _follow_kv(self, replica: Replica, observed: Observation) -> None:
        if self._kv is None:
            return
        if observed.is_gone:
            self._kv.gone(replica.id)
        elif observed.health is Health.READY and replica.endpoint is not None:
            # A pool of its own: a question of ours must not leave a connection for a request, nor count as a sign of life.
            pool = UpstreamPool(replica.endpoint, connect_timeout_s=self._connect_timeout_s)
            try:
                await self._kv.ready(replica, pool)
            except Exception:  # placement does without; a fault of ours must not end the watch
                log.exception("the KV events of replica %s could not be followed", replica.id)
            finally:
                pool.close()

    async def _watch_progress(self, replica: Replica) -> None:
        """Finds an engine that answers its probes but computes nothing. Costs no request while bytes come from it."""
        watch, unheard = ProgressWatch(self._stall_after_s), 0
        # Often enough to find a hang within its time whatever moment it begins at (tests/router/state/test_progress.py).
        interval_s = min(self._interval_s, self._stall_after_s / 6)
        while True:
            await asyncio.sleep(interval_s)
            pool = self._pools.get(replica.endpoint) if replica.endpoint is not None else None
            if pool is None:
                continue
            try:
                is_stalled, unheard = await self._is_stalled(replica, pool, watch), 0
            except ControlError:
                # Whether it answers at all is the other watch's business, but nothing shows any more that it is stalled.
                unheard += 1
                if replica.is_stalled and unheard >= UNHEARD_TO_TRUST:
                    watch = ProgressWatch(self._stall_after_s)
                    self.table.set_stalled(replica, False)
                continue
            if is_stalled and not replica.is_stalled:
                log.warning("replica %s answers its probes but makes no progress", replica.id)
                self.table.set_stalled(replica, True)
            elif replica.is_stalled and not is_stalled:
                log.info("replica %s makes progress again", replica.id)
                self.table.set_stalled(replica, False)
            if is_stalled and self.table.has_other(replica):
                pool.give_up_waiting()  # else what waits there is lost for nothing: the engine may come back

    async def _is_stalled(self, replica: Replica, pool: UpstreamPool, watch: ProgressWatch) -> bool:
        iterations = running = None
        if watch.needs_metrics(replica.in_flight, pool.bytes_received, replica.is_paused):
            iterations, running = read_progress(await self.control.engine_metrics(pool.endpoint, PROBE_TIMEOUT_S))

        def observe(*, is_paused: bool) -> bool:
            return watch.observe(
                time.monotonic(),
                in_flight=replica.in_flight,
                bytes_received=pool.bytes_received,
                is_paused=is_paused,
                iterations=iterations,
                running=running,
            )

        is_stalled = observe(is_paused=replica.is_paused)
        if is_stalled and await self.control.engine_is_paused(pool.endpoint, PAUSE_TIMEOUT_S):
            return observe(is_paused=True)  # by somebody else's order, for there is no agent or it does not know
        return is_stalled


class _Probe:
    """Asks one URL how it is. Finds out once whether an agent or a bare engine listens there, and again after it was away."""

    def __init__(self, control: ControlClient, url: str) -> None:
        self._control = control
        self._url = url
        self._is_engine = False
        self._asked_models: int | None = None  # probes since then

    async def ask(self) -> Observation:
        try:
            if not self._is_engine:
                status = await self._control.agent_status(self._url, PROBE_TIMEOUT_S)
                if status is not None:
                    return await self._ask_agents_engine(status)
                self._is_engine = True
            await self._control.engine_health(self._url, PROBE_TIMEOUT_S)
            engine = endpoint_of(self._url)
            models = await self._models(self._url)
            cache = None if models is None else await self._cache(engine)
            return Observation(Health.READY, engine=engine, models=models, cache=cache)
        except ControlError:
            self._is_engine, self._asked_models = False, None
            raise

    async def _ask_agents_engine(self, status: ReplicaStatus) -> Observation:
        try:
            check_replica_url(status.engine_url)
        except ConfigError as error:
            return Observation(Health.DOWN, f"its agent names an unusable engine: {error}")
        observation = observation_of(status, endpoint_of(status.engine_url))
        if observation.health is Health.READY:
            # An agent can be fine while its engine hangs, refuses our key, or cannot be reached from here.
            engine_url = status.engine_url.rstrip("/")
            await self._control.engine_health(engine_url, PROBE_TIMEOUT_S)
            models = await self._models(engine_url)
            if models is None:
                return observation
            return dataclasses.replace(observation, models=models, cache=await self._cache(endpoint_of(engine_url)))
        return observation

    async def _cache(self, engine: Endpoint) -> CacheFacts | None:
        try:
            return read_cache(await self._control.engine_metrics(engine, PROBE_TIMEOUT_S))
        except ControlError:
            return None  # it serves without them, only placement knows less

    async def _models(self, engine_url: str) -> tuple[str, ...] | None:
        """None in most probes: what was heard last still holds."""
        if self._asked_models is not None and self._asked_models < PROBES_PER_MODEL_LIST:
            self._asked_models += 1
            return None
        models = await self._control.engine_models(engine_url, PROBE_TIMEOUT_S)
        self._asked_models = 0
        return models
