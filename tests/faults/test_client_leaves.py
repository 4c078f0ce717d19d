"""Clients that go away, however they do it and whenever: the engine stops working for them within a second."""

import socket
import time
from collections.abc import Mapping
from typing import Any

import pytest

from tests.faults.fault_proxy import Break, Fault
from tests.faults.raw_client import RawClient
from tests.faults.stage import CHAT, ENDLESS, STREAM, Stage, in_engine
from tests.waiting import await_until

_FREED_WITHIN_S = 1.0
ENDLESS_STREAM: Mapping[str, Any] = {**ENDLESS, "stream": True}


async def assert_freed(stage: Stage) -> None:
    """The engine runs nothing any more, soon."""
    await await_until(lambda: sum(in_engine(engine) for engine in stage.engines) == 0, _FREED_WITHIN_S, "the engine to be free")


@pytest.mark.parametrize("how", ["FIN", "RST", "half-close"])
@pytest.mark.parametrize(
    ("body", "begun"),
    [(ENDLESS, False), (ENDLESS_STREAM, False), (ENDLESS_STREAM, True)],
    ids=["json", "stream before its first byte", "stream in its middle"],
)
async def test_a_client_that_leaves_frees_the_engine(one: Stage, body: Mapping[str, Any], begun: bool, how: str) -> None:
    """Whether it waits or reads, closing its connection stops the work it asked for, and counts as its own doing."""
    gone = await one.outcomes(outcome="client_gone")
    if not begun:
        one.faults.arm(Fault(breaks=Break.SILENCE))  # the engine works, and nothing of it comes
    client = RawClient(one.port, body)
    one.sent += 1
    try:
        await await_until(lambda: in_engine(one.engines[0]) == 1, 5, "the engine to work")
        if begun:
            await client.receive(b'"content":" ')
        client.leave(how)
        await assert_freed(one)

        async def is_counted() -> bool:
            return await one.outcomes(outcome="client_gone") == gone + 1

        await await_until(is_counted, 2, "the ending to be counted")
    finally:
        client.socket.close()
    await one.assert_well(1)


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_a_client_that_leaves_while_its_request_is_retried(two: Stage, how: str) -> None:
    """Nobody is asked for an answer that nobody waits for."""
    two.faults.arm(Fault(delay_s=0.5, breaks=Break.RESET))
    two.faults.arm(Fault(breaks=Break.SILENCE))
    client = RawClient(two.port, ENDLESS_STREAM)
    two.sent += 1
    await await_until(lambda: two.upstream == 1, 5, "the first attempt")
    client.leave(how)
    await await_until(lambda: sum(proxy.open_requests for proxy in two.proxies) == 0, _FREED_WITHIN_S, "no attempt to be left")
    assert two.upstream == 1
    two.faults.clear()


async def test_a_client_that_leaves_a_continued_stream(two: Stage) -> None:
    """The second replica is freed as the first would have been."""
    two.faults.arm(Fault(breaks=Break.CLOSE, after_events=7))
    client = RawClient(two.port, ENDLESS_STREAM)
    two.sent += 1
    await client.receive(b'"continuations":1')
    client.leave("FIN")
    await assert_freed(two)


@pytest.mark.parametrize("how", ["FIN", "RST", "half-close"])
async def test_a_client_that_leaves_right_behind_the_end(one: Stage, how: str) -> None:
    """The answer was whole: nothing is left, and it counts once."""
    client = RawClient(one.port, STREAM)
    one.sent += 1
    completed = await one.outcomes(outcome="completed")
    await client.receive(b"data: [DONE]\n\n")
    client.leave(how)
    await assert_freed(one)
    await one.assert_settled()
    client.socket.close()
    assert await one.outcomes(outcome="completed") == completed + 1


async def test_a_crowd_that_leaves_at_once(two: Stage) -> None:
    """Fifty clients that are cut off together leave nothing behind."""
    clients = [RawClient(two.port, ENDLESS_STREAM if number % 2 else ENDLESS) for number in range(50)]
    two.sent += len(clients)
    await await_until(lambda: sum(in_engine(engine) for engine in two.engines) == 50, 10, "all to be at work")
    for number, client in enumerate(clients):
        client.leave("RST" if number % 3 else "FIN")
    await assert_freed(two)
    await two.assert_settled()
    await two.assert_well(3)


async def test_a_client_that_leaves_inside_its_request(one: Stage) -> None:
    """Half a body reaches no engine, and is counted too where it was a request at all."""
    before = await one.outcomes()
    connection = socket.create_connection(("127.0.0.1", one.port), timeout=5)
    connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    connection.close()
    await one.assert_well(1)
    one.sent += int(await one.outcomes() - before) - 1
    assert one.upstream == 1
    assert one.sent in (1, 2)


async def test_an_engine_is_not_freed_by_the_silence_of_a_client(one: Stage) -> None:
    """A client that only waits is no client that left."""
    one.faults.arm(Fault(delay_s=0.6))
    client = RawClient(one.port, CHAT)
    one.sent += 1
    started = time.monotonic()
    await client.receive(b'"finish_reason":"length"')
    assert time.monotonic() - started > 0.5
    client.socket.close()
