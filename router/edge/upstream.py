"""HTTP/1.1 client for one engine: a connection pool and streamed answers, on httptools.

Written for the proxy's needs only (a general client costs several times the CPU): one request per connection at a time,
bodies that are already bytes, answers handed on as they arrive. Idle connections are dropped before the engine would drop
them, and a request that meets a connection which the engine has just closed is sent once more on a new one, because the
engine has seen nothing of it.
"""

import asyncio
import errno
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import httptools

from router.errors import (
    BrokenAnswerError,
    LocalLimitError,
    NoAnswerError,
    UnreachableError,
    UpstreamError,
    UpstreamTimeoutError,
)
from router.types import Endpoint

# Beyond this much unread answer the socket is no longer read, so a slow client slows the engine instead of filling memory.
BUFFER_BYTES_MAX = 256 * 1024
# A connection that had been closed before a request was written shows it at once; one that ends later was closed on it.
STALE_WITHIN_S = 0.1
# More than any engine sends; llhttp itself has no limit.
HEAD_BYTES_MAX = 64 * 1024
# A request body above this is written on its own: copying it behind the head would cost more than a second system call.
JOIN_BYTES_MAX = 16 * 1024


# What says nothing about the engine: this process, or this machine, has run out of something.
_OUR_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. There is no limit on the whole answer: a long one that keeps coming is healthy."""

    connect: float = 2.0
    first_byte: float = 600.0  # queueing and prefill of a long prompt happen before it
    idle: float = 120.0  # between two parts of an answer
    pool_idle: float = 4.0  # below uvicorn's default keep-alive of 5 s, which a bare vLLM has


class Answer:
    """An engine's answer: head at once, body by `read`. Always `close` it; closing early aborts the engine's work."""

    __slots__ = ("_connection", "_pool", "headers", "status")

    def __init__(self, pool: "UpstreamPool", connection: "_Connection") -> None:
        self._pool = pool
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers

    def header(self, name: bytes) -> bytes | None:
        """Value of the first header with this lower-case name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to read or to come."""
        return self._connection.is_drained

    async def read(self) -> bytes:
        """The next bytes of the body, as many as have arrived; b"" at its end. Raises UpstreamError."""
        return await self._connection.read()

    def close(self) -> None:
        """Returns the connection to the pool if the answer is complete, else cuts it, which aborts the engine's request."""
        self._pool.release(self._connection)


