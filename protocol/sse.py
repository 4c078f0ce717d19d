"""Server-sent events as OpenAI and Anthropic use them: lines `event: NAME` and `data: JSON`, and a blank line."""

import re

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment; clients skip it

_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_DATA_LINE = re.compile(rb"^data: ?([^\r\n]*)", re.MULTILINE)


class EventTooLongError(ValueError):
    """An event has no end within the length allowed."""


def event(data: bytes, name: bytes | None = None) -> bytes:
    return b"data: %b\n\n" % data if name is None else b"event: %b\ndata: %b\n\n" % (name, data)


def split(block: bytes) -> list[bytes]:
    """The events of a block of whole events, each with its blank line. Joined they are the block."""
    events, begin = [], 0
    for blank in _BLANK_LINE.finditer(block):
        events.append(block[begin : blank.end()])
        begin = blank.end()
    if begin < len(block):
        events.append(block[begin:])
    return events


def data_of(one_event: bytes) -> bytes | None:
    """What an event carries; None for a comment. Several data lines are one text, joined by line feeds (the standard)."""
    lines = _DATA_LINE.findall(one_event)
    return b"\n".join(lines) if lines else None


class EventBuffer:
    """Makes whole events of bytes that may be cut anywhere, and keeps back the beginning of one that is not whole."""

    __slots__ = ("_bytes_max", "_rest")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._rest = bytearray()

    def feed(self, data: bytes) -> bytes:
        """All events that are whole now. Raises EventTooLongError for one that does not end within `bytes_max` bytes."""
        rest = self._rest
        if not rest and data.endswith(b"\n\n"):
            return data
        seen = max(0, len(rest) - 3)  # a blank line may be cut, too
        rest += data
        cut = rest.rfind(b"\n\n", seen)
        end = cut + 2 if cut >= 0 else 0
        cut = rest.rfind(b"\n\r\n", max(seen, end - 1))
        if cut >= 0:
            end = cut + 3
        whole = bytes(rest[:end])
        del rest[:end]
        if len(rest) > self._bytes_max:
            raise EventTooLongError(f"an event is longer than {self._bytes_max} bytes")
        return whole

    @property
    def is_empty(self) -> bool:
        """Whether no event has begun."""
        return not self._rest

    @property
    def rest(self) -> bytes:
        """The beginning of an event that is not whole."""
        return bytes(self._rest)
