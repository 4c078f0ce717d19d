"""Answers that never end, or are far too long: cut, with the router's memory bounded."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from tests.faults.fault_proxy import Fault
from tests.faults.raw_client import RawClient
from tests.faults.stage import CHAT, STREAM, Stage
from tests.faults.view import assert_refused
from tests.scripted_engine import LAST_CHUNK, SSE_HEAD, chunked

_GROWTH_BYTES_MAX = 64 * 1024 * 1024
_CUT_WITHIN_S = 15.0
_JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
_HALF_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"'
_FLOOD = chunked(b"x" * 262_144)


@asynccontextmanager
async def bounded_memory(stage: Stage) -> AsyncIterator[None]:
    """Fails if the router grows by more than _GROWTH_BYTES_MAX meanwhile."""
    process = psutil.Process(stage.router.process.pid)
    before = most = process.memory_info().rss

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, process.memory_info().rss)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert most - before < _GROWTH_BYTES_MAX, f"grew by {(most - before) / 1e6:.0f} MB"


@pytest.mark.parametrize("is_first", [True, False], ids=["the first", "a later one"])
async def test_an_event_without_an_end_is_cut(one: Stage, is_first: bool) -> None:
    """Nothing of it is handed on, since an event goes on whole or not at all; then the client gets an error."""
    begun = chunked(b'data: {"choices":[{"index":0,"delta":{"content":"one"}}]}\n\n') if not is_first else b""
    one.faults.arm(Fault(answer=SSE_HEAD + begun + chunked(_HALF_EVENT), then_forever=_FLOOD))
    async with bounded_memory(one):
        view = await one.ask(STREAM, timeout_s=_CUT_WITHIN_S)
    assert b"xxxx" not in view.raw
    if is_first and view.status != 200:
        assert_refused(view, 502, "upstream_error")
    else:
        assert (view.status, view.is_broken, view.done) == (200, True, 0)
        assert view.errors[0]["code"] == "upstream_error"
    await one.assert_well(1)


async def test_a_line_feed_in_time_does_not_make_it_end(one: Stage) -> None:
    """Lines of one event without its blank line are an endless event as well."""
    one.faults.arm(Fault(answer=SSE_HEAD + chunked(_HALF_EVENT), then_forever=chunked(b"data: x\n" * 30_000)))
    async with bounded_memory(one):
        view = await one.ask(STREAM, timeout_s=_CUT_WITHIN_S)
    assert view.status in (200, 502)
    assert b"[DONE]" not in view.raw
    assert view.is_broken is (view.status == 200)
    await one.assert_well(1)


async def test_a_json_answer_without_an_end_is_cut(one: Stage) -> None:
    """What is too long to be held is handed on as it comes, and broken off where no answer can be that long."""
    one.faults.arm(Fault(answer=_JSON_HEAD + chunked(b'{"x":"'), then_forever=_FLOOD))
    client = RawClient(one.port, CHAT)
    one.sent += 1
    async with bounded_memory(one), asyncio.timeout(_CUT_WITHIN_S):
        await client.receive(b"\r\n\r\n")
        count, is_whole = await client.discard()
    client.socket.close()
    assert client.received.startswith(b"HTTP/1.1 200 ")
    assert not is_whole
    assert count > 1_000_000
    await one.assert_well(1)


@pytest.mark.parametrize("flood", [b"x-a: b\r\n" * 10_000, b"a" * 100_000], ids=["headers", "one header"])
async def test_a_head_without_an_end_is_cut(one: Stage, flood: bytes) -> None:
    """An engine that never comes to its answer has failed before the first byte."""
    one.faults.arm(Fault(answer=b"HTTP/1.1 200 OK\r\nx-first: ", then_forever=flood))
    async with bounded_memory(one):
        assert_refused(await one.ask(CHAT, timeout_s=_CUT_WITHIN_S), 502, "upstream_error")
    await one.assert_well(1)


async def test_an_error_page_without_an_end_is_cut(one: Stage) -> None:
    """Also the body of an error answer is read only so far."""
    head = b"HTTP/1.1 500 X\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"
    one.faults.arm(Fault(answer=head, then_forever=_FLOOD))
    async with bounded_memory(one):
        view = await one.ask(CHAT, timeout_s=_CUT_WITHIN_S)
    assert view.status in (500, 502)
    assert len(view.raw) < 10_000
    await one.assert_well(1)


async def test_a_comment_without_an_end_is_cut(one: Stage) -> None:
    """A line that nobody reads fills no memory either."""
    one.faults.arm(Fault(answer=SSE_HEAD + chunked(b": "), then_forever=_FLOOD))
    async with bounded_memory(one):
        view = await one.ask(STREAM, timeout_s=_CUT_WITHIN_S)
    assert view.status in (200, 502)
    assert view.is_broken is (view.status == 200)
    await one.assert_well(1)


_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"y" * 2000)
_LONG_STREAM = _EVENT * 25_000 + b"data: [DONE]\n\n"  # 50 MB


@pytest.mark.parametrize("pause_s", [0.0, 1.5], ids=["reads at once", "reads late"])
async def test_a_long_stream_reaches_a_slow_reader_whole(one: Stage, pause_s: float) -> None:
    """A client that does not read slows the engine down instead of filling the router's memory, and misses nothing."""
    one.faults.arm(Fault(answer=SSE_HEAD + chunked(_LONG_STREAM) + LAST_CHUNK))
    one.sent += 1
    asked = one.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True})
    async with bounded_memory(one), asked as response:
        await asyncio.sleep(pause_s)
        received = bytearray()
        async for part in response.aiter_raw():
            received += part
    assert received == _LONG_STREAM
