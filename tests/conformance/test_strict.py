"""The checks that all of these tests rest on do refuse what is wrong."""

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.conformance import strict

MESSAGE = {"role": "assistant", "content": "a", "refusal": None}
CHOICE = {"index": 0, "message": MESSAGE, "logprobs": None, "finish_reason": "stop"}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
WHOLE = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [CHOICE], "usage": USAGE}
PART = {"index": 0, "delta": {"content": "a"}, "finish_reason": None}
CHUNK = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [PART]}


def without(value: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key != name}


def test_what_openai_documents_passes() -> None:
    """With vLLM's listed additions too."""
    strict.check(ChatCompletion, json.dumps({**WHOLE, "prompt_logprobs": None}).encode())
    strict.check(ChatCompletionChunk, json.dumps({**CHUNK, "choices": [{**PART, "token_ids": [1]}]}).encode())


WRONG: dict[str, Any] = {
    "a key that nobody documents": {**WHOLE, "surprise": 1},
    "a nested key that nobody documents": {**WHOLE, "choices": [{**CHOICE, "message": {**MESSAGE, "surprise": 1}}]},
    "no id": without(WHOLE, "id"),
    "no usage": without(WHOLE, "usage"),
    "no content": {**WHOLE, "choices": [{**CHOICE, "message": without(MESSAGE, "content")}]},
    "no logprobs": {**WHOLE, "choices": [without(CHOICE, "logprobs")]},
    "a finish reason of its own": {**WHOLE, "choices": [{**CHOICE, "finish_reason": "abort"}]},
    "a number in quotes": {**WHOLE, "created": "1"},
    "a number with a fraction": {**WHOLE, "created": 1.5},
    "true for a number": {**WHOLE, "choices": [{**CHOICE, "index": True}]},
    "another object": {**WHOLE, "object": "chat.completion.chunk"},
    "null for an object": {**WHOLE, "choices": None},
}


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG.keys())
def test_what_is_not_an_answer_is_refused(value: Any) -> None:
    """OpenAI's package alone would build an object of each."""
    with pytest.raises(ValueError):
        strict.check(ChatCompletion, json.dumps(value).encode())


@pytest.mark.parametrize("data", [b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1, "a": 2}', b"{", b"{} {}"])
def test_what_is_not_json_is_refused(data: bytes) -> None:
    """Python's parser alone takes the first three."""
    with pytest.raises(ValueError):
        strict.load(data)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"data: {}\n\n",
        b"data: {}\n\ndata: [DONE]",
        b"data: {}\n\ndata: [DONE]\n\ndata: [DONE]\n\n",
        b"data: [DONE]\n\ndata: {}\n\n",
        b"id: 1\ndata: {}\n\ndata: [DONE]\n\n",
        b"event: x\ndata: {}\n\ndata: [DONE]\n\n",
        b"data: {}\r\n\r\ndata: [DONE]\r\n\r\n",
        b"data: {}\n\n\n\ndata: [DONE]\n\n",
    ],
)
def test_what_is_not_a_whole_stream_is_refused(raw: bytes) -> None:
    """No end, a half end, two ends, something behind the end, lines that some clients cannot read."""
    with pytest.raises(ValueError):
        strict.read_chunks(raw)


@pytest.mark.parametrize(
    "value",
    [
        {"detail": "Not Found"},
        {"error": "Unauthorized"},
        {"error": {"message": "a", "type": "b", "param": None, "code": 400}},
        {"error": {"message": "a", "type": "b", "param": None}},
        {"error": {"message": "", "type": "b", "param": None, "code": None}},
        {"error": {"message": "a", "type": None, "param": None, "code": None}},
        {"error": {"message": "a", "type": "b", "param": None, "code": None}, "more": 1},
    ],
)
def test_what_is_not_an_error_of_openais_shape_is_refused(value: Any) -> None:
    """Each of these is what some engine or router answers."""
    with pytest.raises(ValueError):
        strict.check_error(json.dumps(value).encode())
