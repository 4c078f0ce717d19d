"""Server-sent events as OpenAI uses them: `data: <json>` and a blank line, the last one `data: [DONE]`."""

DONE = b"data: [DONE]\n\n"
_DONE_MARK = b"data: [DONE]"
# Long enough for the mark and whatever line ends follow it.
_TAIL_BYTES = len(_DONE_MARK) + 8


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class DoneDetector:
    """Sees whether a stream ended with `[DONE]`, from bytes that may be split anywhere."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, data: bytes) -> None:
        self._tail = data[-_TAIL_BYTES:] if len(data) >= _TAIL_BYTES else (self._tail + data)[-_TAIL_BYTES:]

    @property
    def is_done(self) -> bool:
        return self._tail.rstrip(b"\r\n").endswith(_DONE_MARK)
