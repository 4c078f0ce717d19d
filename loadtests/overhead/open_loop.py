"""Requests at a fixed rate whatever the answers do (an open loop), and how long each took.

Requests fall due as a Poisson process. The latency of each counts from when it is due to the last byte of its answer.
select() is what waits, since the other selectors round up to milliseconds.
"""

import asyncio
import random
import selectors
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import httptools

from intellect.problem import Problem
from loadtests.overhead.engine_answers import QUESTION, chat_request
from loadtests.overhead.figures import percentile
from loadtests.overhead.routers import HOST

# More than are in use at half load, and far below select()'s 1024 descriptors.
_CONNECTIONS = 128
_ANSWER_S = 10.0
_WARM_UP_S = 0.5


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds. `errors`: requests without an answer of status 200."""

    p50: float
    p99: float
    errors: int


def arrivals(rate: float, seconds: float, rng: random.Random) -> list[float]:
    """Ascending times from 0 to `seconds` at which requests fall due, `rate` of them a second on average."""
    due: list[float] = []
    at = rng.expovariate(rate)
    while at < seconds:
        due.append(at)
        at += rng.expovariate(rate)
    return due


def measure_latency(port: int, *, rate: float, seconds: float, prompt_bytes: int, rng: random.Random) -> Latencies:
    """`rate` requests a second, after a warm-up that does not count. Raises Problem: none was answered with status 200."""
    request = chat_request(prompt_bytes, stream=False, host=f"{HOST}:{port}")
    due = arrivals(rate, _WARM_UP_S + seconds, rng)
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        return runner.run(_measure(port, request, due))


async def _measure(port: int, request: bytes, due: Sequence[float]) -> Latencies:
    client = _Client(request, len(due))
    try:
        await client.run(port, due)
    except OSError as error:
        raise Problem(f"port {port} takes no connection: {error}") from error
    warm = sum(at < _WARM_UP_S for at in due)
    ordered = sorted(seconds for number, seconds in client.taken if number >= warm)
    if not ordered:
        raise Problem(f"port {port} answered none of {len(due)} requests with status 200")
    return Latencies(percentile(ordered, 0.5), percentile(ordered, 0.99), len(due) - len(client.taken))


class _Client:
    """Sends on a fixed set of connections; a request that finds none idle waits for one, and its latency counts that."""

    def __init__(self, request: bytes, count: int) -> None:
        self._before, _, self._after = request.partition(QUESTION)
        self._unsettled = count
        self._settled = asyncio.Event()
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._waiting: deque[tuple[int, float]] = deque()  # number of a request and when it fell due
        self.taken: list[tuple[int, float]] = []  # number of a request and its seconds

    async def run(self, port: int, due: Sequence[float]) -> None:
        loop = asyncio.get_running_loop()
        try:
            for _ in range(_CONNECTIONS):
                await loop.create_connection(lambda: _Connection(self), HOST, port)
            start = loop.time()
            for number, at in enumerate(due):
                await asyncio.sleep(max(0.0, start + at - loop.time()))  # also when late, so that answers are read
                self._waiting.append((number, loop.time()))
                self._send_next()
            async with asyncio.timeout(_ANSWER_S):
                await self._settled.wait()
        except TimeoutError:
            pass  # what is not in `taken` has failed
        finally:
            self._waiting.clear()
            for connection in tuple(self._open):
                connection.close()
            await asyncio.gather(*(connection.closed for connection in tuple(self._open)))

    def _send_next(self) -> None:
        if self._waiting and self._idle:
            number, due_at = self._waiting.popleft()
            self._idle.pop().send(number, due_at, b"%bquestion %09d%b" % (self._before, number, self._after))

    def opened(self, connection: "_Connection") -> None:
        self._open.add(connection)
        self._idle.append(connection)

    def answered(self, connection: "_Connection", number: int, seconds: float, status: int) -> None:
        if status == 200:
            self.taken.append((number, seconds))
        self._idle.append(connection)
        self._settle()
        self._send_next()

    def lost(self, connection: "_Connection", *, is_waiting: bool) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if is_waiting:
            self._settle()

    def _settle(self) -> None:
        self._unsettled -= 1
        if self._unsettled == 0:
            self._settled.set()


class _Connection(asyncio.Protocol):
    def __init__(self, client: _Client) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._number = -1
        self._due_at = 0.0
        self._is_waiting = False
        self.closed: asyncio.Future[None] = self._loop.create_future()

    def send(self, number: int, due_at: float, request: bytes) -> None:
        assert self._transport is not None
        self._number, self._due_at, self._is_waiting = number, due_at, True
        self._transport.write(request)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._client.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.lost(self, is_waiting=self._is_waiting)
        self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def on_message_complete(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._client.answered(self, self._number, self._loop.time() - self._due_at, self._parser.get_status_code())
