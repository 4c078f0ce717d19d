"""The public port's HTTP/1.1 server: one client's connection, on httptools.

Written for the router's needs (docs/decisions/0005): a whole ASGI stack costs as much as all the rest of a request, and
ASGI has no word for a client that left, for breaking an answer off, or for a stream that must not end cleanly. The
connection reads requests within limits, hands each to the service in a task of its own, one at a time and in order, and
writes what it is told. Invariant: an answer ends exactly once, by `respond`, `end` or `break_off`.
"""

import asyncio
import logging
import re
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol, cast
from urllib.parse import unquote_to_bytes

import httptools

from protocol.errors import encode_error
from router.outcome import Outcome

log = logging.getLogger(__name__)

# Beyond any client's headers; llhttp itself has no limit.
HEAD_BYTES_MAX = 64 * 1024
# Seconds from a connection's, or a request's, first byte to the end of its head.
HEAD_TIMEOUT_S = 30.0
# Longer than clients' own pools keep a connection, so that the client closes it and no request meets a closed one.
KEEP_ALIVE_S = 75.0
# Seconds that a client may leave its answer unread once its buffers are full.
CLIENT_STALL_S = 120.0
# Seconds in which a client must take the end of an answer after which its connection closes.
LINGER_S = 5.0
# Requests that a client may send ahead; it is told to close behind the last of them, since a connection that is not read does
# not show that its client has left.
PIPELINED_MAX = 64

# An offer of another protocol (h2c, WebSocket) makes the parser take what follows for that protocol's bytes. Taken out, it is
# declined, as RFC 9110 section 7.8 lets a server do.
_UPGRADE_OFFER = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)

STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken, before its body matters. `allow` is for 405."""

    status: int
    message: str
    outcome: Outcome = Outcome.REJECTED_INVALID
    code: str | None = None
    param: str | None = None
    allow: str | None = None


@dataclass(slots=True)
class Request:
    """One request. `path` is percent-decoded, without the query. Header names are lower case; of equal ones the last counts."""

    method: str
    path: str
    query: bytes
    headers: dict[bytes, bytes]
    is_http10: bool
    keeps_alive: bool
    started: float  # time.perf_counter at the end of its head
    body: bytes = b""
    refusal: Refusal | None = None


class Service(Protocol):
    def admit(self, request: Request) -> Refusal | None:
        """Asked when the head is complete, before a body is read."""
        ...

    def refuse(self, request: Request, connection: "ClientConnection", refusal: Refusal) -> None:
        """Answers, counts and logs a refused request."""
        ...

    def serve(self, request: Request, connection: "ClientConnection") -> Coroutine[Any, Any, None] | None:
        """Answers the request, at once or in what it returns, which is cancelled if the client leaves."""
        ...


@dataclass(slots=True)
class ServerState:
    """What all connections of a listener share. Owned by the listener."""

    service: Service
    body_bytes_max: int
    body_timeout_s: float
    connections: set["ClientConnection"] = field(default_factory=set)
    date_line: bytes = b""
    is_draining: bool = False
    is_empty: asyncio.Event = field(default_factory=asyncio.Event)  # no connection is open


class ClientConnection(asyncio.Protocol):
    """See the module's docstring. `on_flow` is called with True when the client reads too slowly, with False afterwards."""

    __slots__ = (
        "_body",
        "_clogged_since",
        "_current",
        "_deadline",
        "_drained",
        "_has_event",
        "_has_two_hosts",
        "_has_unread_body",
        "_head",
        "_headers",
        "_is_chunked",
        "_is_closing",
        "_is_deaf",
        "_is_in_head",
        "_is_long_head",
        "_is_mute",
        "_is_started",
        "_loop",
        "_parser",
        "_quiet_bytes",
        "_request",
        "_server",
        "_target",
        "_task",
        "_transport",
        "_unsent",
        "_waiting",
        "is_clogged",
        "is_lost",
        "is_stalled",
        "on_flow",
    )

    def __init__(self, server: ServerState, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        # The request that is being read.
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._is_in_head = False
        self._is_long_head = False  # it came in several reads, or in a large one: its length must be looked at
        self._has_event = False  # the parser has got somewhere with what was read last
        self._quiet_bytes = 0  # read since it last did
        self._is_deaf = False  # nothing more is taken from this client
        self._request: Request | None = None
        self._body: bytes | bytearray = b""
        # The requests that are read, and the one that is being answered.
        self._waiting: deque[Request] = deque()
        self._current: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._head = b""  # of the answer, until there is something to send with it
        self._is_started = False
        self._is_chunked = False
        self._is_mute = False  # the answer to a HEAD
        self._is_closing = False
        self._has_unread_body = self._has_two_hosts = False
        self._deadline: float | None = None
        self._clogged_since = 0.0
        self._unsent = 0  # bytes that the client had not taken at the last sweep
        self._drained: asyncio.Future[None] | None = None
        self.is_clogged = False
        self.is_lost = False
        self.is_stalled = False
        self.on_flow: Callable[[bool], None] | None = None

    def __repr__(self) -> str:
        what = "closing" if self._is_closing else "idle" if self._current is None else self._current.path
        return f"<ClientConnection {what} waiting={len(self._waiting)}>"

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not asyncio's by inheritance, only by interface.
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)
        self._server.is_empty.clear()
        self._deadline = time.monotonic() + HEAD_TIMEOUT_S

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if self._request is None:
            self._is_long_head = self._is_in_head or len(data) > HEAD_BYTES_MAX
            head_end = data.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
            if data.find(b"pgrade:", 0, head_end if head_end >= 0 else HEAD_BYTES_MAX) >= 0:
                head, end, body = data.partition(b"\r\n\r\n")
                data = _UPGRADE_OFFER.sub(b"", head + b"\r\n").removesuffix(b"\r\n") + end + body if end else data
        self._has_event = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # An offer that was not seen above. Its request is served; what follows it would be of the other protocol.
            if self._current is None:
                self._close()
            else:
                self._end_after(self._current)
            return
        except httptools.HttpParserCallbackError:
            log.exception("a fault of the router in reading a request")
            self._give_up(500, "The router failed on this request.")
            return
        except httptools.HttpParserError:
            if not self._is_deaf:
                self._give_up(400, "The request is not valid HTTP.")
            return
        # What is neither the beginning nor the end of anything, nor part of a body: a long head, or trailers without end.
        self._quiet_bytes = 0 if self._has_event else self._quiet_bytes + len(data)
        if self._quiet_bytes > HEAD_BYTES_MAX and not self._is_deaf:
            self._request = None
            self._give_up(431, _HEAD_TOO_LONG)

    def eof_received(self) -> bool | None:
        return None  # a client that will send no more is gone: most that close say no more than this

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._transport = None
        self._is_closing = True
        self._server.connections.discard(self)
        if not self._server.connections:
            self._server.is_empty.set()
        self._waiting.clear()
        self._wake_writer()
        if self._task is not None and self._current is not None:
            # From the loop: a task that is cancelled before its first step never runs, so nobody would count its request.
            self._loop.call_soon(self._task.cancel)

    def pause_writing(self) -> None:
        self.is_clogged = True
        self._clogged_since = time.monotonic()
        if self.on_flow is not None:
            self.on_flow(True)

    def resume_writing(self) -> None:
        self.is_clogged = False
        self._wake_writer()
        if self.on_flow is not None:
            self.on_flow(False)

    # httptools

    def on_message_begin(self) -> None:
        self._has_event = True
        if self._is_deaf:
            return
        self._is_in_head = True
        self._has_two_hosts = False
        self._target = b""
        self._headers = {}
        self._body = b""
        if self._current is None:
            self._deadline = time.monotonic() + HEAD_TIMEOUT_S

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # a trailer, which must not change the head that was admitted (RFC 9110 section 6.5.1)
        key = name.lower()
        if key == b"host" and key in self._headers:
            self._has_two_hosts = True
        self._headers[key] = value

    def on_headers_complete(self) -> None:
        self._has_event = True
        if self._is_deaf:
            return
        self._is_in_head = False
        parser, headers = self._parser, self._headers
        path, query = _parted(self._target)
        request = self._request = Request(
            method=parser.get_method().decode("latin-1"),
            path=path,
            query=query,
            headers=headers,
            is_http10=parser.get_http_version() == "1.0",
            keeps_alive=parser.should_keep_alive(),
            started=time.perf_counter(),
        )
        if self._is_long_head and _length_of(self._target, headers) > HEAD_BYTES_MAX:
            request.refusal = Refusal(431, _HEAD_TOO_LONG)
            self._refuse_now(request)
            return
        request.refusal = self._server.service.admit(request)
        if (b"host" not in headers and not request.is_http10) or self._has_two_hosts:
            request.refusal = Refusal(400, "A request must name its host once, in the header 'Host'.")
        length = headers.get(b"content-length")
        is_too_long = length is not None and int(length) > self._server.body_bytes_max
        if is_too_long and request.refusal is None:
            request.refusal = self._too_large()
        if b"expect" in headers and headers[b"expect"].lower() == b"100-continue" and self._current is None:
            if request.refusal is not None:
                self._refuse_now(request)
                return
            if self._transport is not None and not request.is_http10:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if is_too_long:
            self._refuse_now(request)
        elif self._current is None:
            self._deadline = time.monotonic() + self._server.body_timeout_s

    def on_body(self, body: bytes) -> None:
        self._has_event = True
        request = self._request
        if request is None or self._is_deaf:
            return
        if not self._body:
            self._body = body
        elif isinstance(self._body, bytes):
            self._body = bytearray(self._body) + body
        else:
            self._body += body
        if len(self._body) > self._server.body_bytes_max:
            request.refusal = request.refusal or self._too_large()
            self._refuse_now(request)
        elif request.refusal is not None:
            self._body = b""

    def on_message_complete(self) -> None:
        self._has_event = True
        request, self._request = self._request, None
        if request is None or self._is_deaf:
            return
        request.body, self._body = bytes(self._body), b""
        if self._current is None:
            self._begin(request)
            return
        self._waiting.append(request)
        waiting_bytes = sum([len(one.body) for one in self._waiting])
        if len(self._waiting) >= PIPELINED_MAX or waiting_bytes > self._server.body_bytes_max:
            request.keeps_alive = False
            self._is_deaf = True

    # What the service does with an answer

    def respond(self, status: int, block: bytes, body: bytes) -> None:
        """A whole answer. `block` holds header lines, each with its line end, without content-length."""
        request = self._current
        if request is None or self._transport is None:
            return
        head = self._head_of(request, status, block)
        if status != 204:
            head += b"content-length: %d\r\n" % len(body)
        self._transport.writelines((head, b"\r\n", body) if request.method != "HEAD" else (head, b"\r\n"))
        self._finish(request)

    def start(self, status: int, block: bytes, *, length: int | None = None) -> None:
        """Begins an answer in parts; its head goes out with the first of them. `length` is its size if that is known."""
        request = self._current
        if request is None:
            return
        self._is_started = True
        self._is_mute = request.method == "HEAD"
        self._is_chunked = length is None and not request.is_http10 and not self._is_mute
        if length is not None:
            block += b"content-length: %d\r\n" % length
        elif self._is_chunked or self._is_mute:
            block += b"transfer-encoding: chunked\r\n"
        else:
            request.keeps_alive = False  # HTTP/1.0: the end of the connection is the end of the answer
        self._head = self._head_of(request, status, block) + b"\r\n"

    def part(self, data: bytes) -> None:
        """The next bytes of a started answer. Check `is_clogged` or wait for `drained` where much can come."""
        transport = self._transport
        if transport is None:
            return
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        elif self._is_mute:
            data = b""
        if self._head:
            data = self._head + data
            self._head = b""
        transport.write(data)

    @property
    def is_chunked(self) -> bool:
        """Whether the started answer is sent in chunks, which `wire_part` needs."""
        return self._is_chunked

    def wire_part(self, data: bytes) -> None:
        """Like `part`, for bytes that are whole chunks already. Not before the first `part`."""
        if self._transport is not None:
            self._transport.write(data)

    def end(self, data: bytes = b"") -> None:
        """The last bytes of a started answer, and its end."""
        request = self._current
        if request is None or self._transport is None:
            return
        if self._is_chunked:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        elif self._is_mute:
            data = b""
        self._transport.write(self._head + data)
        self._finish(request)

    def break_off(self) -> None:
        """Sends what is written and closes without ending the answer, so that no client takes it for complete."""
        request, transport = self._current, self._transport
        self._current = None
        if transport is None:
            return
        if self._head:
            transport.write(self._head)
            self._head = b""
        if request is not None and request.is_http10:
            # There a close is a clean end, and so is an abort of a socket that has nothing left to send: it must be reset.
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            transport.abort()
        else:
            self._close()

    async def drained(self) -> None:
        """Returns when the client has read enough for more to be written, or is gone."""
        while self.is_clogged and not self.is_lost:
            self._drained = self._loop.create_future()
            await self._drained

    # What the listener does

    def sweep(self, now: float) -> None:
        """Enforces the deadlines. Call about once a second."""
        if self._transport is None:
            return
        unsent = self._transport.get_write_buffer_size()
        if unsent < self._unsent or not unsent or not self._unsent:
            self._clogged_since = now  # slow, but it reads
        self._unsent = unsent
        if unsent and now - self._clogged_since > CLIENT_STALL_S:
            self._give_up_client()
        elif self._deadline is not None and now > self._deadline and not unsent:
            self._expire()

    def drain(self) -> None:
        """Closes now if idle, else when the running answers are given."""
        if self._current is None and self._request is None and not self._waiting:
            self._close()

    def cancel(self) -> None:
        """Ends the running request: the time for draining is over."""
        if self._task is not None and self._current is not None:
            self._loop.call_soon(self._task.cancel)  # behind its first step, or it would end without a word
        else:
            self._close()

    # Inside

    def _begin(self, request: Request) -> None:
        if self.is_lost:  # the client left while this one waited for its turn
            self._current = None
            return
        self._current = request
        self._deadline = None
        self._is_started = self._is_chunked = self._is_mute = False
        self._head = b""
        if request.refusal is not None:
            self._server.service.refuse(request, self, request.refusal)
            return
        serving = self._server.service.serve(request, self)
        if serving is not None:
            self._task = self._loop.create_task(self._serve(request, serving))

    async def _serve(self, request: Request, serving: Coroutine[Any, Any, None]) -> None:
        try:
            await serving
        except Exception:  # the service answers its own faults; this one is in doing so
            log.exception("answering %s %s failed", request.method, request.path)
        finally:
            if self._current is request:  # it was not answered
                self.break_off()

    def _head_of(self, request: Request, status: int, block: bytes) -> bytes:
        if self._server.is_draining:
            request.keeps_alive = False
        if request.keeps_alive:
            if request.is_http10:
                block += b"connection: keep-alive\r\n"
        else:
            block += b"connection: close\r\n"
        line = STATUS_LINES.get(status) or b"HTTP/1.1 %d Error\r\n" % status
        return line + self._server.date_line + block

    def _finish(self, request: Request) -> None:
        self._current = None
        self._head = b""
        self.on_flow = None
        is_last = self._server.is_draining and not self._waiting and self._request is None
        if is_last or not request.keeps_alive:
            self._close()
        elif self._waiting:
            # From the loop, or a client that sends many refused requests at once would nest as many calls.
            self._current = following = self._waiting.popleft()
            self._loop.call_soon(self._begin, following)
        else:
            self._deadline = time.monotonic() + (
                HEAD_TIMEOUT_S if self._is_in_head or self._request is not None else KEEP_ALIVE_S
            )

    def _expire(self) -> None:
        self._deadline = None
        if self._is_closing:
            if self._transport is not None:
                self._transport.abort()
        elif self._request is not None:
            request = self._request
            limit = self._server.body_timeout_s
            request.refusal = Refusal(408, f"The body of the request did not arrive within {limit:g} s.")
            self._refuse_now(request)
        else:
            self._close()

    def _refuse_now(self, request: Request) -> None:
        """Refuses a request whose body is not read."""
        if self._current is not None:
            self._end_after(self._current)  # it came ahead of another's answer
            return
        request.keeps_alive = False
        self._request = None
        self._has_unread_body = True
        self._begin(request)

    def _give_up(self, status: int, message: str) -> None:
        """Answers what never became a request."""
        if self._transport is not None and self._current is None:
            body = encode_error(status, message)
            head = STATUS_LINES[status] + self._server.date_line + b"content-type: application/json\r\nconnection: close\r\n"
            self._transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            self._has_unread_body = True
            self._close()
        elif self._current is not None:
            self._end_after(self._current)

    def _end_after(self, current: Request) -> None:
        """Takes nothing more from this client; what it has asked for is still answered."""
        self._is_deaf = True
        last = self._waiting[-1] if self._waiting else current
        last.keeps_alive = False

    def _give_up_client(self) -> None:
        """It has taken nothing for CLIENT_STALL_S of what it asked for."""
        if self._task is not None and self._current is not None:
            if not self.is_stalled:
                self._loop.call_soon(self._task.cancel)
            self.is_stalled = True
        elif self._transport is not None:
            self._transport.abort()

    def _close(self) -> None:
        """Says that nothing more comes, and waits a little for the client to take what did."""
        if self._transport is None:
            return
        self._is_deaf = True
        was_closing, self._is_closing = self._is_closing, True
        self._deadline = time.monotonic() + LINGER_S
        if was_closing and self._transport.is_closing():
            return
        if self._has_unread_body and self._transport.can_write_eof():
            self._transport.write_eof()  # more of a body may come: closed now, the client would be reset before it reads this
        else:
            self._transport.close()

    def _too_large(self) -> Refusal:
        limit = self._server.body_bytes_max
        message = f"The body of the request is longer than {limit} bytes, the most that is accepted here."
        return Refusal(413, message, code="request_too_large")

    def _wake_writer(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None


_RESET = struct.pack("ii", 1, 0)  # linger for no time at all
_HEAD_TOO_LONG = f"The headers of the request are longer than {HEAD_BYTES_MAX} bytes."


def _length_of(target: bytes, headers: dict[bytes, bytes]) -> int:
    """Of a head, about: repeated names count once, and what stands between names and values is taken for four bytes."""
    return len(target) + sum(len(name) + len(value) + 4 for name, value in headers.items())


def header_block(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Header lines as `respond` and `start` take them. Values are ours or came through a parser, so no line end is in them."""
    return b"".join([b"%b: %b\r\n" % pair for pair in headers])


def _parted(target: bytes) -> tuple[str, bytes]:
    """The decoded path, and the query as it came."""
    query = b""
    if not target.startswith(b"/"):  # absolute form, or `*`
        try:
            url = httptools.parse_url(target)
        except httptools.HttpParserInvalidURLError:
            return target.decode("latin-1"), b""
        target, query = url.path or b"/", url.query or b""
    path, _, after = target.partition(b"?")
    return (unquote_to_bytes(path) if b"%" in path else path).decode("utf-8", "replace"), after or query
