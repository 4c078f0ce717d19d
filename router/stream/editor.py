"""What is changed and noticed in a stream on its way to the client, event by event. Pure.

Events pass byte for byte. Kept back are the usage event that only the router asked for, and events by which an engine says
that it failed or gave the answer up: vLLM ends such a stream with `[DONE]` all the same, and a client would take what came
before for the whole answer.
"""

import json
import math
import re
from typing import Any

import msgspec

from protocol.errors import ErrorDetail, read_error
from protocol.openai import Surface
from protocol.sse import DONE, data_of, event, split
from protocol.usage import Usage, UsageField
from router.request.raw_fields import UNREADABLE

_GAVE_UP = frozenset({"abort", "error"})
# By which a stream of the other surfaces ends whole, and where it says what was used or that it failed.
_NAMED = re.compile(
    rb"(?:^|\n)event: ?(message_stop|message_start|message_delta|response\.(?:completed|incomplete|failed)|error)\b"
)
_ENDS = frozenset({b"message_stop", b"response.completed", b"response.incomplete", b"response.failed"})
# JSON has no such numbers; Python's encoder writes them all the same. vLLM's own stand-in for -Infinity among logprobs.
_LOGPROB_MIN = -9999.0


class StreamFailure(Exception):
    """The engine says in its stream that it failed. `passed` came before it and may go to the client."""

    def __init__(self, detail: ErrorDetail | None, passed: bytes) -> None:
        super().__init__("the engine gave the answer up" if detail is None else "the engine reported an error in its stream")
        self.detail = detail
        self.passed = passed


class _Choice(msgspec.Struct, frozen=True):
    index: int = 0
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] | None = None
    usage: UsageField | None = None
    error: msgspec.Raw = msgspec.Raw()


class _Message(msgspec.Struct, frozen=True):
    usage: UsageField | None = None


class _MessageDelta(msgspec.Struct, frozen=True):
    stop_reason: str | None = ""


class _Named(msgspec.Struct, frozen=True):
    delta: _MessageDelta | None = None
    usage: UsageField | None = None
    message: _Message | None = None
    response: _Message | None = None


class _WholeAnswer(msgspec.Struct, frozen=True):
    type: str | None = None
    stop_reason: str | None = None
    choices: list[_Choice] | None = None
    usage: UsageField | None = None


_CHUNKS = msgspec.json.Decoder(_Chunk)
_NAMED_DATA = msgspec.json.Decoder(_Named)
_WHOLE = msgspec.json.Decoder(_WholeAnswer)


