"""Answers of the simulated engine against the response models of the vLLM that is installed."""

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.sim import SimEngine, start_sim_engine

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

# Reads [model, body] pairs. A body is right if the model takes it and gives it back unchanged: no key, null or value of
# it is missing, added or other than vLLM's own.
CHECK = """
import json, sys
from pydantic import TypeAdapter
from openai.types.responses import (
    ResponseFunctionCallArgumentsDeltaEvent, ResponseFunctionCallArgumentsDoneEvent, ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
)
from vllm.entrypoints.anthropic import protocol as anthropic
from vllm.entrypoints.openai.chat_completion import protocol as chat
from vllm.entrypoints.openai.completion import protocol as completion
from vllm.entrypoints.openai.responses import protocol as responses
from vllm.entrypoints.pooling.embed import protocol as embed
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize import protocol as tokenize

EVENTS = {
    "response.output_text.delta": ResponseTextDeltaEvent,
    "response.output_text.done": ResponseTextDoneEvent,
    "response.function_call_arguments.delta": ResponseFunctionCallArgumentsDeltaEvent,
    "response.function_call_arguments.done": ResponseFunctionCallArgumentsDoneEvent,
    "response.created": responses.ResponseCreatedEvent,
    "response.in_progress": responses.ResponseInProgressEvent,
    "response.completed": responses.ResponseCompletedEvent,
}

def same(model, body, **how):
    adapter = TypeAdapter(model)
    value = adapter.validate_json(json.dumps(body))
    found = json.loads(adapter.dump_json(value, by_alias=True, **how))
    assert found == body, f"{found}\\n!=\\n{body}"
    assert json.dumps(found) == json.dumps(body), "the order of the keys differs"

for kind, body in json.load(sys.stdin):
    match kind:
        case "chat": same(chat.ChatCompletionResponse, body)
        case "chat event": same(chat.ChatCompletionStreamResponse, body, exclude_unset=True)
        case "completion": same(completion.CompletionResponse, body)
        case "completion event": same(completion.CompletionStreamResponse, body, exclude_unset=True)
        case "messages": same(anthropic.AnthropicMessagesResponse, body, exclude_none=True)
        case "messages event": same(anthropic.AnthropicStreamEvent, body, exclude_unset=True)
        case "messages error": same(anthropic.AnthropicErrorResponse, body)
        case "count": same(anthropic.AnthropicCountTokensResponse, body, exclude_none=True)
        case "responses": same(responses.ResponsesResponse, body)
        case "responses event": same(EVENTS.get(body["type"], responses.StreamingResponsesResponse), body)
        case "embeddings": same(embed.EmbeddingResponse, body)
        case "error": same(ErrorResponse, body)
        case "tokenize": same(tokenize.TokenizeResponse, body)
        case _: raise AssertionError(kind)
    print(kind)
"""
MESSAGES = [{"role": "user", "content": "Grüße, world"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
FLAT_FUNCTION = {"type": "function", "name": "weather", "parameters": SCHEMA}
TOOL = {"name": "weather", "input_schema": SCHEMA}
TEXT = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}

REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    ("chat", "/v1/chat/completions", {"messages": MESSAGES, "return_token_ids": True}),
    ("chat", "/v1/chat/completions", {"messages": MESSAGES, "tools": [FUNCTION]}),
    ("completion", "/v1/completions", {"prompt": "a b", "return_token_ids": True, "logprobs": 1}),
    ("messages", "/v1/messages", {"model": "simulated", "max_tokens": 30, "messages": MESSAGES}),
    ("messages", "/v1/messages", {"model": "simulated", "max_tokens": 30, "messages": MESSAGES, "tools": [TOOL]}),
    ("responses", "/v1/responses", {"input": "hi", "metadata": {"a": "b"}, "instructions": "Be brief.", **LOGPROBS}),
    ("responses", "/v1/responses", {"input": "hi", "max_output_tokens": 2, "reasoning": {"effort": "low"}, "text": TEXT}),
    ("responses", "/v1/responses", {"input": "hi", "tools": [FLAT_FUNCTION], "tool_choice": "required"}),
]
WHOLE_ONLY: list[tuple[str, str, dict[str, Any]]] = [
    ("count", "/v1/messages/count_tokens", {"model": "simulated", "messages": MESSAGES}),
    ("tokenize", "/tokenize", {"messages": MESSAGES, "return_token_strs": True}),
    ("messages error", "/v1/messages", {"model": "other", "max_tokens": 1, "messages": MESSAGES}),
    ("error", "/v1/messages", {"model": "simulated"}),
    ("error", "/v1/responses", {"input": "hi", "previous_response_id": "x"}),
]


def collect(engine: SimEngine) -> list[tuple[str, Any]]:
    pairs = [(kind, engine.client.post(path, json=body).json()) for kind, path, body in REQUESTS + WHOLE_ONLY]
    for kind, path, body in REQUESTS:
        options = {"stream_options": {"include_usage": True}} if kind in ("chat", "completion") else {}
        text = engine.client.post(path, json={**body, "stream": True, **options}).text
        data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
        assert len(data) > 3
        pairs += [(f"{kind} event", json.loads(payload)) for payload in data]
    return pairs


def test_vllms_models_give_every_answer_back_unchanged() -> None:
    """Whole answers, events and errors of all generating routes, with every null and in the order of the keys."""
    flags = ("--time-scale", "0", "--answer-tokens-mean", "8", "--enable-prompt-tokens-details")
    with start_sim_engine(*flags) as plain, start_sim_engine(*flags, "--reasoning-parser", "any") as thinking:
        pairs = collect(plain) + collect(thinking)
    with start_sim_engine("--runner", "pooling") as embedding:
        for encoding in ("float", "base64"):
            body = {"input": ["a", "b"], "encoding_format": encoding}
            pairs.append(("embeddings", embedding.client.post("/v1/embeddings", json=body).json()))
    run = subprocess.run([sys.executable, "-c", CHECK], input=json.dumps(pairs), capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines() == [kind for kind, _ in pairs]
