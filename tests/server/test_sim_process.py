"""The life of a simulated engine's process: start, shutdown, idle connections, KV events."""

import asyncio
import json
import signal
import socket
import time
from typing import Any

import httpx
import msgspec
import pytest
import zmq.asyncio
from zmq.constants import SocketType

from server.sim_text import encode
from tests.ports import free_port
from tests.sim import SimEngine, await_sim_engine, launch_sim_engine, start_sim_engine
from tests.waiting import await_until, wait_until

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "ignore_eos": True}


async def finish_reason_at_shutdown(engine: SimEngine) -> str:
    """SIGTERM while a stream runs: how the stream ends."""
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as client:
        answer = asyncio.create_task(client.post("/v1/chat/completions", json={**BODY, "stream": True}))
        await await_until(lambda: engine.metric("vllm:generation_tokens_total") > 5, 10, "some tokens")
        engine.client.close()
        engine.signal(signal.SIGTERM)
        events = [event.removeprefix("data: ") for event in (await answer).text.split("\n\n") if event]
    assert events[-1] == "[DONE]"
    reason: str = json.loads(events[-2])["choices"][0]["finish_reason"]
    return reason


@pytest.mark.parametrize(("timeout", "reason"), [("0", "abort"), ("10", "length")])
async def test_sigterm_aborts_or_drains(timeout: str, reason: str) -> None:
    """--shutdown-timeout 0 aborts what is in flight, as vLLM does; with time it ends by itself. Exit status 0."""
    with start_sim_engine("--shutdown-timeout", timeout) as engine:
        assert await finish_reason_at_shutdown(engine) == reason
        assert engine.wait(5) == 0


def test_sigterm_during_startup_ends_the_process() -> None:
    """An engine that is still starting goes at once, and its port was never open."""
    with launch_sim_engine("--startup-seconds", "60") as engine:
        wait_until(lambda: "starting" in engine.log_text, 10, "the start")
        with pytest.raises(httpx.ConnectError):
            engine.client.get("/health")
        engine.signal(signal.SIGTERM)
        assert engine.wait(5) == 0


def test_a_missing_model_ends_the_start_with_the_reason() -> None:
    """Exit status 1 and one line that names the folder."""
    engine = launch_sim_engine("--model", "/nowhere/at/all")
    with engine:
        assert engine.wait(15) == 1
        assert "no such folder: /nowhere/at/all" in engine.log_text


def test_a_taken_port_ends_the_start() -> None:
    """The process does not linger without a port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with launch_sim_engine(port=taken.getsockname()[1]) as engine:
            assert engine.wait(15) != 0
            assert "address already in use" in engine.log_text


def test_idle_connections_close_after_the_keep_alive() -> None:
    """--timeout-keep-alive bounds how long an idle connection stays open."""
    with (
        start_sim_engine("--timeout-keep-alive", "1") as engine,
        socket.create_connection(("127.0.0.1", engine.port), timeout=10) as connection,
    ):
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        started = time.monotonic()
        assert connection.recv(65536) == b""
        assert 0.5 < time.monotonic() - started < 5


async def receive(subscriber: Any) -> tuple[bytes, int, list[Any]]:
    """Topic, sequence number and events of one batch."""
    topic, number, payload = await asyncio.wait_for(subscriber.recv_multipart(), 10)
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert abs(ts - time.time()) < 60
    assert rank == 0
    return topic, int.from_bytes(number, "big"), events


async def test_kv_events_tell_what_the_cache_holds() -> None:
    """Subscribers get stored blocks with their tokens, and AllBlocksCleared at a reset; a replay repeats what was missed."""
    ports = [free_port(), free_port()]
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports[0]}",
        "replay_endpoint": f"tcp://*:{ports[1]}",
        "topic": "kv",
    }
    prompt = "an event for each block of this prompt " * 4
    tokens = encode(prompt)
    context = zmq.asyncio.Context()
    subscriber, replay = context.socket(SocketType.SUB), context.socket(SocketType.REQ)
    try:
        with start_sim_engine("--kv-events-config", json.dumps(config)) as engine:
            sources = engine.admin("GET", "/kv_event_sources").json()
            assert sources["0"]["endpoint"] == config["endpoint"]
            subscriber.connect(f"tcp://127.0.0.1:{ports[0]}")
            subscriber.subscribe(b"kv")
            replay.connect(f"tcp://127.0.0.1:{ports[1]}")
            body = {"prompt": prompt, "max_tokens": 1, "cache_salt": "tenant"}
            assert engine.client.post("/v1/completions", json=body).status_code == 200

            await replay.send(bytes(8))  # a subscriber that came late asks for everything
            _, number, payload = await asyncio.wait_for(replay.recv_multipart(), 10)
            (stored,) = msgspec.msgpack.decode(payload)[1]
            assert number == bytes(8)
            assert stored["type"] == "BlockStored"
            assert stored["token_ids"] == tokens[: len(tokens) // 16 * 16]
            assert (stored["parent_block_hash"], stored["block_size"], stored["medium"]) == (None, 16, "GPU")
            assert len(stored["block_hashes"]) == len(stored["extra_keys"]) == len(tokens) // 16
            assert stored["extra_keys"][0] == ["tenant"]

            async def cleared() -> bool:
                """The subscription may take a moment, so the reset is repeated until its event arrives."""
                assert engine.admin("POST", "/reset_prefix_cache").json() == {"success": True}
                return bool(await subscriber.poll(50))

            await await_until(cleared, 10, "an event")
            topic, number, events = await receive(subscriber)
            while events[0]["type"] != "AllBlocksCleared":
                topic, number, events = await receive(subscriber)
            assert topic == b"kv"
            assert number >= 1
            assert engine.client.post("/v1/completions", json={**body, "cache_salt": None}).status_code == 200
            while events[0]["type"] != "BlockStored":
                _, number, events = await receive(subscriber)
            assert events[0]["block_hashes"] != stored["block_hashes"]
            assert events[0]["extra_keys"] == [None] * len(events[0]["block_hashes"])
    finally:
        context.destroy(linger=0)


def test_two_engines_do_not_share_anything() -> None:
    """Same prompt, same built-in weights, same text; each with its own cache and metrics."""
    with start_sim_engine() as first, start_sim_engine() as second:
        texts = [
            engine.client.post("/v1/chat/completions", json=BODY).json()["choices"][0]["message"]["content"]
            for engine in (first, second, second)
        ]
        assert len(set(texts)) == 1
        assert [engine.metric("vllm:request_success_total", finished_reason="length") for engine in (first, second)] == [1, 2]


def test_the_helper_gives_up_on_an_engine_that_dies() -> None:
    """Tests see the log of an engine that ends before it answers."""
    with pytest.raises(AssertionError, match="ended with status"):
        await_sim_engine(launch_sim_engine("--block-size", "0"))
