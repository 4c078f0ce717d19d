"""The Responses API of the simulated engine, as a client sees it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.sim import SimEngine, start_sim_engine
from tests.waiting import wait_until

BODY: dict[str, Any] = {"input": "Hello there", "temperature": 0}
FLAGS = ("--answer-tokens-mean", "12")
LONG = {**BODY, "ignore_eos": True, "max_output_tokens": 2000}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


@pytest.fixture(scope="module")
def engine() -> Iterator[SimEngine]:
    with start_sim_engine(*FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def storing() -> Iterator[SimEngine]:
    with start_sim_engine(*FLAGS, environ={"VLLM_ENABLE_RESPONSES_API_STORE": "1"}) as running:
        yield running


def ask(engine: SimEngine, **fields: Any) -> Any:
    answer = engine.client.post("/v1/responses", json={**BODY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(engine: SimEngine, **fields: Any) -> list[dict[str, Any]]:
    answer = engine.client.post("/v1/responses", json={**BODY, "stream": True, **fields})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events(answer.text)


def events(text: str) -> list[dict[str, Any]]:
    """The payloads, numbered without a gap; each event is named as its payload's type."""
    found = []
    for number, block in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        assert payload["sequence_number"] == number
        found.append(payload)
    return found


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def error_of(answer: httpx.Response) -> tuple[int, str, str | None, int]:
    error = answer.json()["error"]
    return answer.status_code, error["type"], error["param"], error["code"]


def test_a_response_is_given(engine: SimEngine) -> None:
    """One message with its text, what was asked repeated, and the usage."""
    response = ask(engine, metadata={"a": "b"}, instructions="Be brief.")
    assert response["id"].startswith("resp_")
    assert (response["object"], response["status"]) == ("response", "completed")
    assert len(text_of(response).split()) == response["usage"]["output_tokens"] - 1
    assert (response["metadata"], response["instructions"]) == ({"a": "b"}, "Be brief.")
    assert (response["tools"], response["tool_choice"], response["temperature"]) == ([], "none", 0)


def test_the_request_id_of_the_body_becomes_the_responses_id(engine: SimEngine) -> None:
    """Not the header, as in vLLM."""
    answer = engine.client.post("/v1/responses", json={**BODY, "request_id": "resp_mine"}, headers={"x-request-id": "other"})
    assert answer.json()["id"] == "resp_mine"
    assert stream(engine, request_id="resp_mine")[0]["response"]["id"] == "resp_mine"


def test_a_streamed_response_is_the_same(engine: SimEngine) -> None:
    """created and in_progress, the item with its part and deltas, all of it done, completed."""
    whole = ask(engine)
    found = stream(engine)
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event["delta"] for event in found[4:-4]) == found[-4]["text"] == text_of(whole)
    response = found[-1]["response"]
    assert text_of(response) == text_of(whole)
    assert response["output"] == [found[-2]["item"]]
    assert response["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert found[0]["response"]["status"] == "in_progress"


def test_a_response_begins_before_its_first_token(engine: SimEngine) -> None:
    """Its first two events come while the engine is paused."""
    assert engine.admin("POST", "/pause?mode=keep").status_code == 200
    try:
        with engine.client.stream("POST", "/v1/responses", json={**BODY, "stream": True}) as answer:
            received = ""
            for piece in answer.iter_text():
                received += piece
                if received.count("\n\n") == 2:
                    break
    finally:
        assert engine.admin("POST", "/resume").status_code == 200
    assert [event["type"] for event in events(received)] == ["response.created", "response.in_progress"]
    wait_until(lambda: engine.metric("vllm:num_requests_waiting") == 0, 5, "the request to end")


def test_a_limit_leaves_a_response_incomplete(engine: SimEngine) -> None:
    """The status and the reason say so; the event is `completed` all the same, as from vLLM."""
    response = ask(engine, max_output_tokens=3)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    last = stream(engine, max_output_tokens=3)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.completed", "incomplete")


def test_a_function_is_called_and_its_result_answered(engine: SimEngine) -> None:
    """A function_call item, whole and in deltas; a function_call_output is answered with a message."""
    response = ask(engine, tools=[TOOL])
    (call,) = response["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"]).keys()) == ("function_call", "weather", {"city"})
    found = stream(engine, tools=[TOOL])
    deltas = [event["delta"] for event in found if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call["arguments"] == found[-1]["response"]["output"][0]["arguments"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}, call, result]
    assert text_of(ask(engine, input=items, tools=[TOOL]))


