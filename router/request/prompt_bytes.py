"""Finds a prompt in the raw bytes of a request's body, so that its beginning can be compared with others' unparsed.

What stands first in the engine's prompt comes first here: tools, system text, then the messages up to the end of the last
one, without the bracket behind it, so that the next turn of a conversation begins with exactly these bytes. Clients write
equal messages in equal bytes; where one does not, or a key stands where none is expected, only a hit is missed.
"""

from typing import NamedTuple

from msgspec import Raw

from router.request.schema import (
    ABSENT,
    ChatFields,
    CommonFields,
    CompletionFields,
    GeneratingFields,
    MessagesFields,
    ResponsesFields,
)

# Enough of a value's end to find it again in the body.
_NEEDLE_BYTES = 64


class PromptPlace(NamedTuple):
    """Where a prompt stands in a body, also after other keys were added there: `size` bytes of the value of `key`."""

    key: bytes = b""  # in quotes
    size: int = 0
    head: bytes = b""  # tools and system text, which the engine puts first


NO_PROMPT = PromptPlace()


def prompt_place(body: bytes, fields: CommonFields) -> PromptPlace:
    """NO_PROMPT where the surface computes nothing that a later request could use."""
    if not isinstance(fields, GeneratingFields):
        return NO_PROMPT
    head = b"" if fields.tools is ABSENT else bytes(fields.tools)
    if isinstance(fields, ChatFields):
        return PromptPlace(b'"messages"', _messages_size(body, fields), head)
    if isinstance(fields, MessagesFields):
        if fields.system is not ABSENT:
            head += bytes(fields.system)
        return PromptPlace(b'"messages"', _messages_size(body, fields), head)
    if isinstance(fields, CompletionFields):
        return PromptPlace(b'"prompt"', len(memoryview(fields.prompt)), head)
    if isinstance(fields, ResponsesFields):
        return PromptPlace(b'"input"', _items_size(fields.input), head)
    return NO_PROMPT


def prompt_bytes(body: bytes, place: PromptPlace) -> bytes | memoryview:
    """The prompt. `body` is the one whose place it is, or one in which its value stands as it did."""
    if not place.size:
        return place.head
    begin = _value_begin(body, place.key)
    if place.head:
        return b"".join([place.head, memoryview(body)[begin : begin + place.size]])
    return memoryview(body)[begin : begin + place.size]


def _value_begin(body: bytes, key: bytes) -> int:
    begin = body.find(b":", body.find(key) + len(key)) + 1
    while body[begin : begin + 1].isspace():
        begin += 1
    return begin


def _messages_size(body: bytes, fields: ChatFields | MessagesFields) -> int:
    if not fields.messages:
        return 0
    begin = _value_begin(body, b'"messages"')
    last = fields.messages[-1].content
    if last is not ABSENT:
        needle = bytes(memoryview(last)[-_NEEDLE_BYTES:])
        found = body.rfind(needle)
        end = body.find(b"}", found + len(needle)) + 1
        if end > begin:
            return end - begin
    return max(0, len(body) - begin)


def _items_size(items: Raw) -> int:
    """Of a list without its closing bracket."""
    view = memoryview(items)
    return len(view) - 1 if view and view[0] == ord("[") else len(view)
