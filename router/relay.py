"""Hands an engine's answer on to the client, byte for byte, as it comes.

The one rule: a client can always tell a whole answer from a part of one. What fails before the first byte raises, so that
another replica can be asked; what fails after it ends with an error event (in a stream) and a connection broken off.
"""

from protocol import headers as names
from protocol.errors import encode_error, normalise_error
from protocol.sse import DoneDetector, event
from router.edge.upstream import Answer
from router.errors import BrokenAnswerError, UpstreamError, UpstreamTimeoutError
from router.exchange import Exchange, Headers
from router.model_alias import EventAssembler, ModelAlias
from router.outcome import Outcome
from router.reply import Reply

# An engine's error answer is read whole, to be put into OpenAI's shape; none is longer than this.
ERROR_BODY_BYTES_MAX = 1024 * 1024
# An answer in which the model is renamed is read whole too.
RENAMED_BODY_BYTES_MAX = 64 * 1024 * 1024


async def relay(
    answer: Answer, reply: Reply, exchange: Exchange, *, alias: ModelAlias | None, checkpoint: str | None
) -> Outcome:
    """`checkpoint` is the replica's version, for an engine that does not say it itself.

    Raises UpstreamError only while nothing has been sent to the client.
    """
    # The first part is read before the head is sent: if the engine dies before it, another replica can still answer.
    part = await answer.read()
    exchange.first_byte_s = exchange.elapsed_s
    told = answer.header(names.CHECKPOINT)
    exchange.checkpoint = told.decode("latin-1") if told is not None else checkpoint or ""
    if answer.status >= 400:
        body = normalise_error(answer.status, await _read_all(answer, part, ERROR_BODY_BYTES_MAX))
        await reply.error(answer.status, body, answer.header(names.RETRY_AFTER))
        return Outcome.ENGINE_REFUSED if answer.status < 500 else Outcome.ENGINE_ERROR
    content_type = answer.header(b"content-type") or b"application/json"
    headers: Headers = [(b"content-type", content_type)]
    if content_type.startswith(b"text/event-stream"):
        await reply.head(answer.status, [*headers, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")])
        return await _relay_events(answer, part, reply, exchange, alias)
    if alias is not None:
        body = alias.answer(await _read_all(answer, part, RENAMED_BODY_BYTES_MAX))
        await reply.whole(answer.status, headers, body)
        return Outcome.COMPLETED
    length = answer.header(b"content-length")
    if length is not None:
        headers.append((b"content-length", length))
    await reply.head(answer.status, headers)
    return await _relay_body(answer, part, reply, exchange)


async def _relay_body(answer: Answer, part: bytes, reply: Reply, exchange: Exchange) -> Outcome:
    try:
        while part and not answer.is_complete:
            await reply.part(part)
            part = await answer.read()
    except UpstreamError as error:
        return _broken_off(reply, exchange, error)
    await reply.last_part(part)
    return Outcome.COMPLETED


async def _relay_events(answer: Answer, part: bytes, reply: Reply, exchange: Exchange, alias: ModelAlias | None) -> Outcome:
    done = DoneDetector()
    events = None if alias is None else EventAssembler(alias)
    try:
        while part:
            done.feed(part)
            if events is not None:
                part = events.feed(part)
            if part:
                await reply.part(part)
            part = await answer.read()
        if not done.is_done:
            raise BrokenAnswerError("the engine ended its stream without [DONE]")
    except UpstreamError as error:
        await reply.part(event(_incomplete_error()))
        return _broken_off(reply, exchange, error)
    await reply.last_part(b"" if events is None else events.finish())
    return Outcome.COMPLETED


def _broken_off(reply: Reply, exchange: Exchange, error: UpstreamError) -> Outcome:
    exchange.error = str(error)
    reply.break_off()
    return Outcome.UPSTREAM_TIMEOUT if isinstance(error, UpstreamTimeoutError) else Outcome.UPSTREAM_BROKEN


def _incomplete_error() -> bytes:
    return encode_error(502, "The replica that was answering failed; this answer is incomplete.", code="upstream_error")


async def _read_all(answer: Answer, first: bytes, limit: int) -> bytes:
    """The whole body, of which `first` has been read. Raises BrokenAnswerError above `limit` bytes."""
    parts = bytearray(first)
    while part := await answer.read():
        parts += part
        if len(parts) > limit:
            raise BrokenAnswerError(f"the engine's answer is longer than {limit} bytes")
    return bytes(parts)
