"""Entries 7-12 and 30 of the corpus of known router bugs: what a client sees when an engine fails in its answer."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.conformance import raw, strict
from tests.conformance.replies import CHAT, COMPLETIONS, PLAIN
from tests.conformance.service import JSON_HEADERS, MODEL, Service, scripted_behind
from tests.conformance.streams import ASKED, BREAKAGES, DONE, broken_stream, check_error_event, chunk, read_chat_of_scripted
from tests.router.process import RouterProcess, start_router
from tests.scripted_engine import LAST_CHUNK, SSE_HEAD, ScriptedEngine, ScriptedRequest, chunked, json_answer

# A seed makes it a request that no other replica may go on with.
UNSAFE: dict[str, Any] = {**PLAIN, "stream": True, "seed": 5}
SAFE: dict[str, Any] = {**{key: value for key, value in PLAIN.items() if key != "seed"}, "stream": True}


@pytest.fixture(scope="module")
def turn_taking_router(_service: Service) -> Iterator[RouterProcess]:
    """Asks the engines of MODEL in turn, so that every second request meets the broken one."""
    with start_router([engine.url for engine in _service.engines], "--policy", "round_robin") as router:
        yield router


@pytest.mark.parametrize("fault", BREAKAGES.values(), ids=BREAKAGES.keys())
def test_b07_b08_an_answer_that_cannot_go_on_ends_in_an_error_and_is_not_asked_again(
    service: Service, fault: dict[str, Any]
) -> None:
    """No truncated answer looks complete, and no text comes twice: there was one attempt."""
    service.fault_everywhere(**fault)
    request_id = f"broken-{fault['kind']}"
    with raw.Wire(service.router.url) as wire:
        body = json.dumps(UNSAFE).encode()
        wire.send(raw.request("POST", CHAT, {**JSON_HEADERS, "x-request-id": request_id}, body))
        assert b"0\r\n\r\n" not in wire.read_to_end()
    record = service.logged(request_id)
    outcome = "engine_error" if fault["kind"] == "error_frame" else "upstream_broken"
    assert (record["outcome"], record["attempts"]) == (outcome, 1)
    payloads, error = check_error_event(broken_stream(service.router.url, UNSAFE))
    assert len(payloads) == 5
    assert error["type"] == "server_error"


@pytest.mark.parametrize("fault", BREAKAGES.values(), ids=BREAKAGES.keys())
def test_b08_openais_client_raises_on_a_broken_stream(service: Service, client: openai.OpenAI, fault: dict[str, Any]) -> None:
    """It takes a clean end without [DONE] for a whole answer, so there must be none."""
    service.fault_everywhere(**fault)
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True, seed=5, temperature=0
    )
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        list(stream)


@pytest.mark.parametrize("fault", BREAKAGES.values(), ids=BREAKAGES.keys())
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_b07_an_answer_that_can_go_on_does_so_without_saying_anything_twice(
    service: Service, turn_taking_router: RouterProcess, fault: dict[str, Any], route: str
) -> None:
    """One of two replicas breaks an answer off; its client still gets the whole text, once, under one id, the seam marked."""
    options = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 30,
        "ignore_eos": True,
    }
    asked = {**SAFE, **options} if route == CHAT else {"model": MODEL, "prompt": "Once", **options}
    with httpx.Client(base_url=turn_taking_router.url, timeout=30) as http:
        wanted = _read(http.post(route, json=asked).content)
        service.has_faults = True
        service.engines[0].add_faults({**fault, "times": 1})
        replies = [_read(http.post(route, json=asked).content) for _ in range(5)]
    for reply in replies:
        assert (reply["text"], reply["finish_reasons"], reply["usage"]) == (wanted["text"], ["length"], wanted["usage"])
        assert len(reply["ids"]) == 1
        assert len(reply["roles"]) == (1 if route == CHAT else 0)
    assert [seam for reply in replies for seam in reply["seams"]] == [1]


def _read(data: bytes) -> dict[str, Any]:
    chunks = [strict.load(payload) for payload in strict.read_chunks(data)]
    for part in chunks:
        strict.check(ChatCompletionChunk if "chunk" in part["object"] else strict.CompletionChunk, json.dumps(part).encode())
    choices = [part["choices"][0] for part in chunks if part["choices"]]
    usage = chunks[-1]["usage"]
    return {
        "text": "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices),
        "finish_reasons": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]),
        "ids": {(part["id"], part["created"]) for part in chunks},
        "roles": [choice for choice in choices if choice.get("delta", {}).get("role")],
        "seams": [part["intellect"]["continuations"] for part in chunks if "intellect" in part],
    }


async def test_b09_a_finished_stream_that_lacks_only_its_done_gets_one(
    scripted: ScriptedEngine, scripted_http: httpx.AsyncClient
) -> None:
    """Node's client waits for [DONE]; the finish reason and the clean end say that the answer is whole."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunked(chunk({"role": "assistant", "content": "a"}), chunk({}, "stop")) + LAST_CHUNK)

    scripted.script = script
    response = await scripted_http.post(CHAT, json=ASKED)
    assert read_chat_of_scripted(response).only.text == "a"


