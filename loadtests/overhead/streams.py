"""Streams that this process reads itself: one whole answer, and many that are open at a time."""

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from intellect.problem import Problem
from loadtests.overhead.engine_answers import chat_request
from loadtests.overhead.routers import HOST

_END = b"0\r\n\r\n"
_EVENT = b'data: {"'
_ANSWER_S = 30.0
# Connections that are opened at a time: more would measure the listen queue.
_WAVE = 50
_SETTLE_S = 1.5


def bytes_per_event(port: int, *, prompt_bytes: int, events: int) -> float:
    """What a router writes for each event of a stream, head and framing included: the bytes of one whole answer by its events.

    Raises:
        Problem: the answer is not a whole stream of `events` events.
    """
    received = bytearray()
    try:
        with socket.create_connection((HOST, port), timeout=_ANSWER_S) as connection:
            connection.sendall(chat_request(prompt_bytes, stream=True, host=f"{HOST}:{port}"))
            while not received.endswith(_END) and (data := connection.recv(65536)):
                received += data
    except OSError as error:
        raise Problem(f"a stream through the router broke after {len(received)} bytes: {error}") from error
    counted = received.count(_EVENT)
    if counted != events or not received.endswith(_END) or received.count(b"data: [DONE]") != 1:
        raise Problem(f"a stream through the router has {counted} events of {events}, or no end: {bytes(received[:300])!r}")
    return len(received) / events


def idle_stream_growth(port: int, *, prompt_bytes: int, count: int, rss_bytes: Callable[[], int]) -> tuple[float, int]:
    """Opens `count` streams and reads the first event of each. Returns the growth of `rss_bytes()` by then, in bytes for each
    stream, and how many streams failed."""
    request = chat_request(prompt_bytes, stream=True, host=f"{HOST}:{port}")
    with asyncio.Runner() as runner:
        return runner.run(_growth(port, request, count, rss_bytes))


async def _growth(port: int, request: bytes, count: int, rss_bytes: Callable[[], int]) -> tuple[float, int]:
    loop = asyncio.get_running_loop()
    streams: list[_Stream] = []
    before = rss_bytes()
    try:
        for start in range(0, count, _WAVE):
            wave = [_Stream(loop, request) for _ in range(min(_WAVE, count - start))]
            streams += wave
            await asyncio.gather(*(_open(stream, port) for stream in wave))
            await asyncio.wait([stream.first_event for stream in wave], timeout=_ANSWER_S)
        await asyncio.sleep(_SETTLE_S)
        growth = rss_bytes() - before
        failed = sum(not stream.is_live for stream in streams)
    finally:
        for stream in streams:
            stream.close()
        await asyncio.gather(*(stream.closed for stream in streams if stream.is_open))
    return growth / count, failed


async def _open(stream: "_Stream", port: int) -> None:
    try:
        await asyncio.get_running_loop().create_connection(lambda: stream, HOST, port)
    except OSError as error:
        stream.connection_lost(error)  # counts as one that failed


class _Stream(asyncio.Protocol):
    def __init__(self, loop: asyncio.AbstractEventLoop, request: bytes) -> None:
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self.first_event: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    @property
    def is_live(self) -> bool:
        """Open, and its first event came."""
        return self.is_open and _EVENT in self._received

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if _EVENT in self._received:
            self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.closed.set_result(None)
        self._settle()

    def _settle(self) -> None:
        if not self.first_event.done():
            self.first_event.set_result(None)
