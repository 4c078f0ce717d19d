"""Hands an engine's answer on to the client, byte for byte, as it comes.

The one rule: a client can always tell a whole answer from a part of one. What fails before anything of the answer was sent
raises UpstreamError or EngineRefusal, so that another replica can be asked; what fails after it raises BrokenStream, and
the caller goes on from another replica or ends with an error.
"""

from collections.abc import Callable
from typing import NamedTuple

from protocol import headers as names
from protocol.errors import ErrorDetail, error_type, read_error
from protocol.openai import Surface
from protocol.sse import EventBuffer, EventTooLongError
from router.edge.client import ClientConnection
from router.edge.upstream import Answer
from router.errors import BrokenAnswerError, OtherWeightsError, UpstreamError, UpstreamTimeoutError
from router.exchange import Exchange
from router.model_alias import ModelAlias
from router.outcome import Outcome
from router.reply import Reply
from router.state.replicas import Lease
from router.stream.editor import StreamFailure, UnusableAnswer, check_whole, editor_for, usage_at_end
from router.stream.memory import StreamMemory
from router.stream.seam import SeamRewriter

# An engine's error answer is read whole, to be put into OpenAI's shape; none is longer than this.
ERROR_BODY_BYTES_MAX = 1024 * 1024
# Seconds for it, once its first part is there.
ERROR_BODY_TIMEOUT_S = 5.0
# A JSON answer up to this length is read whole before anything is sent: if it breaks, another replica can still answer.
WHOLE_BODY_BYTES_MAX = 1024 * 1024
# The longest answer that is passed on in parts. More than any model's context with log probabilities makes.
LONG_BODY_BYTES_MAX = 256 * 1024 * 1024
# Engines write the usage near the end of an answer.
USAGE_TAIL_BYTES = 16 * 1024
# The longest event of a stream: one with the ids of a long prompt is some MB long.
EVENT_BYTES_MAX = 8 * 1024 * 1024
# Seconds for the end of HTTP's message behind the end of a stream; the client has its answer by then.
END_TIMEOUT_S = 1.0
# The size of a chunk that is at most a read of the socket long, in hexadecimal, and its line end.
_CHUNK_HEAD_BYTES_MAX = 10
_CHUNK_HEADS = [b"%x\r\n" % size for size in range(0x1000)]


class EngineWord(NamedTuple):
    """An engine's error answer."""

    status: int
    detail: ErrorDetail
    retry_after: bytes | None


class EngineRefusal(Exception):
    """The engine answered with an error status. Nothing of it was sent."""

    def __init__(self, word: EngineWord) -> None:
        super().__init__(f"the engine answered {word.status}: {word.detail.message[:200]}")
        self.word = word


class Breakage(NamedTuple):
    """How a request ends whose answer broke off, unless it is continued."""

    outcome: Outcome
    detail: ErrorDetail


class BrokenStream(Exception):
    """An answer ended early, with part of it sent."""

    def __init__(self, reason: str, breakage: Breakage, *, is_stream: bool) -> None:
        super().__init__(reason)
        self.breakage = breakage
        self.is_stream = is_stream


class Leg(NamedTuple):
    """What relaying needs to know of a request, on one replica. A continued answer has several legs."""

    surface: Surface
    lease: Lease
    strips_usage: bool
    choices: int  # answers that must finish; 0: not known
    checkpoint: str | None  # the replica's version, for an engine that does not say it itself
    alias: ModelAlias | None = None
    memory: StreamMemory | None = None  # of what was sent, where the answer could be continued
    seam: SeamRewriter | None = None  # in the second and later legs
    on_first_token: Callable[[], None] | None = None  # called once, when a stream begins to say something


