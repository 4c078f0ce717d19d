"""Goes on with an answer that broke off: what the client has got, and what the next replica is asked for."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from protocol.openai import Surface
from router.edge.upstream import Answer, Patience, Timeouts, UpstreamPool
from router.errors import BrokenAnswerError, UpstreamError
from router.stream.continuation import continued_request, token_count_requests
from router.stream.memory import Sent
from router.stream.seam import SeamRewriter, is_finished

# An answer whose replicas die one after the other may itself be what kills them.
CONTINUATIONS_MAX = 2
# Seconds for an engine to count tokens, while a client waits.
COUNT_TIMEOUT_S = 10.0
COUNT_BYTES_MAX = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens, as the next replica counts them; None where nobody was asked or could say."""

    sent: int | None
    prompt: int | None


NO_COUNTS = Counts(None, None)


class _TokenCount(msgspec.Struct, frozen=True):
    count: int


@dataclass(frozen=True, slots=True)
class Resumption:
    """`body` is what the first engine got; `sent` all that the client has got since; `seams` counts this one."""

    surface: Surface
    body: bytes
    sent: Sent
    seams: int

    async def count(self, pool: UpstreamPool, head: Callable[[bytes, int], bytes]) -> Counts:
        """How many tokens were sent. `head` makes a request's head from its target and the length of its body.

        An engine that cannot count gives the number of chunks, which is never above the truth.
        Raises NotContinuable.
        """
        requests = token_count_requests(self.surface, self.body, self.sent)
        if requests is None:
            return Counts(None if self.sent.token_ids is None else len(self.sent.token_ids), None)
        counts = []
        for body in requests:
            try:
                count = await _ask_count(pool, head(b"/tokenize", len(body)), body)
            except UpstreamError:
                count = None  # if it is dead, the request itself will show it
            if count is None:
                return Counts(self.sent.chunks, None)
            counts.append(count)
        return Counts(max(0, counts[1] - counts[0]), counts[0])

    def ending(self, counts: Counts) -> bytes | None:
        """The events that are missing where only the end of the answer is; None if there is more to generate."""
        return is_finished(self.body, self.sent, counts.sent, prompt_tokens=counts.prompt)

    def next_leg(self, counts: Counts) -> tuple[bytes, SeamRewriter]:
        """The body for the next replica, and what makes its events part of the stream. Raises NotContinuable."""
        tokens_sent = self.sent.chunks if counts.sent is None else counts.sent
        body = continued_request(self.surface, self.body, self.sent, tokens_sent=tokens_sent)
        return body, SeamRewriter(self.sent, tokens_sent=tokens_sent, seams=self.seams)


_COUNT_PATIENCE = Patience(timeouts=Timeouts(first_byte=COUNT_TIMEOUT_S, idle=COUNT_TIMEOUT_S))


async def _ask_count(pool: UpstreamPool, head: bytes, body: bytes) -> int | None:
    answer = await pool.send(head, body, _COUNT_PATIENCE)
    try:
        return await _read_count(answer)
    finally:
        answer.close()


async def _read_count(answer: Answer) -> int | None:
    body = bytearray()
    while not answer.is_complete:
        body += await answer.read()
        if len(body) > COUNT_BYTES_MAX:
            raise BrokenAnswerError(f"the engine's token count is longer than {COUNT_BYTES_MAX} bytes")
    body += await answer.read()
    if answer.status != 200:
        return None
    try:
        return msgspec.json.decode(body, type=_TokenCount).count
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
