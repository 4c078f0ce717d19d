"""The answer to one client: its head, its parts, its error, or its breaking off."""

import msgspec

from protocol import headers as names
from protocol.errors import ErrorDetail, encode_anthropic_error, encode_detail
from protocol.openai import Surface
from protocol.sse import KEEP_ALIVE, event
from router.edge.client import ClientConnection
from router.exchange import Exchange
from router.state.decisions import header_value

# Seconds a client is told to wait before it tries again when nothing can serve it.
RETRY_AFTER_S = 2
# OpenAI's clients do not retry at all, or at once, when told to wait longer.
RETRY_AFTER_S_MAX = 60

_JSON = b"content-type: application/json\r\n"
_STREAM = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
_STREAM_TYPE = b"text/event-stream; charset=utf-8"

ANTHROPIC = frozenset({Surface.MESSAGES, Surface.COUNT_TOKENS})


class Reply:
    """Keeps the exchange's status and bytes true to what was sent. `extra` are header lines for every answer (CORS)."""

    __slots__ = ("_connection", "_exchange", "_extra", "_shows_replica", "has_output", "is_ended", "is_started")

    def __init__(self, connection: ClientConnection, exchange: Exchange, *, extra: bytes, shows_replica: bool) -> None:
        self._connection = connection
        self._exchange = exchange
        self._extra = extra
        self._shows_replica = shows_replica
        self.is_started = False  # a status was sent
        self.has_output = False  # something of an engine's answer was sent
        self.is_ended = False  # the connection is the next request's

    def whole(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        self._exchange.status = status
        self._exchange.response_bytes += len(body)
        self.is_started = self.has_output = self.is_ended = True
        self._connection.respond(status, b"content-type: %b\r\n%b" % (content_type, self._own_headers()), body)

    def start_stream(self, content_type: bytes = _STREAM_TYPE) -> None:
        """The head of a stream; goes out with its first part."""
        self._start(200, b"content-type: %b\r\n%b" % (content_type, _STREAM), None)

    def start_long(self, status: int, content_type: bytes, length: int | None) -> None:
        """The head of a whole answer that is too long to be held."""
        self._start(status, b"content-type: %b\r\n" % content_type, length)

    def part(self, data: bytes) -> None:
        self.has_output = True
        self._exchange.response_bytes += len(data)
        self._connection.part(data)

    def end(self, data: bytes = b"") -> None:
        self.has_output = self.is_ended = True
        self._exchange.response_bytes += len(data)
        self._connection.end(data)

    def keep_alive(self) -> None:
        """A comment in a stream, so that nobody on the way takes the connection for dead."""
        if self.is_ended:
            return
        if not self.is_started:
            self.start_stream()
        self._connection.part(KEEP_ALIVE)

    def comment(self, data: bytes, content_type: bytes) -> None:
        """An engine's comment in front of its first event: it passes, but is nothing of an answer."""
        if not self.is_started:
            self.start_stream(content_type)
        self._exchange.response_bytes += len(data)
        self._connection.part(data)

    async def drained(self) -> None:
        await self._connection.drained()

    def error(self, status: int, detail: ErrorDetail, retry_after: bytes | None = None) -> None:
        """Ends the answer with an error: with its status, or in a stream that has begun with an event, broken off."""
        exchange = self._exchange
        if self.is_ended:
            return
        if not self.is_started:
            self.is_ended = True
            if exchange.surface in ANTHROPIC:
                body = encode_anthropic_error(status, detail.message, exchange.request_id)
            else:
                body = encode_detail(detail)
            exchange.status = status
            exchange.response_bytes += len(body)
            self._connection.respond(status, _JSON + _retry_after_line(status, retry_after) + self._own_headers(), body)
            return
        if exchange.surface in ANTHROPIC:
            self.part(event(encode_anthropic_error(status, detail.message, exchange.request_id), b"error"))
        elif exchange.surface is Surface.RESPONSES:
            self.part(event(_responses_error(detail, exchange.events), b"error"))
        else:
            self.part(event(encode_detail(detail)))
        self.break_off()

    def break_off(self) -> None:
        """Ends a started answer so that nobody takes it for complete."""
        if not self.is_ended:
            self.is_ended = True
            self._connection.break_off()

    def _start(self, status: int, block: bytes, length: int | None) -> None:
        self.is_started = True
        self._exchange.status = status
        self._connection.start(status, block + self._own_headers(), length=length)

    def _own_headers(self) -> bytes:
        exchange = self._exchange
        request_id = exchange.request_id.encode()
        block = b"x-request-id: %b\r\nopenai-processing-ms: %d\r\n" % (request_id, exchange.elapsed_s * 1000)
        if exchange.surface in ANTHROPIC:
            block += b"request-id: %b\r\n" % request_id  # where Anthropic's clients look for it
        if exchange.checkpoint:
            block += b"%b: %b\r\n" % (names.CHECKPOINT, exchange.checkpoint.encode("latin-1"))
        if self._shows_replica and exchange.replica:
            block += b"%b: %b\r\n" % (names.REPLICA, exchange.replica.encode())
            if exchange.ticket is not None:
                block += b"%b: %b\r\n" % (names.DECISION, header_value(exchange.ticket))
        return block + self._extra


def _retry_after_line(status: int, engines_word: bytes | None) -> bytes:
    if engines_word is not None and engines_word.isdigit():
        seconds = min(RETRY_AFTER_S_MAX, max(1, int(engines_word[:9])))
    elif status in (429, 503):
        seconds = RETRY_AFTER_S
    else:
        return b""
    return b"retry-after: %d\r\n" % seconds


def _responses_error(detail: ErrorDetail, number: int) -> bytes:
    """The responses surface has its own error event, flat and numbered."""
    fields = {"type": "error", "code": detail.code, "message": detail.message, "param": detail.param, "sequence_number": number}
    return msgspec.json.encode(fields)
