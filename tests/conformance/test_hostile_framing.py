"""Clients that frame their requests, or read their answers, in ways meant to hang, fill or confuse the router.

The engines run in the test's event loop, so the blocking client runs in a thread.
"""

import asyncio
import gzip
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import psutil
import pytest

from tests.conformance import raw
from tests.conformance.replies import CHAT
from tests.conformance.service import scripted_behind
from tests.conformance.streams import DONE, chunk
from tests.router.process import RouterProcess, start_router
from tests.scripted_engine import LAST_CHUNK, SSE_HEAD, ScriptedEngine, ScriptedRequest, chunked, json_answer, scripted_engine
from tests.waiting import await_until

MIB = 1024 * 1024
JSON = {"content-type": "application/json"}
CHUNKED = {**JSON, "transfer-encoding": "chunked"}
REFUSED_EARLY = raw.request(
    "POST", CHAT, {"content-type": "text/plain", "expect": "100-continue", "content-length": "2"}, b"{}"
)
HEALTH = raw.request("GET", "/health")


def chat(content: str = "hi", **fields: object) -> bytes:
    """The body of a chat request to a scripted engine."""
    return json.dumps({"model": "scripted", "messages": [{"role": "user", "content": content}], **fields}).encode()


def post(body: bytes, headers: dict[str, str] | None = None) -> bytes:
    return raw.request("POST", CHAT, {**JSON, **(headers or {})}, body)


def stream_of(*contents: str) -> bytes:
    return chunked(*(chunk({"content": content}) for content in contents))


STREAM_END = chunked(chunk({}, "stop"), DONE) + LAST_CHUNK


def let_router_read(url: str) -> None:
    """Returns when the router has read all that was sent to it before: it answers a later connection."""
    assert raw.exchange(url, HEALTH).status == 200


def send_in_pieces(url: str, *pieces: bytes) -> raw.Wire:
    """A connection on which each piece has come in a read of its own."""
    wire = raw.Wire(url)
    wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for piece in pieces:
        wire.send(piece)
        let_router_read(url)
    return wire


def outcomes(router: RouterProcess) -> float:
    return router.metric("intellect_router_requests_total")


class Growth:
    """How much larger than at first the router's process has been at a `look`."""

    def __init__(self, router: RouterProcess) -> None:
        self._process = psutil.Process(router.process.pid)
        self._before = self._process.memory_info().rss
        self.most = 0

    def look(self) -> int:
        self.most = max(self.most, self._process.memory_info().rss - self._before)
        return self.most


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    """With the default limits, and its memory not yet grown by other tests."""
    with start_router() as running:
        yield running


@pytest.fixture
async def engine(router: RouterProcess) -> AsyncIterator[ScriptedEngine]:
    async with scripted_behind(router) as behind:
        yield behind


@pytest.mark.parametrize("is_one_line", [False, True], ids=["many", "one line"])
def test_trailers_without_end_end_the_connection(router: RouterProcess, is_one_line: bool) -> None:
    """What follows a body is limited like what precedes it, so nobody fills the router's memory, with or without a key."""
    flood = b"y" * MIB if is_one_line else (b"x-a: " + b"y" * 1000 + b"\r\n") * 1000
    growth = Growth(router)
    with raw.Wire(router.url) as wire:
        wire.send(raw.request("POST", CHAT, CHUNKED) + b"0\r\nx-first: ")
        with suppress(ConnectionError):
            for _ in range(64):
                wire.send(flood)
                growth.look()
        growth.look()
        assert b"HTTP/1.1 200" not in wire.read_to_end()
    assert growth.most < 32 * MIB