async def relay(answer: Answer, reply: Reply, connection: ClientConnection, exchange: Exchange, leg: Leg) -> None:
    """Returns when the whole answer was handed on. Raises UpstreamError, EngineRefusal, BrokenStream."""
    status = answer.status
    if not 200 <= status < 600:
        raise BrokenAnswerError(f"the engine answered with status {status}")
    # The first part is read before the head is sent: if the engine dies before it, another replica can still answer.
    part = answer.take() or await answer.read()
    if status >= 400:
        answer.expect_end(ERROR_BODY_TIMEOUT_S)
        try:
            body = await _read_up_to(answer, part, ERROR_BODY_BYTES_MAX)
        except UpstreamError:
            body = b""  # the status says enough
        raise EngineRefusal(EngineWord(status, read_error(status, body), answer.headers.get(names.RETRY_AFTER)))
    told = answer.headers.get(names.CHECKPOINT)
    checkpoint = told.decode("latin-1") if told is not None else leg.checkpoint or ""
    if leg.seam is not None and version_of(checkpoint) != version_of(exchange.checkpoint):
        raise OtherWeightsError(f"the replica serves {checkpoint or 'unknown weights'}, not {exchange.checkpoint}")
    content_type = answer.headers.get(b"content-type") or b"application/json"
    if content_type[:17].lower() == b"text/event-stream":
        if leg.seam is None:
            exchange.checkpoint = checkpoint
        await _StreamRelay(answer, reply, connection, exchange, leg, content_type).run(part)
        return
    if reply.is_started:
        raise BrokenAnswerError("the engine answered a streaming request with no stream")
    exchange.checkpoint = checkpoint
    exchange.first_byte_s = exchange.elapsed_s
    body = part if answer.is_complete else await _read_up_to(answer, part, WHOLE_BODY_BYTES_MAX)
    if answer.is_complete:
        try:
            body, exchange.usage = check_whole(body)
        except UnusableAnswer as error:
            raise BrokenAnswerError(str(error)) from error
        reply.whole(status, body if leg.alias is None else leg.alias.answer(body), content_type)
        return
    length = answer.headers.get(b"content-length")
    bytes_left = None if length is None else int(length) - len(body)
    if leg.alias is not None:
        body = leg.alias.answer(body)  # engines write the model's name first
    reply.start_long(status, content_type, None if bytes_left is None else bytes_left + len(body))
    await _relay_long(answer, body, reply, exchange)


def version_of(label: str) -> str:
    """The version in a checkpoint's label, without the replica's epoch."""
    return label.partition("+")[0]


async def _relay_long(answer: Answer, part: bytes, reply: Reply, exchange: Exchange) -> None:
    """An answer too long to be held: in parts as it comes. Its framing tells a part from the whole."""
    try:
        sent, tail = 0, b""
        while not answer.is_complete:
            reply.part(part)
            sent += len(part)
            tail = (tail + part)[-USAGE_TAIL_BYTES:]
            if sent > LONG_BODY_BYTES_MAX:
                raise BrokenAnswerError(f"the engine's answer is longer than {LONG_BODY_BYTES_MAX} bytes")
            await reply.drained()
            part = await answer.read()
    except UpstreamError as error:
        raise broken(error, is_stream=False) from error
    exchange.usage = usage_at_end(tail + part)
    reply.end(part)


