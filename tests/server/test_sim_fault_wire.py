"""Scripted faults of the simulated engine, as they arrive at the other end of a socket."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.sim import SimEngine, await_sim_engine, launch_sim_engine, start_sim_engine
from tests.waiting import await_until, wait_until

STREAM = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "ignore_eos": True, "stream": True}
PLAIN = {**STREAM, "stream": False}


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[SimEngine]:
    with start_sim_engine() as running:
        yield running


@pytest.fixture
def engine(shared_engine: SimEngine) -> Iterator[SimEngine]:
    yield shared_engine
    shared_engine.clear_faults()
    wait_until(lambda: shared_engine.metric("vllm:num_requests_running") == 0, 5, "the engine to be idle")


def exchange(engine: SimEngine, body: dict[str, Any]) -> tuple[bytes, str]:
    """The raw bytes of one answer, and how the connection ended: `reset`, `closed` or `open`."""
    content = json.dumps(body).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(content), content)
    )
    received = b""
    with socket.create_connection(("127.0.0.1", engine.port), timeout=10) as connection:
        connection.sendall(request)
        try:
            while not received.endswith(b"0\r\n\r\n"):
                data = connection.recv(65536)
                if not data:
                    return received, "closed"
                received += data
        except ConnectionResetError:
            return received, "reset"
    return received, "open"


def event_count(received: bytes) -> int:
    return received.count(b"data: ")


def test_without_faults_an_answer_is_complete(engine: SimEngine) -> None:
    """The measure for what follows: role, 30 tokens, [DONE], terminating chunk, connection kept."""
    received, end = exchange(engine, STREAM)
    assert (event_count(received), end) == (32, "open")


@pytest.mark.parametrize(("chunks", "events"), [(0, 0), (1, 1), (5, 5)])
def test_reset_arrives_as_a_tcp_reset(engine: SimEngine, chunks: int, events: int) -> None:
    """RST after exactly so many chunks, or before any byte; the next request is served."""
    engine.add_faults({"kind": "reset", "after_chunks": chunks, "times": 1})
    received, end = exchange(engine, STREAM)
    assert end == "reset"
    # A reset may overtake what was sent just before it.
    assert event_count(received) <= events
    assert chunks > 0 or received == b""
    assert exchange(engine, STREAM)[1] == "open"


@pytest.mark.parametrize("chunks", [0, 1, 5])
def test_truncation_ends_the_connection_without_the_last_chunk(engine: SimEngine, chunks: int) -> None:
    """FIN after exactly so many events: no [DONE], no terminating chunk."""
    engine.add_faults({"kind": "truncate", "after_chunks": chunks, "times": 1})
    received, end = exchange(engine, STREAM)
    assert (event_count(received), end) == (chunks, "closed")
    assert b"[DONE]" not in received
    assert chunks > 0 or received == b""


def test_a_whole_answer_is_truncated_in_its_middle(engine: SimEngine) -> None:
    """Without streaming the body is shorter than its content-length says."""
    engine.add_faults({"kind": "truncate", "after_chunks": 1, "times": 1})
    received, end = exchange(engine, PLAIN)
    head, _, body = received.partition(b"\r\n\r\n")
    assert end == "closed"
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    assert 0 < len(body) < length


@pytest.mark.parametrize("chunks", [0, 3])
def test_an_error_frame_ends_the_stream_as_vllm_does(engine: SimEngine, chunks: int) -> None:
    """An error object, then [DONE] and a clean end; the engine's work stops."""
    engine.add_faults({"kind": "error_frame", "after_chunks": chunks, "times": 1})
    received, end = exchange(engine, STREAM)
    assert (event_count(received), end) == (chunks + 2, "open")
    error = json.loads(received.split(b"data: ")[-2].splitlines()[0])
    assert error == {"error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}}
    assert received.split(b"data: ")[-1].startswith(b"[DONE]")


@pytest.mark.parametrize("kind", ["reset", "truncate", "error_frame", "stall"])
def test_a_fault_behind_the_end_of_an_answer_never_strikes(engine: SimEngine, kind: str) -> None:
    """An answer with fewer chunks than the fault waits for is complete."""
    engine.add_faults({"kind": kind, "after_chunks": 33, "times": 1})
    received, end = exchange(engine, STREAM)
    assert (event_count(received), end) == (32, "open")


def test_an_error_frame_after_done_is_too_late(engine: SimEngine) -> None:
    """Nothing follows [DONE]."""
    engine.add_faults({"kind": "error_frame", "after_chunks": 32, "times": 1})
    received, end = exchange(engine, STREAM)
    assert (event_count(received), end) == (32, "open")


def test_an_error_without_streaming_is_a_500(engine: SimEngine) -> None:
    """error_frame on a plain request is vLLM's HTTP error."""
    engine.add_faults({"kind": "error_frame", "times": 1})
    answer = engine.client.post("/v1/chat/completions", json=PLAIN)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "InternalServerError")


