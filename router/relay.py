"""Hands an engine's answer on to the client, byte for byte, as it comes.

The one rule: a client can always tell a whole answer from a part of one. What fails before the first byte raises, so that
another replica can be asked; what fails after it ends with an error event (in a stream) and a connection broken off.
"""

from protocol import headers as names
from protocol.errors import encode_error, normalise_error
from protocol.sse import StreamWatch, event, says_aborted
from router.edge.upstream import Answer
from router.errors import BrokenAnswerError, UpstreamError, UpstreamTimeoutError
from router.exchange import Exchange, Headers
from router.model_alias import ModelAlias, StreamRenamer
from router.outcome import Outcome
from router.reply import Reply

# An engine's error answer is read whole, to be put into OpenAI's shape; none is longer than this.
ERROR_BODY_BYTES_MAX = 1024 * 1024
# A JSON answer up to this length is read whole before anything is sent: if it breaks, another replica can still answer.
WHOLE_BODY_BYTES_MAX = 1024 * 1024
# One in which the model is renamed must be.
RENAMED_BODY_BYTES_MAX = 64 * 1024 * 1024

_KEY_MESSAGE = "The replica does not take this service's key; its operator must check --upstream-key."


async def relay(
    answer: Answer, reply: Reply, exchange: Exchange, *, alias: ModelAlias | None, checkpoint: str | None
) -> Outcome:
    """`checkpoint` is the replica's version, for an engine that does not say it itself.

    Raises UpstreamError only while nothing has been sent to the client.
    """
    if not 200 <= answer.status < 600:
        raise BrokenAnswerError(f"the engine answered with status {answer.status}")
    # The first part is read before the head is sent: if the engine dies before it, another replica can still answer.
    part = await answer.read()
    exchange.first_byte_s = exchange.elapsed_s
    told = answer.header(names.CHECKPOINT)
    exchange.checkpoint = told.decode("latin-1") if told is not None else checkpoint or ""
    if answer.status in (401, 403):
        # The client's own key was checked long before: this is about the router's.
        exchange.error = f"the engine answered {answer.status} to the router's key"
        await reply.error(502, encode_error(502, _KEY_MESSAGE, code="upstream_error"))
        return Outcome.ENGINE_ERROR
    if answer.status >= 400:
        body = normalise_error(answer.status, await _read_up_to(answer, part, ERROR_BODY_BYTES_MAX))
        await reply.error(answer.status, body, answer.header(names.RETRY_AFTER))
        return Outcome.ENGINE_REFUSED if answer.status < 500 else Outcome.ENGINE_ERROR
    content_type = answer.header(b"content-type") or b"application/json"
    headers: Headers = [(b"content-type", content_type)]
    if content_type.lower().startswith(b"text/event-stream"):
        await reply.head(answer.status, [*headers, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")])
        return await _relay_events(answer, part, reply, exchange, alias)
    limit = WHOLE_BODY_BYTES_MAX if alias is None else RENAMED_BODY_BYTES_MAX
    body = await _read_up_to(answer, part, limit)
    if answer.is_complete:
        if says_aborted(body):
            raise BrokenAnswerError("the engine gave the answer up")
        await reply.whole(answer.status, headers, body if alias is None else alias.answer(body))
        return Outcome.COMPLETED
    if alias is not None:
        raise BrokenAnswerError(f"the engine's answer is longer than {limit} bytes")
    length = answer.header(b"content-length")
    await reply.head(answer.status, [*headers, (b"content-length", length)] if length is not None else headers)
    return await _relay_rest(answer, body, reply, exchange)


async def _relay_rest(answer: Answer, part: bytes, reply: Reply, exchange: Exchange) -> Outcome:
    """An answer too long to be held: in parts as it comes. Its framing tells a part from the whole."""
    try:
        while not answer.is_complete:
            await reply.part(part)
            part = await answer.read()
    except UpstreamError as error:
        return _broken_off(reply, exchange, error)
    await reply.last_part(part)
    return Outcome.COMPLETED


async def _relay_events(answer: Answer, part: bytes, reply: Reply, exchange: Exchange, alias: ModelAlias | None) -> Outcome:
    watch = StreamWatch()
    renamer = None if alias is None else StreamRenamer(alias)
    try:
        while part:
            failed_at = watch.feed(part)
            passed = part if failed_at is None else part[:failed_at]
            if renamer is not None:
                passed = renamer.feed(passed)
            if passed:
                await reply.part(passed)
            if failed_at is not None:
                return await _relay_failure(part[failed_at:], reply, exchange)
            part = await answer.read()
        if not watch.is_done:
            raise BrokenAnswerError("the engine ended its stream without [DONE]")
    except UpstreamError as error:
        if not watch.is_done:  # else nothing is missing but the last bytes of HTTP
            await reply.part(event(_incomplete_error()))
            return _broken_off(reply, exchange, error)
    await reply.last_part(b"" if renamer is None else renamer.finish())
    return Outcome.COMPLETED


async def _relay_failure(failed: bytes, reply: Reply, exchange: Exchange) -> Outcome:
    """The engine says in its stream that it failed, and would end it as if it were whole."""
    line = failed.partition(b"\n")[0].removeprefix(b"data:").strip()
    is_error = line.startswith(b'{"error"') and line.endswith(b"}")
    await reply.part(event(normalise_error(500, line) if is_error else _incomplete_error()))
    exchange.error = "the engine reported an error in its stream" if is_error else "the engine gave the answer up"
    reply.break_off()
    return Outcome.ENGINE_ERROR if is_error else Outcome.UPSTREAM_BROKEN


def _broken_off(reply: Reply, exchange: Exchange, error: UpstreamError) -> Outcome:
    exchange.error = str(error)
    reply.break_off()
    return Outcome.UPSTREAM_TIMEOUT if isinstance(error, UpstreamTimeoutError) else Outcome.UPSTREAM_BROKEN


def _incomplete_error() -> bytes:
    return encode_error(502, "The replica that was answering failed; this answer is incomplete.", code="upstream_error")


async def _read_up_to(answer: Answer, first: bytes, limit: int) -> bytes:
    """The body, of which `first` has been read, whole or until it is longer than `limit` bytes."""
    if answer.is_complete:
        return first
    parts = bytearray(first)
    while not answer.is_complete and len(parts) <= limit:
        parts += await answer.read()
    return bytes(parts)