async def test_unread_answers_hold_back_the_stream_behind_them(router: RouterProcess, engine: ScriptedEngine) -> None:
    """A client that does not read its answers and asks for a long stream stops the engine; later it gets everything."""
    long, sent = "x" * 900_000, 0
    part = stream_of("y" * 1000) * 100

    async def script(request: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        if not json.loads(request.body).get("stream"):
            writer.write(json_answer({"text": long}))
            return
        writer.write(SSE_HEAD)
        while True:
            writer.write(part)
            await writer.drain()
            sent += len(part)
            await asyncio.sleep(0)

    engine.script = script
    growth = Growth(router)
    wire = raw.Wire(router.url)
    try:
        wire.send(post(chat()) * 8 + post(chat(stream=True)))
        with pytest.raises(AssertionError, match="still waiting"):
            await await_until(lambda: growth.look() > 40 * MIB, 1, "the memory to fill")
        assert sent < 40 * MIB

        def read_all() -> None:
            for _ in range(8):
                assert json.loads(wire.read_answer().body) == {"text": long}
            for _ in range(300):
                assert wire.read_until(b"yyy")

        await asyncio.to_thread(read_all)
    finally:
        wire.close()
    await await_until(lambda: engine.open_requests == 0, 2, "the engine to be free")


async def test_a_body_in_tiny_chunks_costs_no_more_memory_than_the_body(router: RouterProcess, engine: ScriptedEngine) -> None:
    """Eight megabytes in chunks of two bytes are answered like any other request."""
    content = "a" * (8 * MIB)
    body = chat(content)
    growth = Growth(router)

    def ask() -> raw.Answer:
        whole, odd = body[: len(body) // 2 * 2], body[len(body) // 2 * 2 :]
        with raw.Wire(router.url, timeout_s=60) as wire:
            wire.send(raw.request("POST", CHAT, CHUNKED))
            for begin in range(0, len(whole), 200_000):
                part = whole[begin : begin + 200_000]
                wire.send(b"".join(b"2\r\n%b\r\n" % part[at : at + 2] for at in range(0, len(part), 2)))
                growth.look()
            wire.send((chunked(odd) if odd else b"") + LAST_CHUNK)
            return wire.read_answer()

    answer = await asyncio.to_thread(ask)
    growth.look()
    assert answer.status == 200
    assert engine.requests[-1].body == body
    assert growth.most < 64 * MIB


async def test_trailers_never_change_the_request(router: RouterProcess, engine: ScriptedEngine) -> None:
    """Fields behind the body come too late to name its coding or the request: they reach neither engine, answer nor log."""
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    trailers = f"0\r\nx-request-id: from-trailer\r\ntraceparent: {trace}\r\ncontent-type: text/plain\r\n\r\n".encode()
    answer = await asyncio.to_thread(raw.exchange, router.url, raw.request("POST", CHAT, CHUNKED) + chunked(chat()) + trailers)
    assert answer.status == 200
    assert answer.header("x-request-id") != "from-trailer"
    (request,) = engine.requests
    assert request.body == chat()
    assert not any("trailer" in value or trace in value for value in request.headers.values())
    coded = chunked(gzip.compress(chat())) + b"0\r\ncontent-encoding: gzip\r\n\r\n"
    answer = await asyncio.to_thread(raw.exchange, router.url, raw.request("POST", CHAT, CHUNKED) + coded)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert len(engine.requests) == 1


def test_two_refused_requests_with_expect_get_one_answer(router: RouterProcess) -> None:
    """The body of the first may follow or not, so nothing behind it can be read; the connection ends and both count once."""
    before = outcomes(router)
    with raw.Wire(router.url) as wire:
        wire.send(REFUSED_EARLY * 2)
        assert wire.read_answer("POST").status == 415
        started = time.monotonic()
        assert wire.read_to_end() == b""
        assert time.monotonic() - started < 7
    assert outcomes(router) - before == 1


@pytest.mark.parametrize("cut", [1, 2, 3])
async def test_a_head_split_inside_its_end_may_have_a_long_body(
    router: RouterProcess, engine: ScriptedEngine, cut: int
) -> None:
    """The limit of the head does not count the body that comes with the head's last bytes."""
    data = post(chat("x" * 150_000))
    at = data.index(b"\r\n\r\n") + cut

    def ask() -> int:
        with send_in_pieces(router.url, data[:at], data[at:]) as wire:
            return wire.read_answer().status

    assert await asyncio.to_thread(ask) == 200


@pytest.mark.parametrize("first", [1000, 60_000, 65_000])
def test_a_long_head_in_two_writes_is_refused(router: RouterProcess, first: int) -> None:
    """The limit holds however the head is cut into segments."""
    data = raw.request("GET", "/health", {"cookie": "y" * 120_000})
    with send_in_pieces(router.url, data[:first], data[first:]) as wire:
        assert wire.read_answer().status == 431


OFFERS: dict[str, tuple[bytes, ...]] = {
    "CONNECT": (b"CONNECT example.com:80 HTTP/1.1\r\nhost: x\r\n\r\n",),
    "capitals": (b"GET /health HTTP/1.1\r\nHOST: x\r\nCONNECTION: Upgrade\r\nUPGRADE: h2c\r\n\r\n",),
    "split": (b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nUpgr", b"ade: h2c\r\n\r\n"),
    "second": (HEALTH, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: h2c\r\n\r\n"),
    "pipelined": (HEALTH + b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: h2c\r\n\r\n",),
}


@pytest.mark.parametrize("pieces", OFFERS.values(), ids=OFFERS.keys())
def test_an_offer_of_another_protocol_gets_one_answer(router: RouterProcess, pieces: tuple[bytes, ...]) -> None:
    """It is declined, never answered twice, so that no later request is given the answer of an earlier one."""
    data = b"".join(pieces)
    asked = data.count(b" HTTP/1.1\r\n")
    with send_in_pieces(router.url, *pieces) as wire:
        answers = [wire.read_answer() for _ in range(asked)]
        wire.half_close()
        assert wire.read_to_end() == b""
    statuses = [answer.status for answer in answers]
    assert statuses[0] // 100 == 4 if data.startswith(b"CONNECT") else statuses == [200] * asked


async def test_pipelining_does_not_hide_that_the_client_left(router: RouterProcess, engine: ScriptedEngine) -> None:
    """However many requests wait behind the running one, the engine is free within a second."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    engine.script = script
    wire = raw.Wire(router.url)
    wire.send(post(chat()) * 9)
    await await_until(lambda: engine.open_requests == 1, 5, "the engine to work")
    await asyncio.to_thread(let_router_read, router.url)
    wire.close()
    await await_until(lambda: engine.open_requests == 0, 1, "the engine to be free")
    await await_until(lambda: router.in_flight() == 0, 1, "the router's count to fall")
    assert len(engine.requests) == 1


async def test_a_stored_response_asked_with_head_has_no_body(router: RouterProcess, engine: ScriptedEngine) -> None:
    """However long the response is; the next request on the connection gets its own answer."""
    target = await _stored_target(engine, router)

    def ask() -> tuple[raw.Answer, raw.Answer, raw.Answer]:
        with raw.Wire(router.url) as wire:
            wire.send(raw.request("HEAD", target) + HEALTH)
            head, following = wire.read_answer("HEAD"), wire.read_answer()
            wire.send(raw.request("GET", target))
            return head, following, wire.read_answer()

    head, following, whole = await asyncio.to_thread(ask)
    assert (head.status, following.status, whole.status) == (200, 200, 200)
    assert json.loads(whole.body)["output"] == "z" * 1_500_000
    assert head.header("content-length") in (None, whole.header("content-length"))


async def _stored_target(engine: ScriptedEngine, router: RouterProcess) -> str:
    """The path of a long response that the engine keeps; its id is taken from a request that the router made."""
    answer = await asyncio.to_thread(
        raw.exchange,
        router.url,
        raw.request("POST", "/v1/responses", JSON, json.dumps({"model": "scripted", "input": "x"}).encode()),
    )
    assert answer.status == 200
    target = f"/v1/responses/{json.loads(engine.requests[-1].body)['request_id']}"
    stored = json_answer({"id": "resp_1", "object": "response", "output": "z" * 1_500_000})
    engine.gets[target] = stored

    async def script(request: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        assert request.line.startswith("HEAD"), request.line
        writer.write(stored.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")

    engine.script = script
    return target


async def test_a_steady_slow_reader_gets_its_last_answer_whole(router: RouterProcess, engine: ScriptedEngine) -> None:
    """Also with `Connection: close`, where the router has nothing left to do but to wait: it waits as long as bytes go."""
    content = "y" * 7_500_000

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + stream_of(content) + STREAM_END)

    engine.script = script

    def read() -> bytes:
        with raw.Wire(router.url) as wire:
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            wire.send(post(chat(stream=True), {"connection": "close"}))
            data = bytearray()
            ends_at = time.monotonic() + 6.0
            while time.monotonic() < ends_at:  # the pace of a bad line, not a wait for something
                data += wire.socket.recv(20_000)
                time.sleep(0.05)
            while part := wire.socket.recv(65536):
                data += part
            return bytes(data)

    data = await asyncio.to_thread(read)
    assert data.count(b"y") >= len(content)
    assert data.endswith(b"0\r\n\r\n")


async def test_a_kept_connection_does_not_hold_up_the_end_of_the_router() -> None:
    """SIGTERM in the middle of a stream: it is finished, its connection closed, and the process ends with 0 at once."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        for _number in range(10):
            writer.write(stream_of("a"))
            await writer.drain()
            await asyncio.sleep(0.1)
        writer.write(STREAM_END)

    def end(router: RouterProcess) -> bytes:
        router.wait_ready(1)
        with raw.Wire(router.url) as wire:
            wire.send(post(chat(stream=True)))
            data = wire.read_until(b'"content"')
            router.process.terminate()
            data += wire.read_to_end()
        assert router.process.wait(5) == 0, router.log
        return data

    async with scripted_engine(script) as engine:
        with start_router([engine.url], wait=False) as router:
            data = await asyncio.to_thread(end, router)
    assert data.count(b'"content"') == 10
    assert data.count(b"[DONE]") == 1
    assert data.endswith(LAST_CHUNK)
