"""The Responses API: passed through, with its events as OpenAI's package models them, and stored responses found again."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from pydantic import BaseModel

from tests.conformance import strict
from tests.conformance.replies import RESPONSES, check_failure
from tests.conformance.service import ENGINE_FLAGS, MODEL, Service, scripted_behind
from tests.conformance.streams import BREAKAGES, broken_stream
from tests.router.process import RouterProcess, start_router
from tests.scripted_engine import json_answer
from tests.sim import await_sim_engine, launch_sim_engine

PLAIN: dict[str, Any] = {"model": MODEL, "input": "What is a router?", "temperature": 0, "max_output_tokens": 200}
# vLLM's own fields of a response and of its usage.
EXTRAS: dict[type[BaseModel], frozenset[str]] = {
    Response: frozenset(
        {
            *("input_messages", "output_messages", "kv_transfer_params", "ec_transfer_params", "metrics"),
            *("presence_penalty", "frequency_penalty"),
        }
    ),
    InputTokensDetails: frozenset({"input_tokens_per_turn", "cached_tokens_per_turn"}),
    OutputTokensDetails: frozenset({"output_tokens_per_turn", "tool_output_tokens", "tool_output_tokens_per_turn"}),
}


def events_of(data: bytes) -> list[Any]:
    """The events of a stream, each checked; numbered through from 0."""
    found = strict.read_events(data).events
    if found[-1].data == b"[DONE]":
        found = found[:-1]
    assert all(event.name == strict.load(event.data)["type"] for event in found)
    events = [strict.check_union(ResponseStreamEvent, event.data, extras=EXTRAS) for event in found]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def test_a_response_is_answered_in_openais_shape(http: httpx.Client) -> None:
    """Its id begins as OpenAI's do, and its text is what the model said."""
    answer = http.post(RESPONSES, json=PLAIN)
    assert answer.status_code == 200, answer.text
    response = strict.check(Response, answer.content, extras=EXTRAS)
    assert (response.object, response.model, response.status) == ("response", MODEL, "completed")
    assert response.id.startswith("resp_")
    assert response.output_text
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_a_streamed_response_says_what_the_whole_one_says(http: httpx.Client) -> None:
    """Its events are named, numbered and in order, and the last one holds the whole response."""
    whole = strict.check(Response, http.post(RESPONSES, json=PLAIN).content, extras=EXTRAS)
    answer = http.post(RESPONSES, json={**PLAIN, "stream": True})
    assert answer.status_code == 200, answer.text
    events = events_of(answer.content)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1


def test_two_responses_have_two_ids(http: httpx.Client) -> None:
    """Also when the client repeats its request id."""
    ids = {http.post(RESPONSES, json=PLAIN, headers={"x-request-id": "same"}).json()["id"] for _ in range(2)}
    assert len(ids) == 2


def test_openais_client_reads_a_response(client: openai.OpenAI) -> None:
    """Whole and streamed."""
    assert client.responses.create(model=MODEL, input="hi").output_text
    with client.responses.stream(model=MODEL, input="hi") as stream:
        assert stream.get_final_response().output_text


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_e10_e11_an_engines_refusal_keeps_its_status(service: Service, http: httpx.Client, stream: bool, status: int) -> None:
    """An error of OpenAI's shape, for streams too."""
    service.fault_everywhere(kind="status", status=status)
    check_failure(http.post(RESPONSES, json={**PLAIN, "stream": stream}), status)


