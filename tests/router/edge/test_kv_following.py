"""Where each replica publishes its KV events is found out once for each start of its engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from protocol.status import ReplicaState, ReplicaStatus
from router.edge.kv_events import KvEvents
from router.edge.kv_following import KvFollowing
from router.edge.upstream import UpstreamPool
from router.policy.interface import Policy
from router.state.kv_blocks import CAPACITY_BLOCKS_DEFAULT
from router.state.kv_sink import PolicySink
from router.state.kv_source import KvMode
from router.state.replicas import Replica
from router.types import Endpoint, ReplicaId
from tests.ports import free_port
from tests.scripted_engine import ScriptedEngine, ScriptedRequest, json_answer, scripted_engine

PATH = "/kv_event_sources"


@asynccontextmanager
async def following(sources_answer: bytes) -> AsyncIterator[tuple[KvFollowing, Replica, UpstreamPool, ScriptedEngine]]:
    async def answer(request: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        raise AssertionError("nothing is generated here")

    async with scripted_engine(answer) as engine, asyncio.TaskGroup() as tasks:
        engine.gets[PATH] = sources_answer
        host, _, port = engine.url.removeprefix("http://").rpartition(":")
        pool = UpstreamPool(Endpoint(host, int(port)), connect_timeout_s=2)
        kv = KvFollowing(KvEvents(PolicySink(Policy()), tasks=tasks))
        try:
            yield kv, Replica(ReplicaId("a:1"), engine.url), pool, engine
        finally:
            pool.close()
            await kv.close()


def sources(port: int) -> bytes:
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    return json_answer({"0": config})


def status(endpoint: str | None, pid: int = 1) -> ReplicaStatus:
    return ReplicaStatus(
        state=ReplicaState.READY,
        engine_url="http://127.0.0.1:1",
        model="m",
        checkpoint="base",
        kv_events_endpoint=endpoint,
        engine_pid=pid,
    )


async def test_an_engine_that_says_where_is_followed_with_its_capacity() -> None:
    """The bound of what is kept of a source follows what its replica can hold."""
    async with following(sources(free_port())) as (kv, replica, pool, _):
        await kv.ready(replica, pool)
        [source] = kv.events.sources()
        assert source.capacity_blocks == CAPACITY_BLOCKS_DEFAULT
        replica.facts = replica.facts._replace(kv_capacity_tokens=1600, kv_block_tokens=16)
        await kv.ready(replica, pool)
        assert [source.capacity_blocks for source in kv.events.sources()] == [100]
        kv.removed(replica.id)
        assert not list(kv.events.sources())


async def test_an_engine_that_does_not_say_is_followed_where_its_agent_says() -> None:
    """Each rank publishes at the port after the one before it."""
    async with following(json_answer({}, "403 Forbidden")) as (kv, replica, pool, _):
        replica.status = status(f"tcp://127.0.0.1:{free_port()}")
        replica.facts = replica.facts._replace(ranks=2)
        await kv.ready(replica, pool)
        assert [source.rank for source in kv.events.sources()] == [0, 1]


async def test_a_replica_without_events_is_off() -> None:
    """And its engine is asked once, not at each probe."""
    async with following(json_answer({}, "404 Not Found")) as (kv, replica, pool, engine):
        await kv.ready(replica, pool)
        engine.gets[PATH] = sources(free_port())
        await kv.ready(replica, pool)
        assert kv.events.mode(replica.id) is KvMode.OFF
        kv.gone(replica.id)
        await kv.ready(replica, pool)
        assert kv.events.mode(replica.id) is KvMode.JOINING, "another process may be started otherwise"


async def test_an_engine_that_its_agent_has_started_anew_is_asked_again() -> None:
    """It may publish at another port, or not at all."""
    async with following(json_answer({}, "404 Not Found")) as (kv, replica, pool, engine):
        replica.status = status(None, pid=1)
        await kv.ready(replica, pool)
        engine.gets[PATH] = sources(free_port())
        await kv.ready(replica, pool)
        assert kv.events.mode(replica.id) is KvMode.OFF
        replica.status = status(None, pid=2)
        await kv.ready(replica, pool)
        assert kv.events.mode(replica.id) is KvMode.JOINING


async def test_a_removal_while_its_engine_is_asked_leaves_nothing_behind() -> None:
    """The answer comes too late."""
    async with following(sources(free_port())) as (kv, replica, pool, _):
        asking = asyncio.ensure_future(kv.ready(replica, pool))
        await asyncio.sleep(0)
        replica.removed = True
        await asking
        assert not list(kv.events.sources())
