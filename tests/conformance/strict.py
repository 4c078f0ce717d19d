"""Checks answers against the response models of OpenAI's own package, without that package's leniency.

The package builds its objects from anything. Here types are exact, literals count, required keys must be present, unknown keys
are errors (but for those that vLLM adds, listed below), and numbers that JSON does not have are refused. Streams must keep to
the framing that all clients read: `data:` lines, comments and blank lines, and nothing else.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NoReturn, TypeVar

from openai.types import Completion, CompletionChoice, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel, TypeAdapter


class CompletionChunkChoice(CompletionChoice):
    """OpenAI's package has no type for the parts of a streamed completion: only the last one has a finish reason."""

    finish_reason: Literal["stop", "length", "content_filter"] | None = None  # type: ignore[assignment]


class CompletionChunk(Completion):
    choices: list[CompletionChunkChoice]  # type: ignore[assignment]


_ENGINE = frozenset({"kv_transfer_params", "ec_transfer_params", "metrics"})
# What vLLM 0.32 adds to OpenAI's objects, and what this router does (`intellect`, behind the seam of a continued stream).
EXTRAS: Mapping[type[BaseModel], frozenset[str]] = {
    ChatCompletion: _ENGINE | {"prompt_logprobs", "prompt_token_ids", "prompt_text"},
    Choice: frozenset({"stop_reason", "token_ids", "routed_experts"}),
    ChatCompletionMessage: frozenset({"reasoning"}),
    ChatCompletionChunk: frozenset({"prompt_token_ids", "prompt_text", "metrics", "intellect"}),
    ChunkChoice: frozenset({"stop_reason", "token_ids"}),
    ChoiceDelta: frozenset({"reasoning"}),
    Completion: _ENGINE | {"service_tier"},
    CompletionChoice: frozenset({"stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids", "routed_experts"}),
    CompletionChunk: frozenset({"metrics", "intellect"}),
    CompletionChunkChoice: frozenset({"stop_reason", "token_ids", "prompt_token_ids"}),
    PromptTokensDetails: frozenset({"created_cache_tokens", "multimodal_tokens"}),
    Model: frozenset({"max_model_len"}),
}
# Keys that OpenAI's specification requires although they may be null, which the package's models cannot say.
_REQUIRED: Mapping[type[BaseModel], frozenset[str]] = {
    ChatCompletion: frozenset({"usage"}),
    Choice: frozenset({"logprobs"}),
    ChatCompletionMessage: frozenset({"content", "refusal"}),
    ChunkChoice: frozenset({"finish_reason"}),
    Completion: frozenset({"usage"}),
    CompletionChoice: frozenset({"logprobs"}),
    CompletionChunkChoice: frozenset({"finish_reason"}),
}

M = TypeVar("M", bound=BaseModel)


def load(data: bytes) -> Any:
    """JSON as RFC 8259 has it: no NaN, no Infinity, no key twice."""
    return json.loads(data, parse_constant=_no_constant, object_pairs_hook=_without_duplicates)


def check(model: type[M], data: bytes, *, extras: Mapping[type[BaseModel], frozenset[str]] = EXTRAS) -> M:
    """`data` as `model`.

    Raises:
        ValueError: a wrong type, an unknown literal or a missing key; the message names it.
    """
    load(data)
    value = model.model_validate_json(data, strict=True)
    _refuse_problems(value, extras)
    return value


def check_union(union: Any, data: bytes, *, extras: Mapping[type[BaseModel], frozenset[str]] = EXTRAS) -> Any:
    """`check` for a type that is a union of models, such as the events of a stream."""
    load(data)
    value = _adapter(union).validate_json(data, strict=True)
    _refuse_problems(value, extras)
    return value


@cache
def _adapter(union: Any) -> TypeAdapter[Any]:
    return TypeAdapter(union)  # takes tens of milliseconds for a union of fifty models


def check_error(data: bytes) -> dict[str, str | None]:
    """The `error` object of an error answer: exactly OpenAI's four keys, each a string or null."""
    body = load(data)
    if not isinstance(body, dict) or body.keys() != {"error"} or not isinstance(body["error"], dict):
        raise ValueError(f"{body!r} is not an error of OpenAI's shape")
    error: dict[str, str | None] = body["error"]
    if error.keys() != {"message", "type", "param", "code"}:
        raise ValueError(f"an error has exactly message, type, param and code, not {sorted(error)}")
    for name, value in error.items():
        if not isinstance(value, str) and not (value is None and name in ("param", "code")):
            raise ValueError(f"error.{name} is {value!r}, but must be a string")
    if not error["message"]:
        raise ValueError("error.message is empty")
    return error


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event; `name` is that of its `event:` line."""

    name: str | None
    data: bytes


@dataclass(frozen=True, slots=True)
class Events:
    events: list[Event]
    comments: list[bytes]


def read_events(raw: bytes) -> Events:
    """The events of a stream's bytes.

    Raises:
        ValueError: a half event at the end, a line that is neither data, event nor comment, or an event without data.
    """
    *blocks, rest = raw.split(b"\n\n")
    if rest:
        raise ValueError(f"the stream ends inside an event: {rest[-200:]!r}")
    events, comments = [], []
    for block in blocks:
        if block.startswith(b": "):
            comments.append(block)
            continue
        *names, data = block.split(b"\n")
        if not data.startswith(b"data: ") or len(names) > 1 or not all(name.startswith(b"event: ") for name in names):
            raise ValueError(f"not an event that every client reads: {block!r}")
        name = names[0].removeprefix(b"event: ").decode() if names else None
        events.append(Event(name, data.removeprefix(b"data: ")))
    return Events(events, comments)


def read_chunks(raw: bytes) -> list[bytes]:
    """The payloads of a whole stream of chat or completion chunks, which ends with [DONE], once."""
    events = read_events(raw).events
    if not events or events[-1].data != b"[DONE]":
        raise ValueError(f"the stream does not end with [DONE]: {raw[-200:]!r}")
    payloads = [event.data for event in events[:-1]]
    if b"[DONE]" in payloads or any(event.name for event in events):
        raise ValueError("a stream of chunks has [DONE] once, and no event names")
    return payloads


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError(f"a key comes twice in {[key for key, _ in pairs]}")
    return value


def _refuse_problems(value: object, extras: Mapping[type[BaseModel], frozenset[str]]) -> None:
    if problems := list(_problems(value, "$", extras)):
        raise ValueError("; ".join(problems))


def _problems(value: object, path: str, extras: Mapping[type[BaseModel], frozenset[str]]) -> Iterator[str]:
    match value:
        case BaseModel():
            kind = type(value)
            for name in sorted((value.model_extra or {}).keys() - extras.get(kind, frozenset())):
                yield f"{path}.{name} is no field of {kind.__name__}"
            for name in sorted(_REQUIRED.get(kind, frozenset()) - value.model_fields_set):
                yield f"{path}.{name} is missing from {kind.__name__}"
            for name in kind.model_fields:
                yield from _problems(getattr(value, name), f"{path}.{name}", extras)
        case dict():
            for key, item in value.items():
                yield from _problems(item, f"{path}.{key}", extras)
        case list():
            for index, item in enumerate(value):
                yield from _problems(item, f"{path}[{index}]", extras)