@pytest.mark.parametrize("finish_reason", ["stop", None])
async def test_b09_a_stream_that_ends_otherwise_without_done_is_not_whole(
    scripted: ScriptedEngine, scripted_router: RouterProcess, finish_reason: str | None
) -> None:
    """Whether the connection broke off behind the finish reason, or the engine ended cleanly without one."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunked(chunk({"role": "assistant", "content": "a"}), chunk({}, finish_reason)))
        if finish_reason is None:
            writer.write(LAST_CHUNK)
        else:
            await writer.drain()
            writer.close()

    scripted.script = script
    payloads, error = check_error_event(await asyncio.to_thread(broken_stream, scripted_router.url, ASKED))
    assert (len(payloads), error["type"]) == (2, "server_error")


HALVES = [
    b"data: {",
    b"data: " + b'{"choices":[{"index":0,"delta":{"content":"half"',
    b": com",
    b"data: [DON",
    b"dat",
    b"data: [DONE]",
]


async def test_b08_half_an_event_of_a_dying_engine_reaches_nobody(
    scripted: ScriptedEngine, scripted_router: RouterProcess
) -> None:
    """Clients parse each event as JSON; a half one would be their crash instead of our error."""
    halves = iter(HALVES)

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunked(chunk({"role": "assistant", "content": ""}), next(halves)))
        await writer.drain()
        writer.close()

    scripted.script = script
    for _ in HALVES:
        payloads, _error = check_error_event(await asyncio.to_thread(broken_stream, scripted_router.url, ASKED))
        assert len(payloads) == 1


async def test_b30_an_engines_own_error_inside_a_tool_call_is_passed_on(
    scripted: ScriptedEngine, scripted_router: RouterProcess
) -> None:
    """vLLM writes [DONE] behind it; the client gets the error in OpenAI's shape and no [DONE]."""
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a'}}
    failure = b'data: {"error":{"message":"list index out of range","type":"InternalServerError","param":null,"code":500}}\n\n'

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        events = (chunk({"role": "assistant", "content": ""}), chunk({"tool_calls": [call]}), failure, DONE)
        writer.write(SSE_HEAD + chunked(*events) + LAST_CHUNK)

    scripted.script = script
    payloads, error = check_error_event(await asyncio.to_thread(broken_stream, scripted_router.url, ASKED))
    assert (len(payloads), error["type"], error["code"]) == (2, "server_error", None)
    assert "list index out of range" in str(error["message"])


async def test_b12_retries_of_clients_and_router_do_not_multiply(
    scripted: ScriptedEngine, scripted_http: httpx.AsyncClient, scripted_router: RouterProcess
) -> None:
    """An engine that is always full is asked about as often as clients ask, not three times as often."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({"error": {"message": "full"}}, "503 X"))

    scripted.script = script
    async with scripted_behind(scripted_router) as other:
        other.script = script
        asked = 60
        for number in range(asked):
            headers = {"x-stainless-retry-count": str(number % 3)}
            response = await scripted_http.post(CHAT, json={"model": "scripted", "messages": []}, headers=headers)
            assert response.status_code == 503
        # The floor of the budget and a fifth of what succeeded lately, which is little.
        assert len(scripted.requests) + len(other.requests) <= asked * 1.2 + 12