def test_a_partial_message_of_the_input_goes_on(engine: SimEngine) -> None:
    """An assistant message that is not complete is continued, as in vLLM."""
    whole = text_of(ask(engine))
    part = {"type": "output_text", "text": whole[:11]}
    begun = {"type": "message", "role": "assistant", "status": "incomplete", "content": [part]}
    items = [{"role": "user", "content": BODY["input"]}, begun]
    assert text_of(ask(engine, input=items)) == whole[11:]


def test_structured_output_fits_its_schema(engine: SimEngine) -> None:
    """text.format with a JSON schema."""
    schema = {"type": "object", "properties": {"label": {"enum": ["spam", "ham"]}}, "required": ["label"]}
    response = ask(engine, text={"format": {"type": "json_schema", "name": "x", "schema": schema}})
    assert json.loads(text_of(response))["label"] in ("spam", "ham")


def test_log_probabilities_come_where_they_are_included(engine: SimEngine) -> None:
    """include names them; streamed they come with the deltas and, joined, with the part."""
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = ask(engine, **fields)["output"][0]["content"][0]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    found = stream(engine, **fields)
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert all(event["logprobs"][0]["token"] == event["delta"] for event in deltas)


def test_reasoning_is_an_item_of_its_own() -> None:
    """Before the message, whole and streamed, and counted in the usage."""
    with start_sim_engine(*FLAGS, "--reasoning-parser", "any") as engine:
        response = ask(engine)
        assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 3
        found = stream(engine)
        assert [event["item"]["type"] for event in found if event["type"] == "response.output_item.done"] == [
            "reasoning",
            "message",
        ]


async def test_the_openai_client_parses_both(engine: SimEngine) -> None:
    """openai-python takes a whole response and each event of a streamed one."""
    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="any", max_retries=0) as sdk:
        response = await sdk.responses.create(model="simulated", input="Hello there", temperature=0)
        text = ""
        async for event in await sdk.responses.create(model="simulated", input="Hello there", temperature=0, stream=True):
            text += event.delta if event.type == "response.output_text.delta" else ""
        assert response.output_text == text != ""
        assert event.type == "response.completed"


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"input": None}, "Bad Request", "body.input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "BadRequestError", "input"),
        ({"prompt": {"id": "x"}}, "BadRequestError", "prompt"),
        ({"background": True}, "invalid_request_error", "background"),
        ({"background": True, "store": False}, "BadRequestError", "background"),
        ({"tool_choice": "required"}, "BadRequestError", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "BadRequestError", "tool_choice"),
        ({"max_output_tokens": 200_000}, "BadRequestError", "max_output_tokens"),
        ({"max_output_tokens": "many"}, "Bad Request", "body.max_output_tokens"),
    ],
)
def test_a_bad_body_is_refused(engine: SimEngine, fields: dict[str, Any], kind: str, param: str) -> None:
    """Status 400 in the shape of vLLM's other routes."""
    answer = engine.client.post("/v1/responses", json={**BODY, **fields})
    assert error_of(answer) == (400, kind, param, 400)


def test_without_a_store_nothing_is_found(engine: SimEngine) -> None:
    """store: true is taken and ignored; get, cancel and previous_response_id are vLLM's 404."""
    response_id = ask(engine, store=True)["id"]
    answers = [
        engine.client.get(f"/v1/responses/{response_id}"),
        engine.client.post(f"/v1/responses/{response_id}/cancel"),
        engine.client.post("/v1/responses", json={**BODY, "previous_response_id": response_id}),
    ]
    for answer in answers:
        assert error_of(answer) == (404, "invalid_request_error", "response_id", 404)
        assert answer.json()["error"]["message"] == f"Response with id '{response_id}' not found."