class ChatEditor:
    """For chat and text completions. `choices` is how many answers were asked for."""

    __slots__ = ("_choices", "_finished", "_strips_usage", "is_done", "usage")

    events = 0  # not numbered here

    def __init__(self, *, strips_usage: bool, choices: int) -> None:
        self._strips_usage = strips_usage
        self._choices = choices
        self._finished: set[int] = set()  # indexes of choices
        self.is_done = False  # [DONE] has passed
        self.usage: Usage | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every choice has said how it ended, so that nothing but the end mark can be missing."""
        return 0 < self._choices <= len(self._finished)

    @property
    def end_mark(self) -> bytes:
        return DONE

    def has_nothing_to_do(self, block: bytes) -> bool:
        """Whether a block of whole events passes as it is."""
        # Inside a JSON string a quote is escaped, so none of these can be part of what a model wrote, but for the last three.
        return not (
            b'"finish_reason":"' in block
            or b'"usage"' in block
            or b'"error"' in block
            or b'"finish_reason": "' in block
            or b"[DONE]" in block
            or b"Infinity" in block
            or b"NaN" in block
            or self.is_done
        )

    def pass_on(self, block: bytes) -> bytes:
        """What of a block of whole events the client gets. Raises StreamFailure."""
        if self.has_nothing_to_do(block):
            return block
        passed: list[bytes] = []
        for one in split(block):
            if self.is_done:
                break  # nothing follows the end
            passed.append(self._examine(one, passed))
        return b"".join(passed)

    def _examine(self, one: bytes, passed: list[bytes]) -> bytes:
        data = data_of(one)
        if data is None:
            return one
        if data == b"[DONE]":
            self.is_done = True
            return one
        try:
            chunk = _CHUNKS.decode(data)
        except UNREADABLE:
            data = _with_real_numbers(data)
            if data is None:
                return one
            one = event(data)
            chunk = _CHUNKS.decode(data)
        if bytes(chunk.error) not in (b"", b"null"):
            raise StreamFailure(read_error(500, data), b"".join(passed))
        if chunk.usage is not None:
            self.usage = chunk.usage.read()
            if self._strips_usage and not chunk.choices:
                return b""
        for choice in chunk.choices or ():
            if choice.finish_reason is not None:
                if choice.finish_reason in _GAVE_UP:
                    raise StreamFailure(None, b"".join(passed))
                self._finished.add(choice.index)
        return one


class NamedEditor:
    """For Anthropic's messages and for responses, whose events have names."""

    __slots__ = ("events", "is_done", "usage")

    is_finished = False
    end_mark = b""

    def __init__(self) -> None:
        self.events = 0  # passed on; the responses' events are numbered
        self.is_done = False
        self.usage: Usage | None = None

    def has_nothing_to_do(self, block: bytes) -> bool:
        """Its events are counted, so every block must be passed on."""
        return False

    def pass_on(self, block: bytes) -> bytes:
        """What of a block of whole events the client gets. Raises StreamFailure."""
        if self.is_done:
            return b""
        if _NAMED.search(block) is None:
            self.events += block.count(b"\n\n")
            return block
        passed: list[bytes] = []
        for one in split(block):
            named = _NAMED.match(one)
            if named is not None:
                self._examine(named[1], one, passed)
            passed.append(one)
            self.events += 1
            if named is not None and named[1] in _ENDS:
                self.is_done = True
                break
        return b"".join(passed)

    def _examine(self, name: bytes, one: bytes, passed: list[bytes]) -> None:
        data = data_of(one) or b""
        if name == b"error":
            raise StreamFailure(read_error(500, data), b"".join(passed))
        try:
            said = _NAMED_DATA.decode(data)
        except UNREADABLE:
            said = _Named()
        part = said.message or said.response
        if name == b"message_delta" and said.delta is not None and said.delta.stop_reason is None:
            raise StreamFailure(None, b"".join(passed))  # vLLM has no other word for an answer that it gave up
        usage = said.usage if part is None else part.usage
        if usage is not None:
            read = usage.read()
            if self.usage is not None and not read.prompt:  # Anthropic's first event has the prompt's, its last the answer's
                read = Usage(self.usage.prompt, read.completion, self.usage.cached)
            self.usage = read


def editor_for(surface: Surface, *, strips_usage: bool, choices: int) -> ChatEditor | NamedEditor:
    if surface in (Surface.MESSAGES, Surface.RESPONSES):
        return NamedEditor()
    return ChatEditor(strips_usage=strips_usage, choices=choices)


class UnusableAnswer(Exception):
    """A whole answer that is none; the message says why."""


def check_whole(body: bytes) -> tuple[bytes, Usage | None]:
    """A whole JSON answer as the client gets it, and its usage. Raises UnusableAnswer if it is not JSON or was given up."""
    try:
        answer = _WHOLE.decode(body)
    except UNREADABLE as error:
        mended = _with_real_numbers(body)
        if mended is None:
            raise UnusableAnswer(f"the engine's answer is not the JSON expected: {error}") from error
        body, answer = mended, _WHOLE.decode(mended)
    for choice in answer.choices or ():
        if choice.finish_reason in _GAVE_UP:
            raise UnusableAnswer("the engine gave the answer up")
    if answer.type == "message" and answer.stop_reason is None:
        raise UnusableAnswer("the engine gave the answer up")
    return body, None if answer.usage is None else answer.usage.read()


def usage_at_end(tail: bytes) -> Usage | None:
    """The usage in the last bytes of a whole answer that was too long to be read; None if it is not there."""
    _, found, after = tail.rpartition(b'"usage":')
    if not found:
        return None
    try:
        value, _ = json.JSONDecoder().raw_decode(after.decode("utf-8", "replace").lstrip())
        return msgspec.convert(value, UsageField).read()
    except (ValueError, RecursionError, msgspec.ValidationError):
        return None


def _with_real_numbers(data: bytes) -> bytes | None:
    """The same JSON without Infinity and NaN; None if that was not what is wrong with it."""
    try:
        mended = msgspec.json.encode(_real(json.loads(data)))
        _WHOLE.decode(mended)
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return None
    return mended


def _real(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return _LOGPROB_MIN if value < 0 else None
    if isinstance(value, dict):
        return {key: _real(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_real(member) for member in value]
    return value
