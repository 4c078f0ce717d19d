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

# A stream of each route: its body, and how many events a complete one has.
ROUTES: dict[str, tuple[dict[str, Any], int]] = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "hi"}]}, 12),
    "/v1/completions": ({"prompt": "hi"}, 11),
    "/v1/messages": ({"model": "simulated", "messages": [{"role": "user", "content": "hi"}]}, 15),
    "/v1/responses": ({"input": "hi"}, 18),
}
LAST_EVENTS = (b"data: [DONE]", b"event: message_stop", b"event: response.completed")
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


def exchange(engine: SimEngine, body: dict[str, Any], path: str = "/v1/chat/completions") -> tuple[bytes, str]:
    """The raw bytes of one answer, and how the connection ended: `reset`, `closed` or `open`."""
    content = json.dumps(body).encode()
    request = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        path.encode(),
        len(content),
        content,
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


def route_stream(path: str) -> dict[str, Any]:
    return {**ROUTES[path][0], "stream": True, "max_tokens": 10, "max_output_tokens": 10, "ignore_eos": True}


def whole_events(received: bytes) -> int:
    """How many events are complete; no other blank line can be in an answer."""
    return received.count(b"\n\n")


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_has_faults(engine: SimEngine, path: str) -> None:
    """Complete without one; then cut at an event, inside an event, at the last event, and replaced by what is not HTTP."""
    body, total = route_stream(path), ROUTES[path][1]
    received, end = exchange(engine, body, path)
    assert (whole_events(received), end) == (total, "open")
    assert any(mark in received for mark in LAST_EVENTS)

    engine.add_faults({"kind": "truncate", "after_chunks": 3, "times": 1})
    received, end = exchange(engine, body, path)
    assert (whole_events(received), end) == (3, "closed")

    engine.add_faults({"kind": "half_event", "after_chunks": 3, "times": 1})
    received, end = exchange(engine, body, path)
    assert (whole_events(received), end) == (3, "closed")
    assert received.rpartition(b"\n\n\r\n")[2].partition(b"\r\n")[2].startswith((b"data: ", b"event: "))

    engine.add_faults({"kind": "no_done", "times": 1})
    received, end = exchange(engine, body, path)
    assert (whole_events(received), end) == (total - 1, "open")
    assert not any(mark in received for mark in LAST_EVENTS)

    engine.add_faults({"kind": "no_done", "after_chunks": 4, "times": 1})
    received, end = exchange(engine, body, path)
    assert (whole_events(received), end) == (4, "open")

    engine.add_faults({"kind": "garbage", "times": 1})
    received, end = exchange(engine, body, path)
    assert end in ("closed", "reset")
    assert not received.startswith(b"HTTP/")

    engine.add_faults({"kind": "status", "status": 500, "times": 1})
    assert engine.client.post(path, json={**body, "stream": False}).status_code == 500


def test_garbage_may_come_in_the_middle_of_an_answer(engine: SimEngine) -> None:
    """Bytes that are no chunk of a chunked body follow the events."""
    engine.add_faults({"kind": "garbage", "after_chunks": 2, "times": 1})
    received, end = exchange(engine, STREAM)
    assert (event_count(received), end) == (2, "closed")
    assert b"this is not HTTP" in received


@pytest.mark.parametrize("kind", ["half_event", "no_done"])
def test_a_whole_answer_is_halved_or_left_alone(engine: SimEngine, kind: str) -> None:
    """half_event ends a body in its middle; no_done has nothing to leave out."""
    engine.add_faults({"kind": kind, "times": 1})
    received, end = exchange(engine, PLAIN) if kind == "half_event" else (b"", "")
    if kind == "half_event":
        assert end == "closed"
        assert 0 < len(received.partition(b"\r\n\r\n")[2]) < int(received.partition(b"content-length: ")[2].split(b"\r")[0])
    else:
        assert engine.client.post("/v1/chat/completions", json=PLAIN).json()["usage"]["completion_tokens"] == 30


@pytest.mark.parametrize("body", [STREAM, PLAIN], ids=["stream", "whole"])
def test_an_endless_answer_goes_on_until_its_client_leaves(engine: SimEngine, body: dict[str, Any]) -> None:
    """Many megabytes without the end of an event; then the engine's work ends, also where clear_faults came too late."""
    engine.add_faults({"kind": "endless", "after_chunks": 2, "times": 1})
    with engine.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        received, tail = 0, b""
        for piece in answer.iter_raw():
            received += len(piece)
            tail = (tail + piece)[-100_000:]
            if received > 20_000_000:
                break
    assert b"\n" not in tail
    wait_until(lambda: engine.metric("vllm:num_requests_running") == 0, 1, "the work to end")


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