@pytest.mark.parametrize("streams", [False, True])
def test_a_stored_response_is_found(storing: SimEngine, streams: bool) -> None:
    """By its id, as it was given, as soon as its client has it; it can be built on, but not be cancelled."""
    response = stream(storing)[-1]["response"] if streams else ask(storing)
    assert storing.client.get(f"/v1/responses/{response['id']}").json() == response
    again = ask(storing, previous_response_id=response["id"])
    assert again["usage"]["input_tokens"] > response["usage"]["input_tokens"] + response["usage"]["output_tokens"] - 2
    cancelled = storing.client.post(f"/v1/responses/{response['id']}/cancel")
    assert error_of(cancelled) == (400, "invalid_request_error", "response_id", 400)


def test_a_response_that_asks_not_to_be_stored_is_not(storing: SimEngine) -> None:
    """store: false."""
    response_id = ask(storing, store=False)["id"]
    assert storing.client.get(f"/v1/responses/{response_id}").status_code == 404


def test_a_background_response_is_queued_and_then_complete(storing: SimEngine) -> None:
    """The POST answers at once; GET has the result when it is there."""
    queued = ask(storing, background=True)
    assert (queued["status"], queued["output"], queued["usage"]) == ("queued", [], None)
    path = f"/v1/responses/{queued['id']}"
    wait_until(lambda: storing.client.get(path).json()["status"] == "completed", 10, "the response")
    assert text_of(storing.client.get(path).json()) == text_of(ask(storing))


def test_a_background_stream_can_be_followed_again(storing: SimEngine) -> None:
    """GET with stream and starting_after repeats the events behind that number."""
    found = stream(storing, background=True)
    path = f"/v1/responses/{found[0]['response']['id']}"
    again = storing.client.get(path, params={"stream": "true", "starting_after": 4}).text
    blocks = again.removesuffix("\n\n").split("\n\n")
    assert [json.loads(block.split("\ndata: ")[1]) for block in blocks] == found[5:]


def test_a_background_response_can_be_cancelled(storing: SimEngine) -> None:
    """Its work in the engine ends, and it stays cancelled."""
    response_id = ask(storing, **LONG, background=True)["id"]
    wait_until(lambda: storing.metric("vllm:num_requests_running") == 1, 10, "the work to run")
    cancelled = storing.client.post(f"/v1/responses/{response_id}/cancel")
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
    wait_until(lambda: storing.metric("vllm:num_requests_running") == 0, 1, "the work to end")
    assert storing.client.get(f"/v1/responses/{response_id}").json()["status"] == "cancelled"


def test_a_stream_that_fails_breaks(engine: SimEngine) -> None:
    """vLLM 0.32 has no event for it: the connection ends without the last chunk. Whole, it is a 500."""
    engine.add_faults({"kind": "error_frame", "after_chunks": 5, "times": 1})
    received: list[str] = []

    def read() -> None:
        with engine.client.stream("POST", "/v1/responses", json={**BODY, "stream": True}) as answer:
            received.extend(answer.iter_text())

    with pytest.raises(httpx.RemoteProtocolError):
        read()
    assert len(events("".join(received))) == 5
    engine.add_faults({"kind": "error_frame", "after_chunks": 2, "times": 1})
    assert error_of(engine.client.post("/v1/responses", json=BODY)) == (500, "InternalServerError", None, 500)
    engine.clear_faults()


def test_other_methods_are_refused(engine: SimEngine) -> None:
    """As FastAPI refuses them."""
    answers = [
        engine.client.get("/v1/responses"),
        engine.client.post("/v1/responses/x"),
        engine.client.get("/v1/responses/x/cancel"),
    ]
    assert [(answer.status_code, answer.headers["allow"]) for answer in answers] == [(405, "POST"), (405, "GET"), (405, "POST")]