@pytest.mark.parametrize(
    ("status", "kind"), [(500, "InternalServerError"), (503, "Service Unavailable"), (429, "Too Many Requests")]
)
def test_a_status_is_answered_in_vllms_shape(engine: SimEngine, status: int, kind: str) -> None:
    """The scripted status with an error body; two requests are hit, the third is not."""
    engine.add_faults({"kind": "status", "status": status, "times": 2, "message": "busy"})
    answers = [engine.client.post("/v1/chat/completions", json=PLAIN) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [status, status, 200]
    assert answers[0].json() == {"error": {"message": "busy", "type": kind, "param": None, "code": status}}


def test_a_delay_comes_before_the_first_byte(engine: SimEngine) -> None:
    """The whole answer is late by as much; the engine does not work meanwhile."""
    engine.add_faults({"kind": "delay", "seconds": 0.5, "times": 1})
    started = time.monotonic()
    assert engine.client.post("/v1/chat/completions", json=PLAIN).status_code == 200
    assert 0.5 <= time.monotonic() - started < 3


async def test_a_stalled_engine_hangs_but_looks_healthy(engine: SimEngine) -> None:
    """After two chunks nothing moves for anybody: iterations stand still, pausing does not return, /health stays 200."""
    engine.add_faults({"kind": "stall", "after_chunks": 2, "times": 1})
    events: list[bytes] = []

    async def read(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", "/v1/chat/completions", json=STREAM) as answer:
            events.append(b"")
            async for chunk in answer.aiter_bytes():
                events[0] += chunk

    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as client:
        stalled = asyncio.create_task(read(client))
        await await_until(lambda: events and event_count(events[0]) == 2, 5, "two events")
        other = asyncio.create_task(client.post("/v1/chat/completions", json=PLAIN))
        pause = asyncio.create_task(client.post("/pause?mode=keep", headers={"x-intellect-engine-token": engine.token}))
        steps = engine.metric("vllm:iteration_tokens_total_count")
        assert not (await asyncio.wait((stalled, other, pause), timeout=0.5))[0]
        assert engine.metric("vllm:iteration_tokens_total_count") == steps
        assert engine.client.get("/health").status_code == 200
        engine.clear_faults()
        await pause
        assert engine.admin("POST", "/resume").status_code == 200
        await asyncio.gather(stalled, other)
    assert event_count(events[0]) == 32


async def test_a_client_that_leaves_a_stalled_or_delayed_request_is_noticed(engine: SimEngine) -> None:
    """Disconnecting during a delay or a stall leaves nothing running."""
    for fault in ({"kind": "delay", "seconds": 60, "times": 1}, {"kind": "stall", "times": 1}):
        engine.add_faults(fault)
        async with httpx.AsyncClient(base_url=engine.url, timeout=30) as client:
            request = asyncio.create_task(client.post("/v1/chat/completions", json=STREAM))
            await await_until(lambda: engine.admin("GET", "/sim/faults").json()["faults"][0]["left"] == 0, 5, "the hit")
            request.cancel()
        await await_until(lambda: engine.metric("vllm:num_requests_running") == 0, 2, "nothing to run")
        engine.clear_faults()
    assert engine.client.post("/v1/chat/completions", json=PLAIN).status_code == 200


def test_a_refusing_engine_comes_back(engine: SimEngine) -> None:
    """For the scripted seconds connections are refused, idle ones close; then it serves again."""
    engine.add_faults({"kind": "refuse", "seconds": 1.0})

    def is_refused() -> bool:
        try:
            socket.create_connection(("127.0.0.1", engine.port), timeout=1).close()
        except ConnectionRefusedError:
            return True
        return False

    wait_until(is_refused, 0.9, "a refused connection")
    wait_until(lambda: not is_refused(), 5, "an accepted connection")
    assert engine.client.post("/v1/chat/completions", json=PLAIN).status_code == 200


def test_a_reload_fails_as_scripted(engine: SimEngine) -> None:
    """fail_reload is a failing collective_rpc; requests are not touched."""
    engine.add_faults({"kind": "fail_reload", "times": 1})
    assert engine.client.post("/v1/chat/completions", json=PLAIN).status_code == 200
    answer = engine.admin("POST", "/collective_rpc", json={"method": "reload_weights"})
    assert answer.status_code == 500
    assert "scripted fault" in answer.json()["error"]["message"]


def test_faults_can_be_listed_and_refused(engine: SimEngine) -> None:
    """The list shows what is armed; slow_start cannot be armed at run time."""
    engine.add_faults({"kind": "reset", "times": 3}, {"kind": "status"})
    faults = engine.admin("GET", "/sim/faults").json()["faults"]
    assert [(fault["kind"], fault["left"]) for fault in faults] == [("reset", 3), ("status", None)]
    answer = engine.admin("POST", "/sim/faults", json={"kind": "slow_start", "seconds": 1})
    assert answer.status_code == 400
    assert "--fault" in answer.json()["error"]["message"]


def test_faults_of_the_command_line_work_from_the_first_request() -> None:
    """--fault is repeatable; slow_start keeps the port closed, the status hits the first request only."""
    started = time.monotonic()
    arguments = ('{"kind": "slow_start", "seconds": 1}', '{"kind": "status", "status": 503, "times": 1}')
    flags = [part for fault in arguments for part in ("--fault", fault)]
    with await_sim_engine(launch_sim_engine(*flags)) as engine:
        assert time.monotonic() - started > 1
        statuses = [engine.client.post("/v1/chat/completions", json=PLAIN).status_code for _ in range(2)]
        assert statuses == [503, 200]