class UpstreamPool:
    """Connections to one engine."""

    def __init__(self, endpoint: Endpoint, timeouts: Timeouts) -> None:
        self.endpoint = endpoint
        self._host_and_end = b"host: %b\r\n\r\n" % str(endpoint).encode()
        self._timeouts = timeouts
        self._idle: deque[_Connection] = deque()  # most recently used last
        self._busy: set[_Connection] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<UpstreamPool {self.endpoint} busy={len(self._busy)} idle={len(self._idle)}>"

    async def send(self, head: bytes, body: bytes) -> Answer:
        """Sends a request (`head` from request_head, without a host) and waits for the head of the answer.

        Raises UnreachableError, NoAnswerError, BrokenAnswerError, UpstreamTimeoutError.
        """
        head += self._host_and_end
        connection = self._take_idle()
        if connection is not None:
            sent_at = connection.now()
            try:
                return await self._exchange(connection, head, body)
            except NoAnswerError:
                if connection.now() - sent_at > STALE_WITHIN_S:
                    raise
                # The engine had closed it between our requests, so it has seen nothing of this one.
        return await self._exchange(await self._connect(), head, body)

    async def _exchange(self, connection: "_Connection", head: bytes, body: bytes) -> Answer:
        self._busy.add(connection)
        try:
            await connection.request(head, body)
        except BaseException:
            self.release(connection)
            raise
        return Answer(self, connection)

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeouts.connect):
                _, connection = await loop.create_connection(lambda: _Connection(loop), self.endpoint.host, self.endpoint.port)
        except TimeoutError as error:
            raise UnreachableError(f"no connection to {self.endpoint} within {self._timeouts.connect} s") from error
        except OSError as error:
            if error.errno in _OUR_LIMITS:
                raise LocalLimitError(f"no connection to {self.endpoint}: {error.strerror}") from error
            raise UnreachableError(f"no connection to {self.endpoint}: {error.strerror or error}") from error
        return connection

    def _take_idle(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_for() < self._timeouts.pool_idle:
                return connection
            connection.abort()
        return None

    def release(self, connection: "_Connection") -> None:
        self._busy.discard(connection)
        if connection.is_reusable and not self._closed:
            self._idle.append(connection)
        else:
            connection.abort()

    def sweep(self, *, is_paused: bool) -> None:
        """Ends answers that have been silent for too long and drops expired idle connections. Call about once a second.

        A paused engine (checkpoint swap) is silent with good reason: its clocks start again.
        """
        while self._idle and self._idle[0].idle_for() >= self._timeouts.pool_idle:
            self._idle.popleft().abort()
        for connection in tuple(self._busy):
            if is_paused:
                connection.restart_clock()
                continue
            limit, what = (
                (self._timeouts.idle, "between two parts of its answer")
                if connection.has_body
                else (self._timeouts.first_byte, "before the first byte of its answer")
            )
            if connection.is_waited_for and connection.idle_for() > limit:
                connection.fail(UpstreamTimeoutError(f"{self.endpoint} was silent for {limit:g} s {what}"))

    def close(self) -> None:
        """Drops idle connections; busy ones end with their requests."""
        self._closed = True
        while self._idle:
            self._idle.pop().abort()


class _Connection(asyncio.Protocol):
    """One connection: writes a request, parses the answer, hands out its body with back-pressure."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: UpstreamError | None = None
        self._is_reading_paused = False
        self._head_bytes = 0
        self._last_activity = loop.time()
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.has_head = False
        self.has_body = False
        self._is_complete = True
        self._keeps_alive = False
        self._has_surplus = False

    # What the pool asks

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        return self.is_drained and self._keeps_alive and self._error is None and self.is_open

    @property
    def is_drained(self) -> bool:
        return self._is_complete and not self._chunks

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody waits for the engine, rather than the engine for a slow client."""
        return self._waiter is not None

    def now(self) -> float:
        return self._loop.time()

    def idle_for(self) -> float:
        return self._loop.time() - self._last_activity

    def restart_clock(self) -> None:
        self._last_activity = self._loop.time()

    # One exchange

    async def request(self, head: bytes, body: bytes) -> None:
        """Writes the request and waits until the head of the answer is parsed."""
        assert self._transport is not None
        self.status, self.headers, self.has_head, self.has_body = 0, [], False, False
        self._head_bytes = 0
        self._is_complete = self._keeps_alive = False
        self._last_activity = self._loop.time()
        if len(body) <= JOIN_BYTES_MAX:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        while not self.has_head:
            self._raise_error()
            await self._wait()

    async def read(self) -> bytes:
        while not self._chunks:
            if self._is_complete:
                return b""
            self._raise_error()
            await self._wait()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered = 0
        if self._is_reading_paused and self._transport is not None:
            self._is_reading_paused = False
            self._last_activity = self._loop.time()
            self._transport.resume_reading()
        return data

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def fail(self, error: UpstreamError) -> None:
        """Ends the exchange: whoever waits gets the error once what has arrived is read."""
        if self._error is None and not self._is_complete:
            self._error = error
        self.abort()
        self._wake()

    def abort(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not asyncio's by inheritance, only by interface.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._last_activity = self._loop.time()
        if not self.has_head:
            self._head_bytes += len(data)
        if self._is_complete:
            # Bytes that no request asked for: whatever they are, they are not the next answer.
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(BrokenAnswerError(f"the engine's answer is not HTTP: {error}"))
            return
        if not self.has_head and self._head_bytes > HEAD_BYTES_MAX:
            self.fail(BrokenAnswerError(f"the engine's headers are longer than {HEAD_BYTES_MAX} bytes"))
        elif self._buffered > BUFFER_BYTES_MAX and not self._is_reading_paused and self._transport is not None:
            self._is_reading_paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool | None:
        return None  # closes the transport; connection_lost says what it means

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_complete and self._error is None:
            cause = f": {exc}" if exc else ""
            if self.has_head:
                self._error = BrokenAnswerError(f"the engine closed the connection inside its answer{cause}")
            else:
                self._error = NoAnswerError(f"the engine closed the connection before answering{cause}")
        self._transport = None
        self._wake()

    # httptools

    def on_message_begin(self) -> None:
        if self._is_complete:
            # Behind the end of the answer: whatever it is, it answers no request of ours.
            self._keeps_alive = False
            self._has_surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_surplus:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._has_surplus:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = []  # 100 Continue, 103 Early Hints: the answer is still to come
            return
        self.status = status
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        if self._has_surplus:
            return
        self.has_body = True
        self._chunks.append(body)
        self._buffered += len(body)

    def on_message_complete(self) -> None:
        if not self.has_head or self._has_surplus:
            return
        self._is_complete = True
        self._keeps_alive = self._parser.should_keep_alive()


def request_head(method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Request line and headers, as `UpstreamPool.send` takes them: each line with its end, without the blank one."""
    lines = [method, b" ", target, b" HTTP/1.1\r\n"]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    return b"".join(lines)