@pytest.mark.parametrize("fault", BREAKAGES.values(), ids=BREAKAGES.keys())
def test_b08_a_broken_response_stream_ends_in_an_error_event(service: Service, fault: dict[str, Any]) -> None:
    """`event: error`, the next sequence number, no completed response, and a broken connection."""
    service.fault_everywhere(**fault)
    events = strict.read_events(broken_stream(service.router.url, {**PLAIN, "stream": True}, RESPONSES)).events
    assert "response.completed" not in [event.name for event in events]
    assert events[-1].name == "error"
    error = strict.check_union(ResponseStreamEvent, events[-1].data, extras=EXTRAS)
    assert (error.type, error.sequence_number) == ("error", len(events) - 1)
    assert error.message


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"{RESPONSES}/resp_0123456789abcdef0123456789abcdef"),
        ("POST", f"{RESPONSES}/resp_0123456789abcdef0123456789abcdef/cancel"),
        ("GET", f"{RESPONSES}/chatcmpl-1"),
        ("GET", f"{RESPONSES}/%20"),
    ],
)
def test_b24_a_response_that_nobody_keeps_is_a_clean_404(http: httpx.Client, method: str, path: str) -> None:
    """Never another replica's guess."""
    error = check_failure(http.request(method, path), 404)
    assert error["type"] == "invalid_request_error"


def test_b24_a_response_that_was_not_stored_is_a_clean_404(http: httpx.Client) -> None:
    """These engines keep nothing, so its id leads nowhere."""
    answer = http.post(RESPONSES, json=PLAIN).json()
    check_failure(http.get(f"{RESPONSES}/{answer['id']}"), 404)
    check_failure(http.post(f"{RESPONSES}/{answer['id']}/cancel"), 404)


@pytest.fixture(scope="module")
def keeping_router() -> Iterator[RouterProcess]:
    """Two engines that store responses."""
    engines = [
        launch_sim_engine(*ENGINE_FLAGS, "--served-model-name", MODEL, environ={"VLLM_ENABLE_RESPONSES_API_STORE": "1"})
        for _ in range(2)
    ]
    try:
        for engine in engines:
            await_sim_engine(engine)
        with start_router([engine.url for engine in engines]) as router:
            yield router
    finally:
        for engine in engines:
            engine.stop()


def test_b24_a_stored_response_is_found_on_the_replica_that_keeps_it(keeping_router: RouterProcess) -> None:
    """Each of many, every time, whichever replica answered; also one that ran in the background."""
    with httpx.Client(base_url=keeping_router.url, timeout=30) as http:
        ids = [http.post(RESPONSES, json={**PLAIN, "background": number % 2 == 1}).json()["id"] for number in range(8)]
        assert len(set(ids)) == 8
        for stored in ids * 2:
            answer = http.get(f"{RESPONSES}/{stored}")
            assert answer.status_code == 200, answer.text
            assert strict.check(Response, answer.content, extras=EXTRAS).id == stored


def test_b24_a_background_response_can_be_cancelled(keeping_router: RouterProcess) -> None:
    """On the replica that runs it; its status says so afterwards."""
    with httpx.Client(base_url=keeping_router.url, timeout=30) as http:
        asked = {**PLAIN, "background": True, "max_output_tokens": 100_000, "ignore_eos": True}
        stored = http.post(RESPONSES, json=asked).json()["id"]
        cancelled = http.post(f"{RESPONSES}/{stored}/cancel")
        assert cancelled.status_code == 200, cancelled.text
        assert strict.check(Response, cancelled.content, extras=EXTRAS).status == "cancelled"
        assert http.get(f"{RESPONSES}/{stored}").json()["status"] == "cancelled"


async def test_the_answers_id_is_chosen_by_the_router(scripted_router: RouterProcess) -> None:
    """One field is added to the body, so that the id says which replica keeps the response."""
    async with scripted_behind(scripted_router) as engine, httpx.AsyncClient(base_url=scripted_router.url) as http:

        async def script(request: Any, writer: Any) -> None:
            writer.write(json_answer({"id": json.loads(request.body)["request_id"], "object": "response"}))

        engine.script = script
        body = {"model": "scripted", "input": [{"role": "user", "content": "\u00e4"}]}
        answer = await http.post(RESPONSES, json=body)
        assert answer.status_code == 200, answer.text
        sent = json.loads(engine.requests[0].body)
        assert sent == {**body, "request_id": answer.json()["id"]}
        assert sent["request_id"].startswith("resp_")
