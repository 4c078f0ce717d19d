"""One view of chat and completion answers, whole or streamed, each part of them strictly checked on the way."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_usage import CompletionUsage

from tests.conformance import strict
from tests.conformance.service import MODEL

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
EMBEDDINGS = "/v1/embeddings"
TOKENIZE = "/tokenize"

PLAIN: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is a router?"}],
    "temperature": 0,
    "seed": 1,
}
WITH_USAGE = {"stream_options": {"include_usage": True}}
whole_and_streamed = pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ReplyChoice:
    role: str | None = None
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)  # chat: one for each token; completions: one object
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Reply:
    id: str
    model: str
    choices: dict[int, ReplyChoice]
    usage: CompletionUsage | None
    events: int  # chunks of a stream; 1 for a whole answer

    @property
    def only(self) -> ReplyChoice:
        assert list(self.choices) == [0]
        return self.choices[0]


def ask_chat(http: httpx.Client, body: Mapping[str, Any], *, stream: bool) -> Reply:
    """A chat answer. Raises ValueError or AssertionError where it is not exactly what OpenAI's clients may expect."""
    response = http.post(CHAT, json={**body, "stream": True} if stream else body)
    return read_chat(response, stream=stream)


def ask_completion(http: httpx.Client, body: Mapping[str, Any], *, stream: bool) -> Reply:
    """`ask_chat` for text completions."""
    response = http.post(COMPLETIONS, json={**body, "stream": True} if stream else body)
    return read_completion(response, stream=stream)


def read_chat(response: httpx.Response, *, stream: bool) -> Reply:
    _check_head(response, stream=stream)
    return _chat_stream(response.content) if stream else _whole_chat(response.content)


def read_completion(response: httpx.Response, *, stream: bool) -> Reply:
    _check_head(response, stream=stream)
    return _completion_stream(response.content) if stream else _whole_completion(response.content)


def check_failure(response: httpx.Response, status: int) -> dict[str, str | None]:
    """The error of an answer that failed as every failure must."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert int(response.headers["content-length"]) == len(response.content)
    assert response.headers["x-request-id"]
    assert b"127.0.0.1" not in response.content, "where engines live is nobody's business"
    return strict.check_error(response.content)


def _check_head(response: httpx.Response, *, stream: bool) -> None:
    assert response.status_code == 200, response.text
    headers = response.headers
    assert headers["x-request-id"]
    assert headers["x-intellect-checkpoint"]
    assert float(headers["openai-processing-ms"]) >= 0
    assert "content-encoding" not in headers
    if stream:
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")
        assert "content-length" not in headers
    else:
        assert headers["content-type"] == "application/json"


def _whole_chat(data: bytes) -> Reply:
    answer = strict.check(ChatCompletion, data)
    choices = {}
    for choice in answer.choices:
        message, extra = choice.message, choice.model_extra or {}
        calls = []
        for call in message.tool_calls or ():
            assert call.type == "function"
            calls.append(ToolCall(call.id, call.function.name, call.function.arguments))
        choices[choice.index] = ReplyChoice(
            role=message.role,
            text=message.content or "",
            reasoning=(message.model_extra or {}).get("reasoning") or "",
            tool_calls=calls,
            logprobs=list((choice.logprobs.content if choice.logprobs else None) or ()),
            finish_reason=choice.finish_reason,
            stop_reason=extra.get("stop_reason"),
            token_ids=extra.get("token_ids") or [],
        )
    assert len(choices) == len(answer.choices), "an index comes twice"
    return Reply(answer.id, answer.model, choices, answer.usage, 1)


def _chat_stream(data: bytes) -> Reply:
    chunks = [strict.check(ChatCompletionChunk, payload) for payload in strict.read_chunks(data)]
    first = chunks[0]
    reply = Reply(first.id, first.model, {}, None, len(chunks))
    for chunk in chunks:
        assert (chunk.id, chunk.created, chunk.model) == (first.id, first.created, first.model)
        assert "intellect" not in (chunk.model_extra or {}), "nothing died, so nothing was continued"
        _note_usage(reply, chunk.usage, has_choices=bool(chunk.choices))
        for part in chunk.choices:
            is_new = part.index not in reply.choices
            choice = reply.choices.setdefault(part.index, ReplyChoice())
            assert choice.finish_reason is None, "a choice goes on behind its finish reason"
            assert (part.delta.role is not None) is is_new, "the role comes with the first delta of a choice, and only there"
            extra = part.model_extra or {}
            choice.role = part.delta.role or choice.role
            choice.text += part.delta.content or ""
            choice.reasoning += (part.delta.model_extra or {}).get("reasoning") or ""
            choice.logprobs += (part.logprobs.content if part.logprobs else None) or []
            choice.token_ids += extra.get("token_ids") or []
            choice.finish_reason, choice.stop_reason = part.finish_reason, extra.get("stop_reason")
            for delta in part.delta.tool_calls or ():
                assert delta.function is not None
                if delta.index == len(choice.tool_calls):
                    assert delta.id
                    assert delta.type == "function"
                    assert delta.function.name
                    choice.tool_calls.append(ToolCall(delta.id, delta.function.name, delta.function.arguments or ""))
                else:
                    assert delta.index == len(choice.tool_calls) - 1, "calls come one after the other, from 0"
                    assert (delta.id, delta.type, delta.function.name) == (None, None, None)
                    choice.tool_calls[-1].arguments += delta.function.arguments or ""
    assert all(choice.finish_reason for choice in reply.choices.values())
    return reply


def _whole_completion(data: bytes) -> Reply:
    answer = strict.check(Completion, data)
    choices = {}
    for choice in answer.choices:
        extra = choice.model_extra or {}
        choices[choice.index] = ReplyChoice(
            text=choice.text,
            logprobs=[choice.logprobs] if choice.logprobs else [],
            finish_reason=choice.finish_reason,
            stop_reason=extra.get("stop_reason"),
            token_ids=extra.get("token_ids") or [],
        )
    return Reply(answer.id, answer.model, choices, answer.usage, 1)


def _completion_stream(data: bytes) -> Reply:
    chunks = [strict.check(strict.CompletionChunk, payload) for payload in strict.read_chunks(data)]
    first = chunks[0]
    reply = Reply(first.id, first.model, {}, None, len(chunks))
    for chunk in chunks:
        assert (chunk.id, chunk.created, chunk.model) == (first.id, first.created, first.model)
        _note_usage(reply, chunk.usage, has_choices=bool(chunk.choices))
        for part in chunk.choices:
            choice = reply.choices.setdefault(part.index, ReplyChoice())
            assert choice.finish_reason is None, "a choice goes on behind its finish reason"
            extra = part.model_extra or {}
            choice.text += part.text
            choice.logprobs += [part.logprobs] if part.logprobs else []
            choice.token_ids += extra.get("token_ids") or []
            choice.finish_reason, choice.stop_reason = part.finish_reason, extra.get("stop_reason")
    assert all(choice.finish_reason for choice in reply.choices.values())
    return reply


def _note_usage(reply: Reply, usage: CompletionUsage | None, *, has_choices: bool) -> None:
    """The last usage counts. A chunk without choices is there for its usage and nothing comes behind it."""
    assert has_choices or usage is not None, "a chunk that says nothing"
    if usage is not None:
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    reply.usage = usage
