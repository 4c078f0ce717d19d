"""HTTP/1.1 client for one engine: a connection pool and streamed answers, on httptools.

Written for the proxy's needs only (a general client costs several times the CPU): one request per connection at a time,
bodies that are already bytes, answers handed on as they arrive, without a task switch for each part of a stream. Idle
connections are dropped before the engine would drop them, and a request that meets a connection which the engine has just
closed is sent once more on a new one, because the engine has seen nothing of it.
"""

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, cast

import httptools

from router.errors import (
    BrokenAnswerError,
    LocalLimitError,
    NoAnswerError,
    StalledError,
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

# What says nothing about the engine: this process, or this machine, has run out of something.
_OUR_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. `total` 0: no limit on the whole answer, since a long one that keeps coming is healthy."""

    connect: float = 2.0
    first_byte: float = 600.0  # queueing and prefill of a long prompt happen before it
    idle: float = 120.0  # between two parts of an answer
    total: float = 0.0


# Seconds that a connection may wait for its next request: below uvicorn's default keep-alive of 5 s, which a bare vLLM has.
POOL_IDLE_S = 4.0


class Patience(NamedTuple):
    """How long one request waits, and what is done meanwhile: `on_silence` is called each `silence_s` without a byte."""

    timeouts: Timeouts = Timeouts()
    ends_at: float | None = None  # loop time by which the answer must be whole, over all attempts
    silence_s: float = 0.0
    on_silence: Callable[[], None] | None = None


class Answer:
    """An engine's answer: head at once, body by `read` or `pump`. Always `close` it; closing early aborts the engine's work."""

    __slots__ = ("_connection", "_pool", "headers", "status")

    def __init__(self, pool: "UpstreamPool", connection: "_Connection") -> None:
        self._pool = pool
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to read or to come."""
        return self._connection.is_drained

    def take(self) -> bytes:
        """What has arrived of the body; b"" if nothing has."""
        return self._connection.take()

    async def read(self) -> bytes:
        """The next bytes of the body, as many as have arrived; b"" at its end. Raises UpstreamError."""
        return await self._connection.read()

    async def pump(self, sink: Callable[[bytes], None], wire_sink: Callable[[bytes], bool] | None = None) -> None:
        """Calls `sink` with the body's bytes as they come, from the event loop, until its end.

        `wire_sink` is offered, before they are parsed, bytes that begin with a chunk of the chunked coding; it returns whether
        it took them, which it may only if they are whole chunks of this kind, none of them the last.
        Raises UpstreamError, and whatever a sink raised, after which it is not called again.
        """
        await self._connection.pump(sink, wire_sink)

    def hold(self, is_held: bool) -> None:
        """Stops and starts reading from the engine, for a client that is slower."""
        self._connection.hold(is_held)

    def expect_end(self, within_s: float) -> None:
        """From now on nothing but the end of the answer is waited for, and not for long."""
        self._connection.expect_end(within_s)

    def close(self) -> None:
        """Returns the connection to the pool if the answer is complete, else cuts it, which aborts the engine's request."""
        self._pool.release(self._connection)


class UpstreamPool:
    """Connections to one engine. `bytes_received` counts all that came from it, a sign of life that costs nothing."""

    def __init__(self, endpoint: Endpoint, *, connect_timeout_s: float = 2.0, idle_s: float = POOL_IDLE_S) -> None:
        self.endpoint = endpoint
        self.bytes_received = 0
        self._host_and_end = b"host: %b\r\n\r\n" % str(endpoint).encode()
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self._idle: deque[_Connection] = deque()  # most recently used last
        self._busy: set[_Connection] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<UpstreamPool {self.endpoint} busy={len(self._busy)} idle={len(self._idle)}>"

    async def send(self, head: bytes, body: bytes, patience: Patience) -> Answer:
        """Sends a request (`head` from request_head, without a host) and waits for the head of the answer.

        Raises UnreachableError, NoAnswerError, BrokenAnswerError, UpstreamTimeoutError, StalledError.
        """
        head += self._host_and_end
        connection = self._take_idle()
        if connection is not None:
            sent_at = connection.now()
            try:
                return await self._exchange(connection, head, body, patience)
            except NoAnswerError:
                if connection.now() - sent_at > STALE_WITHIN_S:
                    raise
                # The engine had closed it between our requests, so it has seen nothing of this one.
        return await self._exchange(await self._connect(), head, body, patience)

    async def _exchange(self, connection: "_Connection", head: bytes, body: bytes, patience: Patience) -> Answer:
        self._busy.add(connection)
        try:
            await connection.request(head, body, patience)
        except BaseException:
            self.release(connection)
            raise
        return Answer(self, connection)

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        host, port = self.endpoint.host, self.endpoint.port
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(lambda: _Connection(self, loop), host, port)
        except TimeoutError as error:
            raise UnreachableError(f"no connection to {self.endpoint} within {self._connect_timeout_s} s") from error
        except OSError as error:
            if error.errno in _OUR_LIMITS:
                raise LocalLimitError(f"no connection to {self.endpoint}: {error.strerror}") from error
            raise UnreachableError(f"no connection to {self.endpoint}: {error.strerror or error}") from error
        return connection

    def _take_idle(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_for() < self._idle_s:
                return connection
            connection.abort()
        return None

    def release(self, connection: "_Connection") -> None:
        self._busy.discard(connection)
        if connection.is_reusable and not self._closed:
            self._idle.append(connection)
        else:
            connection.discard()

    def sweep(self, *, is_paused: bool) -> None:
        """Ends answers that have been silent for too long and drops expired idle connections. Call about once a second.

        A paused engine (checkpoint swap) is silent with good reason: its clocks start again.
        """
        while self._idle and self._idle[0].idle_for() >= self._idle_s:
            self._idle.popleft().abort()
        for connection in tuple(self._busy):
            connection.check_patience(is_paused=is_paused)

    def give_up_waiting(self) -> None:
        """Ends the requests that have no output yet with StalledError, so that they can be placed again."""
        for connection in tuple(self._busy):
            if not connection.has_body:
                connection.fail(StalledError(f"{self.endpoint} makes no progress"))

    def close(self) -> None:
        """Drops idle connections; busy ones end with their requests."""
        self._closed = True
        while self._idle:
            self._idle.pop().abort()


_NO_PATIENCE = Patience()


class _Connection(asyncio.Protocol):
    """One connection: writes a request, parses the answer, hands out its body with back-pressure."""

    __slots__ = (
        "_chunks",
        "_error",
        "_excused_at",
        "_has_heard",
        "_has_surplus",
        "_head_bytes",
        "_heard_at",
        "_is_between_chunks",
        "_is_complete",
        "_is_held",
        "_keeps_alive",
        "_loop",
        "_nudged_at",
        "_parser",
        "_patience",
        "_pool",
        "_sink",
        "_sink_error",
        "_transport",
        "_waiter",
        "_wire_sink",
        "has_body",
        "has_head",
        "headers",
        "status",
    )

    def __init__(self, pool: UpstreamPool, loop: asyncio.AbstractEventLoop) -> None:
        self._pool = pool
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[bytes], None] | None = None
        self._wire_sink: Callable[[bytes], bool] | None = None
        self._is_between_chunks = False
        self._has_heard = False  # since the last sweep, something that was passed on unparsed
        self._sink_error: Exception | None = None
        self._error: UpstreamError | None = None
        self._is_held = False
        self._head_bytes = 0
        self._heard_at = self._nudged_at = self._excused_at = loop.time()
        self._patience = _NO_PATIENCE
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
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
        return self.is_drained and self._keeps_alive and self._error is None and self.is_open and not self._is_held

    @property
    def is_drained(self) -> bool:
        return self._is_complete and not self._chunks

    def now(self) -> float:
        return self._loop.time()

    def idle_for(self) -> float:
        return self._loop.time() - self._heard_at

    def check_patience(self, *, is_paused: bool) -> None:
        """Only while somebody waits for the engine, rather than the engine for a slow client."""
        if self._waiter is None or self._is_complete:
            return
        patience, timeouts, now = self._patience, self._patience.timeouts, self._loop.time()
        if self._has_heard:
            self._has_heard, self._heard_at = False, now
        silent_s = now - max(self._heard_at, self._nudged_at)
        if patience.on_silence is not None and silent_s >= patience.silence_s:
            self._nudged_at = now
            patience.on_silence()
        waited_s = now - max(self._heard_at, self._excused_at)
        if is_paused or self._is_held:
            self._excused_at = now
        elif patience.ends_at is not None and now > patience.ends_at:
            self.fail(UpstreamTimeoutError(f"{self._pool.endpoint} did not end its answer within {timeouts.total:g} s"))
        elif self.has_body and waited_s > timeouts.idle:
            what = f"{timeouts.idle:g} s between two parts of its answer"
            self.fail(UpstreamTimeoutError(f"{self._pool.endpoint} was silent for {what}"))
        elif not self.has_body and waited_s > timeouts.first_byte:
            what = f"{timeouts.first_byte:g} s before the first byte of its answer"
            self.fail(UpstreamTimeoutError(f"{self._pool.endpoint} was silent for {what}"))

    # One exchange

    async def request(self, head: bytes, body: bytes, patience: Patience) -> None:
        """Writes the request and waits until the head of the answer is parsed."""
        assert self._transport is not None
        self.status, self.headers, self.has_head, self.has_body = 0, {}, False, False
        self._head_bytes = 0
        self._is_complete = self._keeps_alive = self._is_between_chunks = False
        self._heard_at = self._nudged_at = self._loop.time()
        self._patience = patience
        self._transport.writelines((head, body))
        while not self.has_head:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def read(self) -> bytes:
        while not self._chunks:
            if self._is_complete:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait()
        return self.take()

    async def pump(self, sink: Callable[[bytes], None], wire_sink: Callable[[bytes], bool] | None) -> None:
        if self._chunks:
            sink(self._take_chunks())
        self._sink = sink
        self._wire_sink = wire_sink
        try:
            while not self._is_complete:
                if self._error is not None:
                    raise self._error
                await self._wait()
            if self._sink_error is not None:
                raise self._sink_error
        finally:
            self._sink = self._wire_sink = self._sink_error = None

    def expect_end(self, within_s: float) -> None:
        self._patience = Patience(Timeouts(idle=within_s, total=within_s), self._loop.time() + within_s)

    def hold(self, is_held: bool) -> None:
        if is_held is self._is_held:
            return
        self._is_held = is_held
        if self._transport is not None and not self._transport.is_closing():
            if is_held:
                self._transport.pause_reading()
            else:
                self._excused_at = self._loop.time()
                self._transport.resume_reading()

    def take(self) -> bytes:
        if not self._chunks:
            return b""
        data = self._take_chunks()
        if self._is_held:
            self.hold(False)
        return data

    def _take_chunks(self) -> bytes:
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
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

    def fail(self, error: UpstreamError) -> None:
        """Ends the exchange: whoever waits gets the error once what has arrived is read."""
        if self._error is None and not self._is_complete:
            self._error = error
        self.abort()
        self._wake()

    def discard(self) -> None:
        """Cuts the connection and lets go of the exchange: an error holds its traceback, and so all buffers of the answer."""
        self._error = None
        self._patience = _NO_PATIENCE
        self._chunks.clear()
        self._is_complete = True
        self.abort()

    def abort(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not asyncio's by inheritance, only by interface.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._pool.bytes_received += len(data)
        if self._is_between_chunks and self._wire_sink is not None:
            # The parser stands where it stood: what it is not shown begins and ends between two chunks.
            try:
                if self._wire_sink(data):
                    self._has_heard = True  # when, the sweep knows well enough
                    return
            except Exception as error:
                self._refuse(error)
                self._wake()
                return
        self._heard_at = self._loop.time()
        if self._is_complete:
            # Bytes that no request asked for: whatever they are, they are not the next answer.
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(BrokenAnswerError(f"the engine's answer is not HTTP: {error}"))
            return
        if self._is_between_chunks and data[-2:] != b"\r\n":
            self._is_between_chunks = False  # the next chunk has begun
        if not self.has_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self.fail(BrokenAnswerError(f"the engine's headers are longer than {HEAD_BYTES_MAX} bytes"))
        elif self._sink is not None:
            chunks = self._chunks
            if chunks:
                data = chunks.pop() if len(chunks) == 1 else self._take_chunks()
                try:
                    self._sink(data)
                except Exception as error:
                    self._refuse(error)
            if self.is_drained:
                self._wake()
        else:
            if sum(map(len, self._chunks)) > BUFFER_BYTES_MAX:
                self.hold(True)
            self._wake()

    def _refuse(self, error: Exception) -> None:
        """The sink takes no more. Why belongs to whoever waits in `pump`."""
        self._sink = self._wire_sink = None
        self._sink_error = error
        if not self._is_complete:
            self._is_complete = True
            self._keeps_alive = False

    def eof_received(self) -> bool | None:
        return None  # closes the transport; connection_lost says what it means

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_complete and self._error is None:
            cause = f": {exc}" if exc else ""
            if self.has_head or self._head_bytes:
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
        if not self._has_surplus and not self.has_head:  # else a trailer
            self.headers.setdefault(name.lower(), value)

    def on_headers_complete(self) -> None:
        if self._has_surplus:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = {}  # 100 Continue, 103 Early Hints: the answer is still to come
            return
        self.status = status
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        if self._has_surplus:
            return
        self.has_body = True
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        if not self.has_head or self._has_surplus:
            return
        self._is_complete = True
        self._is_between_chunks = False
        self._keeps_alive = self._parser.should_keep_alive()

    def on_chunk_header(self) -> None:
        self._is_between_chunks = False

    def on_chunk_complete(self) -> None:
        self._is_between_chunks = True


def request_head(method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Request line and headers, as `UpstreamPool.send` takes them: each line with its end, without the blank one."""
    return b"%b %b HTTP/1.1\r\n" % (method, target) + b"".join([b"%b: %b\r\n" % pair for pair in headers])
