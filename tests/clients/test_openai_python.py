"""OpenAI's own Python library, unmodified, as its users call it."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from tests.clients.service import EMBEDDING_MODEL, KEY, MAX_BODY_BYTES, MODEL, QUESTION, Service, weather_tool
from tests.router.process import RouterProcess

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
TOOLS: list[Any] = [weather_tool()]


class Forecast(BaseModel):
    """What the model is asked to fill in."""

    city: str
    degrees: int
    is_dry: bool


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=service.router.v1, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=service.router.v1, api_key=KEY, max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **changes: Any) -> Any:
    request: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 200}
    return client.chat.completions.create(**(request | changes))


def test_a_stream_has_the_text_of_the_whole_answer(client: openai.OpenAI) -> None:
    """Chunk for chunk the same answer, with usage only where it was asked for."""
    whole = ask(client)
    chunks = list(ask(client, stream=True))
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason

    *with_text, last = ask(client, stream=True, stream_options={"include_usage": True})
    assert all(chunk.choices for chunk in with_text)
    assert last.choices == []
    assert last.usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(exclude={"prompt_tokens_details"})


def test_the_stream_helper_builds_the_final_answer(client: openai.OpenAI) -> None:
    """`client.chat.completions.stream` gives events and the whole completion at the end."""
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=200) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert len(deltas) > 1
    assert final.choices[0].message.content == "".join(deltas) == ask(client).choices[0].message.content


async def test_the_async_client_answers_and_streams(async_client: openai.AsyncOpenAI) -> None:
    """The same with `await` and `async for`."""
    create = async_client.chat.completions.create
    whole = await create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=200)
    stream = await create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=200, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content
    async with async_client.chat.completions.stream(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=200) as helper:
        final = await helper.get_final_completion()
    assert final.choices[0].message.content == text


async def test_leaving_an_async_stream_frees_the_engine(service: Service, async_client: openai.AsyncOpenAI) -> None:
    """`break` and `close` stop the work."""
    stream = await async_client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    await stream.close()
    service.await_idle()


def test_several_choices_stream_side_by_side(client: openai.OpenAI) -> None:
    """With n = 3 each index ends once."""
    chunks = list(ask(client, n=3, temperature=1, seed=7, stream=True))
    ends = [chunk.choices[0].index for chunk in chunks if chunk.choices[0].finish_reason]
    assert sorted(ends) == [0, 1, 2]


def test_legacy_completions_work_whole_and_streamed(client: openai.OpenAI) -> None:
    """Also several prompts at once."""
    whole = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=6, temperature=0)
    stream = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=6, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    both = client.completions.create(model=MODEL, prompt=["Once", "Twice"], max_tokens=2)
    assert [choice.index for choice in both.choices] == [0, 1]


def test_a_tool_is_called_and_its_result_answered(client: openai.OpenAI) -> None:
    """The loop of every agent: call, result, text."""
    asked = ask(client, tools=TOOLS, max_tokens=100)
    assert asked.choices[0].finish_reason == "tool_calls"
    (call,) = asked.choices[0].message.tool_calls
    assert call.function.name == "forecast"
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    answer = ask(client, tools=TOOLS, messages=[*MESSAGES, asked.choices[0].message, result])
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls


def test_a_tool_call_streams_in_parts_that_join_to_json(client: openai.OpenAI) -> None:
    """The first part has id and name, the later ones only arguments; the helper joins them."""
    parts = [
        part
        for chunk in ask(client, tools=TOOLS, max_tokens=100, stream=True)
        for part in chunk.choices[0].delta.tool_calls or ()
    ]
    assert parts[0].id
    assert parts[0].function.name == "forecast"
    assert not any(part.id or part.function.name for part in parts[1:])

    tool = openai.pydantic_function_tool(Forecast)
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[tool], max_tokens=100) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in events
    assert events.count("tool_calls.function.arguments.done") == 1
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert len(calls) == 1
    assert isinstance(calls[0].function.parsed_arguments, Forecast)


def test_parse_returns_the_users_own_type(client: openai.OpenAI) -> None:
    """Structured output as a pydantic model, whole and streamed."""
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Forecast, max_tokens=100)
    assert isinstance(answer.choices[0].message.parsed, Forecast)
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=Forecast, max_tokens=100) as stream:
        stream.until_done()
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Forecast)


def test_raw_responses_show_the_headers(client: openai.OpenAI) -> None:
    """`with_raw_response` and `with_streaming_response`, with the id that support will ask for."""
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, max_tokens=2)
    assert raw.status_code == 200
    assert raw.retries_taken == 0
    assert raw.headers["x-intellect-checkpoint"] == "base"
    assert int(raw.headers["openai-processing-ms"]) >= 0
    assert raw.request_id == raw.headers["x-request-id"] == raw.parse()._request_id

    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=2, stream=True, extra_headers={"x-request-id": "mine-1"}
    ) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["x-request-id"] == "mine-1"
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert lines.count("data: [DONE]") == 1


def test_one_connection_carries_all_requests(service: Service) -> None:
    """Whole answers, streams read to their end and errors leave the connection usable."""
    opened: list[str] = []

    def watch(request: httpx2.Request) -> None:
        request.extensions["trace"] = lambda name, _: opened.append(name) if name.endswith("connect_tcp.started") else None

    with (
        openai.DefaultHttpxClient(event_hooks={"request": [watch]}) as http,
        openai.OpenAI(base_url=service.router.v1, api_key=KEY, max_retries=0, http_client=http) as client,
    ):
        stream = client.chat.completions.with_streaming_response.create
        for _ in range(3):
            with stream(model=MODEL, messages=MESSAGES, max_tokens=8, stream=True) as response:
                assert list(filter(None, response.iter_lines()))[-1] == "data: [DONE]"
            ask(client)
            with pytest.raises(openai.NotFoundError):
                ask(client, model="absent")
            client.models.list()
    assert len(opened) == 1


def test_a_client_that_leaves_at_done_has_had_a_whole_answer(service: Service, client: openai.OpenAI) -> None:
    """The library closes its connection as soon as it reads [DONE]; that is no abandoned request."""

    def ended(outcome: str) -> float:
        return service.router.metric("intellect_router_requests_total", outcome=outcome)

    before = ended("completed"), ended("client_gone")
    for _ in range(20):
        assert list(ask(client, stream=True))
    service.await_idle()
    assert (ended("completed"), ended("client_gone")) == (before[0] + 20, before[1])


def test_responses_are_created_and_streamed(client: openai.OpenAI) -> None:
    """The newer API, its events and its helper."""
    whole = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=200, store=False)
    assert whole.output_text
    assert whole.usage is not None
    events = list(
        client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=200, store=False, stream=True)
    )
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=200, store=False) as stream:
        stream.until_done()
        assert stream.get_final_response().output_text == whole.output_text


def test_a_response_calls_a_tool(client: openai.OpenAI) -> None:
    """The newer API's form of a function call, whole and streamed."""
    tools: list[Any] = [{"type": "function", **TOOLS[0]["function"], "strict": False}]
    whole = client.responses.create(model=MODEL, input=QUESTION, tools=tools, store=False)
    (call,) = (item for item in whole.output if item.type == "function_call")
    assert (call.name, set(json.loads(call.arguments))) == ("forecast", {"city", "days"})
    stream = client.responses.create(model=MODEL, input=QUESTION, tools=tools, store=False, stream=True)
    (done,) = (event for event in stream if event.type == "response.function_call_arguments.done")
    assert set(json.loads(done.arguments)) == {"city", "days"}