class _StreamRelay:
    """One leg of a stream. `_feed` runs for each part that comes, outside of any task."""

    __slots__ = (
        "_alias",
        "_answer",
        "_buffer",
        "_connection",
        "_content_type",
        "_editor",
        "_exchange",
        "_has_begun",
        "_has_ended",
        "_is_plain",
        "_lease",
        "_memory",
        "_on_first_token",
        "_reply",
        "_seam",
        "_strips_usage",
    )

    def __init__(
        self,
        answer: Answer,
        reply: Reply,
        connection: ClientConnection,
        exchange: Exchange,
        leg: Leg,
        content_type: bytes,
    ) -> None:
        self._content_type = content_type
        self._lease = leg.lease
        self._on_first_token = leg.on_first_token
        self._answer = answer
        self._reply = reply
        self._connection = connection
        self._exchange = exchange
        self._alias = leg.alias
        self._memory = leg.memory
        self._seam = leg.seam
        self._strips_usage = leg.strips_usage
        self._buffer = EventBuffer(EVENT_BYTES_MAX)
        self._editor = editor_for(leg.surface, strips_usage=leg.strips_usage, choices=leg.choices)
        self._has_begun = False  # to say something
        self._has_ended = False
        self._is_plain = leg.alias is None and leg.seam is None

    async def run(self, first: bytes) -> None:
        hold = self._connection.on_flow = self._answer.hold
        hold(self._connection.is_clogged)  # by what was sent before: nobody would say so again
        try:
            if first:
                self._feed(first)
            await self._answer.pump(self._feed, self._take_chunk if self._is_plain else None)
            self._end_whole()
        except StreamFailure as failure:
            if not self._reply.has_output and not failure.passed:  # the client has got nothing: it is an answer like a 500
                if failure.detail is None:
                    raise BrokenAnswerError(str(failure)) from failure
                raise EngineRefusal(EngineWord(500, failure.detail, None)) from failure
            self._send(failure.passed)
            detail = failure.detail or _incomplete()
            outcome = Outcome.UPSTREAM_BROKEN if failure.detail is None else Outcome.ENGINE_ERROR
            raise BrokenStream(str(failure), Breakage(outcome, detail), is_stream=True) from failure
        except EventTooLongError as error:
            raise broken(BrokenAnswerError(str(error)), is_stream=True) from error
        except UpstreamError as error:
            if not self._has_ended:  # else nothing is missing but the last bytes of HTTP
                if not self._reply.has_output:
                    raise
                raise broken(error, is_stream=True) from error
        finally:
            if self._connection.on_flow == hold:  # else it is the next request's by now
                self._connection.on_flow = None
            self._answer.hold(False)
            self._exchange.usage = self._editor.usage or self._exchange.usage
            self._exchange.events = self._editor.events

    def _feed(self, data: bytes) -> None:
        if self._exchange.first_byte_s is None:
            self._exchange.first_byte_s = self._exchange.elapsed_s
        block = self._buffer.feed(data)
        if block:
            self._send(self._editor.pass_on(block if self._seam is None else self._seam.rewrite(block)))

    def _take_chunk(self, data: bytes) -> bool:
        """Passes on one chunk that holds whole events with nothing to do, framing and all: nearly all of nearly all streams.

        The same as `_feed`, at half its cost. False for anything else.
        """
        if data[-4:] != b"\n\n\r\n" or not (self._has_begun and self._is_plain and self._buffer.is_empty):
            return False
        size, begin = len(data) - 7, 5
        if 0x100 <= size <= 0xFFF:  # as nearly all events are long
            head = _CHUNK_HEADS[size]
        else:
            begin = data.find(b"\r\n", 0, _CHUNK_HEAD_BYTES_MAX) + 2
            size = len(data) - begin - 2
            head = b"%x\r\n" % size
        if not data.startswith(head) or not self._editor.has_nothing_to_do(data):
            return False
        self._exchange.response_bytes += size
        self._connection.wire_part(data)
        if self._memory is not None:
            self._memory.add(data[begin:-2])
        return True

    def _send(self, block: bytes) -> bool:
        """Whether the answer has ended with this."""
        if not block:
            return False
        if not self._has_begun:
            if b"data:" not in block:
                self._reply.comment(block, self._content_type)
                return False
            self._begin()
        if self._alias is not None:
            block = self._alias.answer(block)
        if self._editor.is_done:
            # The client need not wait for the engine to close: nothing can follow.
            self._has_ended = True
            self._reply.end(block)
            self._answer.expect_end(END_TIMEOUT_S)
            return True
        self._reply.part(block)
        if self._memory is not None:
            self._memory.add(block)
        return False

    def _begin(self) -> None:
        """The first event: from here on another replica can only continue the answer."""
        self._has_begun = True
        self._lease.answered()
        if self._on_first_token is not None:
            self._on_first_token()
        if not self._reply.is_started:
            self._reply.start_stream(self._content_type)
        self._is_plain = self._is_plain and self._connection.is_chunked

    def _end_whole(self) -> None:
        """The engine ended its stream properly, as far as HTTP goes."""
        if self._has_ended:
            return
        rest = self._buffer.rest.strip()
        if rest and self._send(self._editor.pass_on(rest + b"\n\n")):  # an end without its blank line
            return
        # Where the usage that the client asked for is missing too, another replica can count it: then that one ends the stream.
        is_countable = self._memory is not None and not self._strips_usage and self._editor.usage is None
        if self._editor.is_finished and self._reply.has_output and not is_countable:
            self._has_ended = True
            self._reply.end(self._editor.end_mark)
            return
        raise BrokenAnswerError("the engine ended its stream before its answer was whole")


def broken(error: UpstreamError, *, is_stream: bool) -> BrokenStream:
    outcome = Outcome.UPSTREAM_TIMEOUT if isinstance(error, UpstreamTimeoutError) else Outcome.UPSTREAM_BROKEN
    return BrokenStream(str(error), Breakage(outcome, _incomplete()), is_stream=is_stream)


def _incomplete() -> ErrorDetail:
    message = "The replica that was answering failed; this answer is incomplete."
    return ErrorDetail(message=message, type=error_type(502), code="upstream_error")


async def _read_up_to(answer: Answer, first: bytes, limit: int) -> bytes:
    """The body, of which `first` has been read, whole or until it is longer than `limit` bytes."""
    if answer.is_complete:
        return first
    parts = bytearray(first)
    while not answer.is_complete and len(parts) <= limit:
        parts += await answer.read()
    return bytes(parts)
