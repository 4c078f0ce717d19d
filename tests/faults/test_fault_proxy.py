"""The fault proxy itself: what it is told to break is broken like that and not otherwise, and the rest passes unchanged."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest

from tests.faults.fault_proxy import Break, Fault, FaultProxy, fault_proxy
from tests.faults.stage import CHAT, CHAT_PATH, STREAM, in_engine, no_tls
from tests.sim import SimEngine
from tests.waiting import await_until

_SILENT_AFTER_S = 0.5


@pytest.fixture
async def proxy(engines: tuple[SimEngine, SimEngine]) -> AsyncIterator[FaultProxy]:
    async with fault_proxy(engines[0].port) as running:
        yield running
    await await_until(lambda: in_engine(engines[0]) == 0, 2, "the engine to be free")


async def exchange(proxy: FaultProxy, body: Mapping[str, Any]) -> tuple[bytes, str]:
    """The raw bytes of one answer, and how the connection ended: `reset`, `closed` or `open`."""
    content = json.dumps(body).encode()
    head = f"POST {CHAT_PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(head.encode() + content)
    received = bytearray()
    last = b"0\r\n\r\n" if body.get("stream") else b"}"
    try:
        async with asyncio.timeout(_SILENT_AFTER_S):
            while not received.endswith(last):
                data = await reader.read(65536)
                if not data:
                    return bytes(received), "closed"
                received += data
        return bytes(received), "open"
    except ConnectionResetError:
        return bytes(received), "reset"
    except TimeoutError:
        return bytes(received), "silent"
    finally:
        writer.close()


@pytest.mark.parametrize("fault", [None, Fault(one_byte_a_time=True), Fault(delay_s=0.05)], ids=["none", "dribble", "delay"])
async def test_what_is_not_broken_passes_unchanged(proxy: FaultProxy, fault: Fault | None) -> None:
    """All events, the end of the chunked body, and an open connection."""
    if fault is not None:
        proxy.faults.arm(fault)
    received, end = await exchange(proxy, STREAM)
    assert (received.count(b"data: "), end) == (33, "open")
    assert json.loads(proxy.requests[0].body) == STREAM


@pytest.mark.parametrize(
    ("how", "end"), [(Break.RESET, "reset"), (Break.CLOSE, "closed"), (Break.HALF_CLOSE, "closed"), (Break.SILENCE, "silent")]
)
@pytest.mark.parametrize("events", [0, 5])
async def test_a_stream_breaks_where_it_is_told_to(proxy: FaultProxy, how: Break, end: str, events: int) -> None:
    """After exactly so many events, in exactly that way."""
    proxy.faults.arm(Fault(breaks=how, after_events=events))
    received, ended = await exchange(proxy, STREAM)
    assert (received.count(b"data: "), ended) == (events, end)
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(("after_bytes", "length"), [(0, 0), (9, 9)])
async def test_an_answer_breaks_after_so_many_bytes(proxy: FaultProxy, after_bytes: int, length: int) -> None:
    """Counted from the first byte of the head."""
    proxy.faults.arm(Fault(breaks=Break.CLOSE, after_bytes=after_bytes))
    assert await exchange(proxy, CHAT) == (b"HTTP/1.1 200 OK"[:length], "closed")


async def test_a_negative_number_counts_from_the_end(proxy: FaultProxy) -> None:
    """All but the last byte."""
    proxy.faults.arm(Fault(breaks=Break.CLOSE, after_events=0, after_bytes=-1))
    received, end = await exchange(proxy, CHAT)
    head, _, body = received.partition(b"\r\n\r\n")
    assert end == "closed"
    assert f"content-length: {len(body) + 1}\r\n".encode() in head + b"\r\n"


async def test_what_comes_forever_comes_until_the_other_side_closes(proxy: FaultProxy) -> None:
    """And is taken no faster than the other side reads."""
    proxy.faults.arm(Fault(answer=b"HTTP/1.1 200 OK\r\n", then_forever=b"x-a: b\r\n" * 1000))
    received, end = await exchange(proxy, CHAT)
    assert end == "silent"
    assert len(received) > 1_000_000
    await await_until(lambda: proxy.open_requests == 0, 1, "the flood to end")


async def test_an_idle_connection_is_closed_in_time_and_a_busy_one_is_not(proxy: FaultProxy) -> None:
    """Counted from the end of an answer, as an engine's server does."""
    proxy.closes_idle_after_s = 0.1
    proxy.faults.arm(Fault(delay_s=0.3))
    async with httpx.AsyncClient(base_url=proxy.url, verify=no_tls()) as client:
        for _ in range(2):
            assert (await client.post(CHAT_PATH, json=dict(CHAT))).status_code == 200
        await asyncio.sleep(0.2)
        assert (await client.post(CHAT_PATH, json=dict(CHAT))).status_code == 200
    first, second, third = (request.connection for request in proxy.requests)
    assert first == second != third


async def test_a_refusing_proxy_listens_again_on_its_port(proxy: FaultProxy) -> None:
    """Connections are refused meanwhile, or reset when that is asked for."""
    await proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        await exchange(proxy, CHAT)
    proxy.resets_connections = True
    await proxy.listen()
    assert (await exchange(proxy, CHAT))[1] in ("reset", "closed")
    proxy.resets_connections = False
    assert (await exchange(proxy, CHAT))[1] == "open"
