"""The Anthropic Messages API: answers as Anthropic's own package models them, errors in Anthropic's shape."""

import json
from typing import Any

import httpx
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import BaseModel

from tests.conformance import raw, strict
from tests.conformance.replies import MESSAGES, whole_and_streamed
from tests.conformance.service import JSON_HEADERS, KEY, MODEL, MODEL_LEN, THINKER, Service
from tests.conformance.streams import BREAKAGES, broken_stream
from tests.router.process import RouterProcess

COUNT = "/v1/messages/count_tokens"
PLAIN: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 200,
    "temperature": 0,
    "messages": [{"role": "user", "content": "What is a router?"}],
}
TOOL = {
    "name": "get_weather",
    "description": "Weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
NO_EXTRAS: dict[type[BaseModel], frozenset[str]] = {}


def ask(http: httpx.Client, stream: bool, **changes: Any) -> Message:
    """The message, strictly checked; a stream's events are checked for their order and put together."""
    response = http.post(MESSAGES, json={**PLAIN, **changes, "stream": stream})
    assert response.status_code == 200, response.text
    if not stream:
        assert response.headers["content-type"] == "application/json"
        return strict.check(Message, response.content, extras=NO_EXTRAS)
    assert response.headers["content-type"].startswith("text/event-stream")
    return put_together(response.content)


def put_together(data: bytes) -> Message:
    found = strict.read_events(data).events
    assert all(event.name == strict.load(event.data)["type"] for event in found)
    events = [strict.check_union(RawMessageStreamEvent, _with_signature(event.data), extras=NO_EXTRAS) for event in found]
    first, *middle, delta, last = events
    assert (first.type, delta.type, last.type) == ("message_start", "message_delta", "message_stop")
    message: Message = first.message
    arguments = ""
    is_open = False
    for event in middle:
        match event.type:
            case "content_block_start":
                assert (is_open, event.index) == (False, len(message.content))
                message.content.append(event.content_block)
                is_open, arguments = True, ""
            case "content_block_delta":
                assert (is_open, event.index) == (True, len(message.content) - 1)
                block: Any = message.content[-1]
                match event.delta.type:
                    case "text_delta":
                        block.text += event.delta.text
                    case "thinking_delta":
                        block.thinking += event.delta.thinking
                    case "input_json_delta":
                        arguments += event.delta.partial_json
            case "content_block_stop":
                assert (is_open, event.index) == (True, len(message.content) - 1)
                is_open = False
                if arguments:
                    tool: Any = message.content[-1]
                    tool.input = json.loads(arguments)
            case kind:
                raise AssertionError(f"{kind} between the beginning and the end")
    assert not is_open
    message.stop_reason, message.stop_sequence = delta.delta.stop_reason, delta.delta.stop_sequence
    message.usage.output_tokens = delta.usage.output_tokens
    return message


def _with_signature(data: bytes) -> bytes:
    """vLLM opens a block of thinking without the empty signature that Anthropic sends there; clients do not mind."""
    opening = b'"content_block":{"type":"thinking","thinking":""'
    return data.replace(opening + b"}", opening + b',"signature":""}')


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@whole_and_streamed
def test_a_message_is_answered_in_anthropics_shape(http: httpx.Client, stream: bool) -> None:
    """Every body and event fits the models of Anthropic's package, with nothing added and nothing missing."""
    message = ask(http, stream)
    assert (message.type, message.role, message.model, message.stop_reason) == ("message", "assistant", MODEL, "end_turn")
    assert text_of(message)
    assert message.usage.output_tokens > 1


def test_a_streamed_message_says_what_the_whole_one_says(http: httpx.Client) -> None:
    """At temperature 0, token for token."""
    whole, streamed = ask(http, False), ask(http, True)
    assert (text_of(streamed), streamed.stop_reason) == (text_of(whole), whole.stop_reason)
    assert streamed.usage.output_tokens == whole.usage.output_tokens


@whole_and_streamed
def test_limits_and_stop_sequences_hold(http: httpx.Client, stream: bool) -> None:
    """`max_tokens` and `stop_sequence` are named as the reason."""
    assert ask(http, stream, max_tokens=1).stop_reason == "max_tokens"
    text = text_of(ask(http, False))
    stop = text[10:13]
    stopped = ask(http, stream, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert text_of(stopped) == text.partition(stop)[0]


@whole_and_streamed
def test_a_tool_is_used(http: httpx.Client, stream: bool) -> None:
    """One block with id, name and input; its result is answered in the next turn."""
    message = ask(http, stream, tools=[TOOL], tool_choice={"type": "any"})
    assert message.stop_reason == "tool_use"
    (block,) = [block for block in message.content if block.type == "tool_use"]
    assert (block.name, isinstance(block.input, dict)) == ("get_weather", True)
    turns = [
        *PLAIN["messages"],
        {"role": "assistant", "content": [{"type": "tool_use", "id": block.id, "name": block.name, "input": {"city": "Rome"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "12 degrees"}]},
    ]
    assert text_of(ask(http, stream, messages=turns, tools=[TOOL]))


@whole_and_streamed
def test_thinking_comes_as_its_own_block(http: httpx.Client, stream: bool) -> None:
    """Before the text, with a signature."""
    message = ask(http, stream, model=THINKER)
    assert [block.type for block in message.content] == ["thinking", "text"]


def test_tokens_are_counted(http: httpx.Client) -> None:
    """As many as the answer's usage will name."""
    body = {key: value for key, value in PLAIN.items() if key in ("model", "messages")}
    response = http.post(COUNT, json=body)
    assert response.status_code == 200, response.text
    counted = strict.check(MessageTokensCount, response.content, extras={MessageTokensCount: frozenset({"context_management"})})
    usage = ask(http, False).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_the_key_may_come_either_way(service: Service) -> None:
    """Anthropic's client sends x-api-key, others send a bearer token; the other routes take only the latter."""
    with httpx.Client(base_url=service.router.url) as nobody:
        for headers in ({"x-api-key": KEY, "anthropic-version": "2023-06-01"}, {"authorization": f"Bearer {KEY}"}):
            for path in (MESSAGES, COUNT):
                assert nobody.post(path, json=PLAIN, headers=headers).status_code == 200
        assert nobody.get("/v1/models", headers={"x-api-key": "wrong"}).status_code == 401


ERRORS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "e01_no_key": (401, "authentication_error", {"headers": {"authorization": ""}}),
    "e01_wrong_key": (401, "authentication_error", {"headers": {"authorization": "", "x-api-key": "wrong"}}),
    "e03_unknown_model": (404, "not_found_error", {"json": {**PLAIN, "model": "claude-9"}}),
    "e03_no_model": (400, "invalid_request_error", {"json": {"messages": [], "max_tokens": 1}}),
    "e05_wrong_method": (405, "invalid_request_error", {"method": "PUT"}),
    "e06_malformed": (400, "invalid_request_error", {"content": b"{"}),
    "e06_not_an_object": (400, "invalid_request_error", {"content": b"[]"}),
    "e06_no_max_tokens": (400, "invalid_request_error", {"json": {"model": MODEL, "messages": PLAIN["messages"]}}),
    "e06_messages_of_another_type": (400, "invalid_request_error", {"json": {**PLAIN, "messages": "hi"}}),
    "e07_too_long": (
        400,
        "invalid_request_error",
        {"json": {**PLAIN, "messages": [{"role": "user", "content": "a " * MODEL_LEN}]}},
    ),
    "e09_plain_text": (415, "invalid_request_error", {"headers": {"content-type": "text/plain"}}),
    "operators_field": (400, "invalid_request_error", {"json": {**PLAIN, "kv_transfer_params": {"a": 1}}}),
    "operators_salt": (400, "invalid_request_error", {"json": {**PLAIN, "cache_salt": "x"}}),
    "remote_image": (
        400,
        "invalid_request_error",
        {
            "json": {
                **PLAIN,
                "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}],
            }
        },
    ),
}


def check_anthropic_error(data: bytes, request_id: str | None) -> dict[str, str]:
    body = strict.load(data)
    assert body.keys() == {"type", "error", "request_id"}
    assert (body["type"], body["request_id"]) == ("error", request_id)
    assert body["error"].keys() == {"type", "message"}
    assert body["error"]["message"]
    assert "127.0.0.1" not in body["error"]["message"]
    error: dict[str, str] = body["error"]
    return error


@whole_and_streamed
@pytest.mark.parametrize(("status", "kind", "request_parts"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_have_anthropics_shape(
    http: httpx.Client, stream: bool, status: int, kind: str, request_parts: dict[str, Any]
) -> None:
    """By HTTP status, for streams too, so that Anthropic's client raises its own exceptions."""
    parts = {"method": "POST", **request_parts}
    if "content" not in parts:
        parts["content"] = json.dumps({**parts.pop("json", PLAIN), "stream": stream}).encode()
    parts["headers"] = {"content-type": "application/json", **parts.get("headers", {})}
    response = http.request(url=MESSAGES, **parts)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert check_anthropic_error(response.content, response.headers["x-request-id"])["type"] == kind


@whole_and_streamed
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_e10_e11_an_engines_refusal_keeps_its_status(
    service: Service, http: httpx.Client, stream: bool, status: int, kind: str
) -> None:
    """With Anthropic's name for it."""
    service.fault_everywhere(kind="status", status=status, message="its own words")
    response = http.post(MESSAGES, json={**PLAIN, "stream": stream})
    assert response.status_code == status
    error = check_anthropic_error(response.content, response.headers["x-request-id"])
    assert error["type"] == kind
    assert ("retry-after" in response.headers) is (status in (429, 503))


@whole_and_streamed
def test_e08_a_message_too_large_is_a_413(service: Service, stream: bool) -> None:
    """`request_too_large`, as Anthropic names it."""
    body = b'{"stream":%s,"a":"' % (b"true" if stream else b"false") + b"x" * (33 * 1024 * 1024)
    answer = raw.exchange(service.router.url, raw.request("POST", MESSAGES, JSON_HEADERS, body))
    assert answer.status == 413
    assert check_anthropic_error(answer.body, answer.header("x-request-id"))["type"] == "request_too_large"


@whole_and_streamed
def test_e11_no_replica_is_overloaded(scripted_router: RouterProcess, stream: bool) -> None:
    """503 rather than 529, which proxies do not know."""
    response = httpx.post(f"{scripted_router.url}{MESSAGES}", json={**PLAIN, "stream": stream})
    assert response.status_code == 503
    assert check_anthropic_error(response.content, response.headers["x-request-id"])["type"] == "overloaded_error"


@pytest.mark.parametrize("fault", BREAKAGES.values(), ids=BREAKAGES.keys())
def test_b08_a_broken_message_stream_ends_in_an_error_event(service: Service, fault: dict[str, Any]) -> None:
    """`event: error`, no message_stop, and a broken connection."""
    service.fault_everywhere(**fault)
    events = strict.read_events(broken_stream(service.router.url, {**PLAIN, "stream": True}, MESSAGES)).events
    assert "message_stop" not in [event.name for event in events]
    assert events[-1].name == "error"
    body = strict.load(events[-1].data)
    assert (body["type"], body["error"]["type"]) == ("error", "api_error")
    assert body["error"]["message"]
