"""The Anthropic Messages API of the simulated engine, as a client sees it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.sim import SimEngine, start_sim_engine

BODY: dict[str, Any] = {
    "model": "simulated",
    "max_tokens": 50,
    "system": "Be brief.",
    "messages": [{"role": "user", "content": "Hello there"}],
    "temperature": 0,
}
TOOL = {"name": "weather", "input_schema": {"properties": {"city": {"type": "string"}}}}


@pytest.fixture(scope="module")
def engine() -> Iterator[SimEngine]:
    flags = ("--time-scale", "0", "--answer-tokens-mean", "12", "--enable-prompt-tokens-details")
    with start_sim_engine(*flags) as running:
        yield running


def ask(engine: SimEngine, **fields: Any) -> Any:
    answer = engine.client.post("/v1/messages", json={**BODY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(engine: SimEngine, **fields: Any) -> list[dict[str, Any]]:
    answer = engine.client.post("/v1/messages", json={**BODY, "stream": True, **fields})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events(answer.text)


def events(text: str) -> list[dict[str, Any]]:
    """The payloads; each event is named as its payload's type."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        found.append(payload)
    return found


def test_a_message_is_answered(engine: SimEngine) -> None:
    """One text block, the reason to stop, and Anthropic's usage."""
    message = ask(engine)
    assert message["id"].startswith("chatcmpl-")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "simulated")
    assert [block["type"] for block in message["content"]] == ["text"]
    assert message["stop_reason"] == "end_turn"
    assert "stop_sequence" not in message
    count = engine.client.post("/v1/messages/count_tokens", json=BODY).json()
    usage = message["usage"]
    inputs = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(usage[name] for name in inputs) == count["input_tokens"]
    assert count["context_management"] == {"original_input_tokens": count["input_tokens"]}
    assert usage["output_tokens"] == len(message["content"][0]["text"].split()) + 1


def test_a_streamed_message_is_the_same(engine: SimEngine) -> None:
    """message_start, the block with its deltas, message_delta with the reason and the usage, message_stop."""
    whole = ask(engine)
    found = stream(engine)
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert found[0]["message"]["content"] == []
    assert found[0]["message"]["usage"]["output_tokens"] == 0
    assert "".join(event["delta"]["text"] for event in found[2:-3]) == whole["content"][0]["text"]
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


@pytest.mark.parametrize("streams", [False, True])
def test_limits_and_stop_sequences_are_told(engine: SimEngine, streams: bool) -> None:
    """stop_reason says which, and stop_sequence is the one that matched."""
    words = ask(engine)["content"][0]["text"].split()

    def end(**fields: Any) -> tuple[str, str | None]:
        found = stream(engine, **fields)[-2]["delta"] if streams else ask(engine, **fields)
        return found["stop_reason"], found.get("stop_sequence")

    assert end(max_tokens=3) == ("max_tokens", None)
    assert end(stop_sequences=["nowhere", words[3]]) == ("stop_sequence", words[3])


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_is_used_streamed_and_not(engine: SimEngine, choice: dict[str, str]) -> None:
    """A tool_use block with a JSON object as input; its result is answered with text."""
    fields = {"tools": [TOOL], "tool_choice": choice}
    message = ask(engine, **fields)
    assert message["stop_reason"] == "tool_use"
    (block,) = message["content"]
    assert (block["type"], block["name"], block["input"].keys()) == ("tool_use", "weather", {"city"})
    found = stream(engine, **fields)
    start = found[1]["content_block"]
    assert (start["type"], start["name"], start["input"]) == ("tool_use", "weather", {})
    pieces = [event["delta"]["partial_json"] for event in found if event["type"] == "content_block_delta"]
    assert json.loads("".join(pieces)) == block["input"]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "sunny"}]}
    turns = [*BODY["messages"], {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    assert ask(engine, tools=[TOOL], messages=turns)["content"][0]["type"] == "text"


def test_half_of_a_tool_call_is_text(engine: SimEngine) -> None:
    """A call that max_tokens cut short is not one."""
    message = ask(engine, tools=[TOOL], max_tokens=2)
    assert (message["content"][0]["type"], message["stop_reason"]) == ("text", "max_tokens")


def test_reasoning_is_a_thinking_block_with_a_signature() -> None:
    """Streamed: thinking deltas, a signature delta, then the text block."""
    with start_sim_engine("--time-scale", "0", "--answer-tokens-mean", "12", "--reasoning-parser", "any") as engine:
        whole = ask(engine)
        assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
        assert whole["content"][0]["signature"]
        found = stream(engine)
        kinds = [event["delta"]["type"] for event in found if event["type"] == "content_block_delta"]
        assert list(dict.fromkeys(kinds)) == ["thinking_delta", "signature_delta", "text_delta"]
        assert [event["index"] for event in found if event["type"] == "content_block_stop"] == [0, 1]
        assert [block["type"] for block in ask(engine, thinking={"type": "disabled"})["content"]] == ["text"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_errors_of_the_handler_have_anthropics_shape(engine: SimEngine, path: str) -> None:
    """An unknown model: the status and {"type": "error", "error": {"type", "message"}} with vLLM's names of errors."""
    answer = engine.client.post(path, json={**BODY, "model": "other"})
    message = "The model `other` does not exist. Valid aliases: simulated."
    assert answer.status_code == 404
    assert answer.json() == {"type": "error", "error": {"type": "NotFoundError", "message": message}}


def test_a_scripted_status_has_anthropics_shape(engine: SimEngine) -> None:
    """As an engine that refuses to take more."""
    engine.add_faults({"kind": "status", "status": 503, "message": "busy", "times": 1})
    answer = engine.client.post("/v1/messages", json=BODY)
    assert answer.status_code == 503
    assert answer.json() == {"type": "error", "error": {"type": "Service Unavailable", "message": "busy"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "body.max_tokens"),
        ({"max_tokens": 0}, "body.max_tokens"),
        ({"model": None}, "body.model"),
        ({"messages": None}, "body.messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "body.messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "body.messages.0.content.0.type"),
        ({"tools": [{"name": "x"}]}, "body.tools.0.input_schema"),
        ({"tool_choice": {"type": "maybe"}}, "body.tool_choice"),
        ({"system": 5}, "body.system"),
    ],
)
def test_a_body_of_the_wrong_form_is_refused_by_the_framework(engine: SimEngine, fields: dict[str, Any], param: str) -> None:
    """Status 400 in the shape of vLLM's other routes, before the handler could word it as Anthropic does."""
    answer = engine.client.post("/v1/messages", json={**BODY, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"], error["code"]) == (400, "Bad Request", param, 400)


def test_a_stream_that_fails_ends_with_an_error_event(engine: SimEngine) -> None:
    """vLLM's converter reports its own confusion, then the stream ends cleanly, without message_stop."""
    engine.add_faults({"kind": "error_frame", "after_chunks": 4, "times": 1})
    found = stream(engine)
    assert [event["type"] for event in found[:2]] == ["message_start", "content_block_start"]
    assert found[-1]["type"] == "error"
    assert found[-1]["error"]["type"] == "internal_error"
    assert found[-1]["error"]["message"].startswith("2 validation errors for ChatCompletionStreamResponse")
    engine.add_faults({"kind": "error_frame", "times": 1})
    answer = engine.client.post("/v1/messages", json=BODY)
    assert answer.status_code == 500
    assert answer.json()["error"] == {"type": "InternalServerError", "message": "Internal server error"}
    engine.clear_faults()