@pytest.mark.parametrize("after_chunks", [0, 1, 5])
@pytest.mark.parametrize("path", ROUTES)
async def test_a_stall_looks_in_the_metrics_as_if_requests_ran_without_progress(
    engine: SimEngine, path: str, after_chunks: int
) -> None:
    """/health stays 200; /metrics answers with running requests and a count of steps that stands still."""
    engine.add_faults({"kind": "stall", "after_chunks": after_chunks, "times": 1})
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as client:
        stalled = asyncio.create_task(client.post(path, json=route_stream(path)))
        await await_until(lambda: engine.admin("GET", "/sim/faults").json()["faults"][0]["left"] == 0, 5, "the hit")
        await await_until(lambda: engine.metric("vllm:num_requests_running") == 1, 5, "a running request")
        await asyncio.sleep(0.1)  # steps of this engine take 1 ms
        steps = engine.metric("vllm:iteration_tokens_total_count")
        assert not (await asyncio.wait((stalled,), timeout=0.3))[0]
        assert engine.metric("vllm:iteration_tokens_total_count") == steps
        assert engine.metric("vllm:num_requests_running") == 1
        assert engine.client.get("/health").status_code == 200
        engine.clear_faults()
        assert whole_events((await stalled).content) == ROUTES[path][1]


async def test_a_request_that_stalls_at_its_only_token_still_runs(engine: SimEngine) -> None:
    """The last token of an answer is computed in a step that hangs: the request counts as running."""
    engine.add_faults({"kind": "stall", "times": 1})
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as client:
        stalled = asyncio.create_task(client.post("/v1/chat/completions", json={**STREAM, "max_tokens": 1}))
        await await_until(lambda: engine.metric("vllm:num_requests_running") == 1, 5, "a running request")
        assert not (await asyncio.wait((stalled,), timeout=0.3))[0]
        assert engine.metric("vllm:num_requests_running") == 1
        engine.clear_faults()
        assert (await stalled).status_code == 200


@pytest.mark.parametrize(("clears", "gauge"), [("false", "vllm:num_requests_running"), ("true", "vllm:num_requests_waiting")])
async def test_a_paused_engine_answers_probes(engine: SimEngine, clears: str, gauge: str) -> None:
    """Mode keep: /health is 200, steps stand still; frozen requests run, or wait where their cache was cleared."""
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as client:
        body = {**STREAM, "max_tokens": 2000}
        frozen = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await await_until(lambda: engine.metric("vllm:num_requests_running") == 1, 5, "a running request")
        assert engine.admin("POST", f"/pause?mode=keep&clear_cache={clears}").status_code == 200
        steps = engine.metric("vllm:iteration_tokens_total_count")
        assert not (await asyncio.wait((frozen,), timeout=0.3))[0]
        assert engine.metric("vllm:iteration_tokens_total_count") == steps
        assert engine.metric(gauge) == 1
        assert engine.client.get("/health").status_code == 200
        frozen.cancel()
        await asyncio.gather(frozen, return_exceptions=True)
    await await_until(lambda: engine.metric(gauge) == 0, 1, "the request to go")
    assert engine.admin("POST", "/resume").status_code == 200


async def test_a_slow_engine_makes_progress(engine: SimEngine) -> None:
    """Each step takes the scripted seconds, the count of steps moves, and clearing ends the slow step at once."""
    engine.add_faults({"kind": "slow_step", "seconds": 0.2})
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as client:
        slow = asyncio.create_task(client.post("/v1/chat/completions", json=PLAIN))
        steps = engine.metric("vllm:iteration_tokens_total_count")
        started = time.monotonic()
        await await_until(lambda: engine.metric("vllm:iteration_tokens_total_count") >= steps + 3, 5, "three steps")
        assert time.monotonic() - started > 0.3
        assert not slow.done()
        engine.add_faults({"kind": "slow_step", "seconds": 60})
        engine.clear_faults()
        assert (await slow).json()["usage"]["completion_tokens"] == 30


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("path", ROUTES)
async def test_a_client_that_leaves_any_route_frees_the_engine(engine: SimEngine, path: str, streams: bool) -> None:
    """Within a second, streamed or not."""
    body = {**route_stream(path), "stream": streams, "max_tokens": 4000, "max_output_tokens": 4000}
    if path == "/v1/messages":  # Anthropic's body cannot ignore the natural end
        engine.add_faults({"kind": "slow_step", "seconds": 5})
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as client:
        request = asyncio.create_task(client.post(path, json=body))
        await await_until(lambda: engine.metric("vllm:num_requests_running") == 1, 5, "the request to run")
        request.cancel()
        await await_until(lambda: engine.metric("vllm:num_requests_running") == 0, 1, "the running count to fall")


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
