"""Server-sent events as OpenAI uses them: `data: <json>` and a blank line, the last one `data: [DONE]`."""

import re

DONE = b"data: [DONE]\n\n"
_DONE_MARK = b"data: [DONE]"

# Inside a JSON string a quote is escaped, so neither of these can be part of what a model wrote.
_FAILURE = re.compile(rb'data: ?\{"error"|"finish_reason": ?"(?:abort|error)"')
# Longer than any match of the above and than the end mark with its line ends.
_TAIL_BYTES = 40


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def says_aborted(answer: bytes) -> bool:
    """Whether a whole JSON answer says of itself that it is not one: the engine gave up on it."""
    return _FAILURE.search(answer) is not None


class StreamWatch:
    """Sees, from bytes that may be cut anywhere, how a stream ends: with `[DONE]`, or with an event that says it failed.

    vLLM ends a stream that it aborts (at its own shutdown, say) or that failed inside with `[DONE]` all the same, and a
    client would take what came before for the whole answer.
    """

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, data: bytes) -> int | None:
        """Where in `data` the event begins that says that the stream failed (0 if it began earlier); None if there is none."""
        window = self._tail + data
        self._tail = window[-_TAIL_BYTES:]
        match = _FAILURE.search(window)
        if match is None:
            return None
        begin = window.rfind(b"\n\n", 0, match.start()) + 2 if b"\n\n" in window[: match.start()] else 0
        return max(0, begin - (len(window) - len(data)))

    @property
    def is_done(self) -> bool:
        return self._tail.rstrip(b"\r\n").endswith(_DONE_MARK)
