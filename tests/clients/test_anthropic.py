"""Anthropic's own Python library, unmodified, against /v1/messages."""

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import MessageParam, ToolUseBlock

from tests.clients.service import KEY, MAX_BODY_BYTES, MODEL, QUESTION, Service, weather_tool
from tests.router.process import RouterProcess

GREEDY = {"temperature": 0}  # the library has no argument for it any more
MESSAGES: list[MessageParam] = [{"role": "user", "content": QUESTION}]
_FUNCTION = weather_tool()["function"]
TOOLS: list[Any] = [
    {"name": _FUNCTION["name"], "description": _FUNCTION["description"], "input_schema": _FUNCTION["parameters"]}
]


@pytest.fixture
def client(service: Service) -> Iterator[anthropic.Anthropic]:
    """The key goes as `x-api-key`, as this library sends it."""
    with anthropic.Anthropic(base_url=service.router.url, api_key=KEY, max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, **changes: Any) -> Any:
    request: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "extra_body": GREEDY}
    return client.messages.create(**(request | changes))


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_is_answered(client: anthropic.Anthropic) -> None:
    """Text, the reason why it ended, usage, and an id for support."""
    message = ask(client, system="Be brief.", max_tokens=4)
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert text_of(message)
    assert message.stop_reason in ("max_tokens", "end_turn")
    assert message.usage.input_tokens > 0
    assert 0 < message.usage.output_tokens <= 4
    assert message._request_id


def test_a_stream_has_the_text_of_the_whole_message(client: anthropic.Anthropic) -> None:
    """Raw events in their order, and the helper's final message."""
    events = list(ask(client, stream=True))
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[1], kinds[-1]) == ("message_start", "content_block_start", "message_stop")
    assert kinds.count("message_stop") == 1
    with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=8, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = ask(client)
    assert text == text_of(final) == text_of(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == whole.stop_reason


async def test_the_async_client_answers_and_streams(service: Service) -> None:
    """The same with `await`; a bearer token is taken too."""
    async with anthropic.AsyncAnthropic(base_url=service.router.url, auth_token=KEY, max_retries=0) as client:
        whole = await client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=8, extra_body=GREEDY)
        async with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=8, extra_body=GREEDY) as stream:
            assert "".join([text async for text in stream.text_stream]) == text_of(whole)


def test_leaving_a_stream_frees_the_engine(service: Service, client: anthropic.Anthropic) -> None:
    """A closed stream stops the work."""
    with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=4000) as stream:
        next(iter(stream))
    service.await_idle()


def test_a_tool_is_called_and_its_result_answered(client: anthropic.Anthropic) -> None:
    """The loop of every agent, whole and streamed."""
    message = ask(client, tools=TOOLS, max_tokens=100)
    assert message.stop_reason == "tool_use"
    (call,) = (block for block in message.content if isinstance(block, ToolUseBlock))
    assert call.name == "forecast"
    assert set(call.input) == {"city", "days"}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]}
    answer = ask(client, tools=TOOLS, messages=[*MESSAGES, {"role": "assistant", "content": message.content}, result])
    assert text_of(answer)

    with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=100, tools=TOOLS) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    (streamed,) = (block for block in final.content if isinstance(block, ToolUseBlock))
    assert isinstance(streamed.input, dict)
    assert set(streamed.input) == {"city", "days"}


def test_tokens_are_counted_before_anything_is_spent(client: anthropic.Anthropic) -> None:
    """The count is the one that usage then shows, cached or not."""
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Be brief.")
    usage = ask(client, system="Be brief.").usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == usage.input_tokens + cached


@pytest.mark.parametrize(
    ("changes", "kind", "error_type", "status"),
    [
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error", 400),
        ({"extra_body": {"cache_salt": "x"}}, anthropic.BadRequestError, "invalid_request_error", 400),
        ({"model": "absent"}, anthropic.NotFoundError, "not_found_error", 404),
        ({"system": "x" * MAX_BODY_BYTES}, anthropic.ContentTooLargeError, "request_too_large", 413),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_raises_the_librarys_own_error(
    client: anthropic.Anthropic,
    changes: dict[str, Any],
    kind: type[anthropic.APIStatusError],
    error_type: str,
    status: int,
    stream: bool,
) -> None:
    """Class, type and request id, in Anthropic's shape."""
    with pytest.raises(kind) as caught:
        ask(client, stream=stream, **changes)
    check_error(caught.value, error_type, status)


def check_error(error: anthropic.APIStatusError, error_type: str, status: int) -> None:
    assert error.status_code == status
    assert error.request_id == error.response.headers["x-request-id"]
    assert isinstance(error.body, dict)
    assert error.body["type"] == "error"
    assert error.body["error"]["type"] == error_type
    assert error.body["error"]["message"]
    assert error.body["request_id"] == error.request_id


def test_a_wrong_key_is_an_authentication_error(service: Service) -> None:
    """401 in Anthropic's shape."""
    with (
        anthropic.Anthropic(base_url=service.router.url, api_key="sk-wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as caught,
    ):
        ask(client)
    check_error(caught.value, "authentication_error", 401)


def test_an_engine_at_its_limit_is_a_rate_limit_error(service: Service, client: anthropic.Anthropic) -> None:
    """429 with a time to wait."""
    service.fail_next(429)
    with pytest.raises(anthropic.RateLimitError) as caught:
        ask(client)
    check_error(caught.value, "rate_limit_error", 429)
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60


def test_no_replica_is_an_overloaded_error(empty_router: RouterProcess) -> None:
    """503, which the library tells from a fault of the server."""
    with (
        anthropic.Anthropic(base_url=empty_router.url, api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.InternalServerError) as caught,
    ):
        ask(client)
    check_error(caught.value, "overloaded_error", 503)


def test_the_library_tries_again_by_itself(service: Service) -> None:
    """One refusal is not seen by the user, only counted."""
    service.fail_next(503)
    with anthropic.Anthropic(base_url=service.router.url, api_key=KEY, max_retries=2) as client:
        raw = client.messages.with_raw_response.create(model=MODEL, messages=MESSAGES, max_tokens=2)
    assert raw.retries_taken == 1
    assert raw.http_request.headers["x-stainless-retry-count"] == "1"


@pytest.mark.parametrize("kind", ["reset", "truncate", "error_frame"])
def test_a_stream_that_breaks_raises(service: Service, client: anthropic.Anthropic, kind: str) -> None:
    """An answer that lost its end never looks whole."""
    service.break_next(kind, after_chunks=3)
    with (
        pytest.raises((anthropic.APIError, httpx2.RemoteProtocolError)),
        client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=100) as stream,
    ):
        stream.until_done()
