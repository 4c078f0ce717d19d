"""Where KV events are subscribed to."""

import asyncio
import json

import pytest

from router.edge.fleet import endpoint_of
from router.edge.kv_endpoints import KvEndpoints, ask_engine, of_engine, of_status, reachable
from router.edge.upstream import UpstreamPool
from tests.ports import free_port
from tests.router.edge.test_kv_events import start_engine
from tests.scripted_engine import ScriptedRequest, json_answer, scripted_engine


@pytest.mark.parametrize(
    ("endpoint", "host", "found"),
    [
        ("tcp://*:5557", "10.0.0.1", "tcp://10.0.0.1:5557"),
        ("tcp://0.0.0.0:5557", "node-1", "tcp://node-1:5557"),
        ("tcp://[::]:5557", "10.0.0.1", "tcp://10.0.0.1:5557"),
        ("tcp://*:5557", "fd00::1", "tcp://[fd00::1]:5557"),
        ("tcp://10.0.0.2:5557", "10.0.0.1", "tcp://10.0.0.2:5557"),
        ("tcp://[fd00::2]:5557", "10.0.0.1", "tcp://[fd00::2]:5557"),
        ("ipc:///tmp/kv", "10.0.0.1", "ipc:///tmp/kv"),
        ("inproc://kv", "10.0.0.1", None),
        ("tcp://*:0", "10.0.0.1", None),
        ("tcp://*", "10.0.0.1", None),
        ("tcp://*:port", "10.0.0.1", None),
        ("tcp://*:99999", "10.0.0.1", None),
        ("tcp://[::1:5557", "10.0.0.1", None),
        ("http://*:5557", "10.0.0.1", None),
        ("", "10.0.0.1", None),
    ],
)
def test_an_address_to_listen_on_becomes_one_to_connect_to(endpoint: str, host: str, found: str | None) -> None:
    """All addresses of the publisher's machine: the replica's host. What nobody can connect to is left alone."""
    assert reachable(endpoint, host) == found


def test_an_agents_word_names_the_first_ranks_port() -> None:
    """vLLM publishes each further rank at the next one."""
    assert of_status(None, "h") == {}
    assert of_status("inproc://x", "h") == {}
    assert of_status("tcp://*:5557", "h") == {0: KvEndpoints("tcp://h:5557")}
    assert of_status("tcp://[fd00::2]:5557", "h", ranks=2) == {
        0: KvEndpoints("tcp://[fd00::2]:5557"),
        1: KvEndpoints("tcp://[fd00::2]:5558"),
    }
    assert of_status("ipc:///tmp/kv", "h") == {0: KvEndpoints("ipc:///tmp/kv")}


CONFIG = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:1", "replay_endpoint": "tcp://*:2"}


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ({"0": CONFIG | {"buffer_steps": 10_000, "hwm": 1}}, {0: KvEndpoints("tcp://h:1", "tcp://h:2")}),
        ({"1": CONFIG | {"endpoint": "tcp://*:3"}, "0": CONFIG}, {0: KvEndpoints("tcp://h:1", "tcp://h:2"), 1: KvEndpoints("tcp://h:3", "tcp://h:2")}),  # noqa: E501
        ({"5": CONFIG}, {0: KvEndpoints("tcp://h:1", "tcp://h:2")}),
        ({"0": CONFIG | {"replay_endpoint": None}}, {0: KvEndpoints("tcp://h:1")}),
        ({"0": CONFIG | {"buffer_steps": 0}}, {0: KvEndpoints("tcp://h:1")}),
        ({"0": CONFIG | {"enable_kv_cache_events": False}}, {}),
        ({"0": CONFIG | {"publisher": "null"}}, {}),
        ({"0": CONFIG | {"endpoint": "inproc://x"}}, {}),
        ({"0": CONFIG | {"endpoint": 5}}, {}),
        ({"a": CONFIG}, {}),
        ({"0": None}, {}),
        ({}, {}),
        ([], {}),
        ("x", {}),
    ],
)  # fmt: skip
def test_an_engines_word_names_its_replay_too(answer: object, found: dict[int, KvEndpoints]) -> None:
    """A replay that keeps nothing is none; an answer that is not understood says nothing."""
    assert of_engine(json.dumps(answer).encode(), "h") == found


async def test_a_bare_engine_is_asked() -> None:
    """The simulated one answers as vLLM does; its guard lets this question through."""
    ports = (free_port(), free_port())
    with await asyncio.to_thread(start_engine, ports) as engine:
        pool = UpstreamPool(endpoint_of(engine.url))
        found = await ask_engine(pool)
        assert found == {0: KvEndpoints(f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}")}
        pool.close()
    assert await ask_engine(pool) == {}


async def test_an_engine_is_not_read_without_end() -> None:
    """Whatever stands behind the port."""

    async def unused(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with scripted_engine(unused) as engine:
        pool = UpstreamPool(endpoint_of(engine.url))
        for more, count in ((0, 1), (2_000_000, 0)):
            engine.gets["/kv_event_sources"] = json_answer({"0": CONFIG | {"more": "x" * more}})
            assert len(await ask_engine(pool)) == count
        pool.close()
