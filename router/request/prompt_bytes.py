"""Finds a prompt in the raw bytes of a request's body, so that its beginning can be compared with others' unparsed.

What stands first in the engine's prompt comes first here: tools, system text, then the messages up to the end of the last
one, without the bracket behind it, so that the next turn of a conversation begins with exactly these bytes. Clients write
equal messages in equal bytes; where one does not, or a key stands where none is expected, only a hit is missed.
"""

from typing import NamedTuple

from msgspec import Raw

from router.policy.prompt import BytesPrompt, Chains
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
    """Where a prompt stands in a body: `size` bytes of the value of `key`, from `begin`."""

    key: bytes = b""  # in quotes
    begin: int = 0
    size: int = 0
    head: bytes = b""  # tools and system text, which the engine puts first


NO_PROMPT = PromptPlace()


def prompt_place(body: bytes, fields: CommonFields) -> PromptPlace:
    """NO_PROMPT where the surface computes nothing that a later request could use."""
    if not isinstance(fields, GeneratingFields):
        return NO_PROMPT
    head = b"" if fields.tools is ABSENT else bytes(fields.tools)
    if isinstance(fields, ChatFields):
        return _messages_place(body, fields, head)
    if isinstance(fields, MessagesFields):
        if fields.system is not ABSENT:
            head += bytes(fields.system)
        return _messages_place(body, fields, head)
    if isinstance(fields, CompletionFields):
        return PromptPlace(b'"prompt"', _value_begin(body, b'"prompt"'), len(memoryview(fields.prompt)), head)
    if isinstance(fields, ResponsesFields):
        return PromptPlace(b'"input"', _value_begin(body, b'"input"'), _items_size(fields.input), head)
    return NO_PROMPT


def prompt_in(body: bytes, place: PromptPlace, scope: int, *, is_changed: bool, chains: Chains | None = None) -> BytesPrompt:
    """The prompt. `body` is the one whose place it is, or, if `is_changed`, one in which the value stands as it did.

    `scope`: hash of what must be equal besides the bytes for KV to be equal, as the engine's name of the model.
    """
    if not place.size:
        return BytesPrompt(place.head, scope)
    begin = _value_begin(body, place.key) if is_changed else place.begin
    if place.head:
        return BytesPrompt(b"".join([place.head, memoryview(body)[begin : begin + place.size]]), scope, chains=chains)
    return BytesPrompt(body, scope, begin=begin, size=place.size, chains=chains)


def _value_begin(body: bytes, key: bytes) -> int:
    begin = body.find(b":", body.find(key) + len(key)) + 1
    while body[begin : begin + 1].isspace():
        begin += 1
    return begin


def _messages_place(body: bytes, fields: ChatFields | MessagesFields, head: bytes) -> PromptPlace:
    if not fields.messages:
        return PromptPlace(head=head)
    begin = body.find(b'"messages":[')
    begin = _value_begin(body, b'"messages"') if begin < 0 else begin + len(b'"messages":')
    if fields.tools is ABSENT and (end := body.rfind(b"}]") + 1) > begin:
        return PromptPlace(b'"messages"', begin, end - begin, head)
    last = fields.messages[-1].content
    if last is not ABSENT:
        needle = bytes(memoryview(last)[-_NEEDLE_BYTES:])
        found = body.rfind(needle)
        end = body.find(b"}", found + len(needle)) + 1
        if end > begin:
            return PromptPlace(b'"messages"', begin, end - begin, head)
    return PromptPlace(b'"messages"', begin, max(0, len(body) - begin), head)


def _items_size(items: Raw) -> int:
    """Of a list without its closing bracket."""
    view = memoryview(items)
    return len(view) - 1 if view and view[0] == ord("[") else len(view)