def test_a_response_that_is_not_stored_is_not_found(client: openai.OpenAI) -> None:
    """Clean errors where the engine keeps nothing."""
    created = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=2, store=False)
    for lookup in (client.responses.retrieve, client.responses.cancel):
        for response_id in (created.id, "resp_unknown"):
            with pytest.raises(openai.NotFoundError) as caught:
                lookup(response_id)
            assert caught.value.request_id


def test_embeddings_come_as_numbers(client: openai.OpenAI) -> None:
    """The library asks for base64 by itself and decodes it; plain floats give the same."""
    decoded = client.embeddings.create(model=EMBEDDING_MODEL, input=["one", "two"])
    plain = client.embeddings.create(model=EMBEDDING_MODEL, input=["one", "two"], encoding_format="float")
    assert [item.index for item in decoded.data] == [0, 1]
    for ours, theirs in zip(decoded.data, plain.data, strict=True):
        assert ours.embedding == pytest.approx(theirs.embedding, abs=1e-6)


def test_models_are_listed_and_found_by_id(client: openai.OpenAI) -> None:
    """Also an id with a slash, which the library sends as %2F."""
    assert [model.id for model in client.models.list()] == [MODEL, EMBEDDING_MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/absent")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("changes", "kind", "code", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, None, "temperature"),
        ({"tools": []}, openai.BadRequestError, None, "tools"),
        ({"functions": [{"name": "f"}]}, openai.BadRequestError, "unsupported_parameter", "functions"),
        ({"extra_body": {"guided_json": {}}}, openai.BadRequestError, "unsupported_parameter", "guided_json"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "invalid_value", "stream_options"),
        ({"n": 129}, openai.BadRequestError, "integer_above_max_value", "n"),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, openai.BadRequestError, "context_length_exceeded", ...),
        ({"model": "absent"}, openai.NotFoundError, "model_not_found", "model"),
        ({"messages": [{"role": "user", "content": "x" * MAX_BODY_BYTES}]}, openai.APIStatusError, "request_too_large", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_raises_the_librarys_own_error(
    client: openai.OpenAI,
    changes: dict[str, Any],
    kind: type[openai.APIStatusError],
    code: str | None,
    param: Any,
    stream: bool,
) -> None:
    """Class, code, param and request id tell the user what to change."""
    if stream and "stream_options" in changes:
        changes = {"stream_options": {"include_usage": "often"}}
        code, param = "invalid_type", "stream_options.include_usage"
    with pytest.raises(kind) as caught:
        ask(client, stream=stream, **changes)
    error = caught.value
    assert error.code == code
    assert param is ... or error.param == param
    assert error.request_id == error.response.headers["x-request-id"]
    assert error.message
    assert error.status_code == (413 if code == "request_too_large" else 404 if kind is openai.NotFoundError else 400)


def test_a_wrong_key_is_an_authentication_error(service: Service) -> None:
    """401 with the code that the library documents."""
    with (
        openai.OpenAI(base_url=service.router.v1, api_key="sk-wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        ask(client)
    assert (caught.value.code, caught.value.status_code) == ("invalid_api_key", 401)
    assert caught.value.request_id


def test_an_engine_at_its_limit_is_a_rate_limit_error(service: Service, client: openai.OpenAI) -> None:
    """429 with a time to wait that the library honours."""
    service.fail_next(429)
    with pytest.raises(openai.RateLimitError) as caught:
        ask(client, stream=True)
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    assert caught.value.request_id


def test_no_replica_is_an_internal_server_error(empty_router: RouterProcess) -> None:
    """503, whose class in the library is InternalServerError."""
    with (
        openai.OpenAI(base_url=empty_router.v1, api_key="none", max_retries=0) as client,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        ask(client)
    assert (caught.value.status_code, caught.value.code) == (503, "no_replica")
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60


@pytest.mark.parametrize("status", [429, 503])
def test_the_library_tries_again_by_itself(service: Service, status: int) -> None:
    """One refusal is not seen by the user, only counted."""
    service.fail_next(status)
    with openai.OpenAI(base_url=service.router.v1, api_key=KEY, max_retries=2) as client:
        raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, max_tokens=2)
    assert raw.retries_taken == 1
    assert raw.http_request.headers["x-stainless-retry-count"] == "1"


def test_a_timeout_is_raised_and_frees_the_engine(service: Service, client: openai.OpenAI) -> None:
    """A user who stops waiting leaves nothing running."""
    service.delay_next(30)
    with pytest.raises(openai.APITimeoutError):
        ask(client, timeout=0.2)
    service.await_idle()


@pytest.mark.parametrize("kind", ["reset", "truncate", "error_frame"])
def test_a_stream_that_breaks_raises(service: Service, client: openai.OpenAI, kind: str) -> None:
    """An answer that lost its end never looks whole. A tool call cannot be gone on with elsewhere."""
    service.break_next(kind, after_chunks=2)
    with pytest.raises((openai.APIError, httpx2.RemoteProtocolError)):
        list(ask(client, tools=TOOLS, max_tokens=100, stream=True))
