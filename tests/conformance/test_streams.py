"""Entries 28-34 and 50 of the corpus of known router bugs: what a router does to streams and bodies on their way."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import httpx
import openai
import pytest

from tests.conformance import strict
from tests.conformance.replies import CHAT, PLAIN, ask_chat
from tests.conformance.service import logged, scripted_behind
from tests.conformance.streams import ASKED, DONE, broken_stream, check_error_event, chunk, read_chat_of_scripted, usage_chunk
from tests.router.process import RouterProcess, start_router
from tests.scripted_engine import LAST_CHUNK, SSE_HEAD, ScriptedEngine, ScriptedRequest, chunked, json_answer

TOOL_HEAD = {"id": "chatcmpl-tool-1", "type": "function", "index": 0, "function": {"name": "get_weather", "arguments": ""}}
PARALLEL = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"tool_calls": [TOOL_HEAD]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "K\u00f6'}}]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": 'ln"}'}}]}),
    chunk({"tool_calls": [{**TOOL_HEAD, "id": "chatcmpl-tool-2", "index": 1}]}),
    chunk({"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]}),
    chunk({}, "tool_calls"),
    usage_chunk(),
    DONE,
]
RECORDED = {
    "c14_parallel_tool_calls": PARALLEL,
    "b31_emoji": [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "\U0001f469\u200d\U0001f680 \u4f60"}),
        chunk({}, "stop"),
        DONE,
    ],
    "comments": [b": keep-alive\n\n", chunk({"role": "assistant", "content": ""}), b": x\n\n", chunk({}, "stop"), DONE],
    "reasoning": [
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning": "hm"}),
        chunk({"content": "a"}, "stop"),
        DONE,
    ],
}
CUTS = {"an event at a time": None, "a byte at a time": 1, "seven bytes at a time": 7, "all at once": 1 << 20}


@pytest.mark.parametrize("size", CUTS.values(), ids=CUTS.keys())
async def test_b28_b31_c14_a_recorded_stream_passes_byte_for_byte(
    scripted: ScriptedEngine, scripted_http: httpx.AsyncClient, size: int | None
) -> None:
    """Ids, names and indices of tool calls, emoji, comments: nothing is lost, repeated, renumbered or written anew."""
    streams = iter(RECORDED.values())

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        events = next(streams)
        whole = b"".join(events)
        writer.write(SSE_HEAD)
        for part in events if size is None else [whole[at : at + size] for at in range(0, len(whole), size)]:
            writer.write(chunked(part))
            await writer.drain()
        writer.write(LAST_CHUNK)

    scripted.script = script
    for name, events in RECORDED.items():
        response = await scripted_http.post(CHAT, json=ASKED)
        assert response.content == b"".join(events), name
        reply = read_chat_of_scripted(response)
        if name == "c14_parallel_tool_calls":
            calls = reply.only.tool_calls
            assert [(call.id, call.arguments) for call in calls] == [
                ("chatcmpl-tool-1", '{"city": "K\u00f6ln"}'),
                ("chatcmpl-tool-2", "{}"),
            ]


async def test_each_event_arrives_while_the_engine_waits(scripted: ScriptedEngine, scripted_http: httpx.AsyncClient) -> None:
    """Nothing is held back for the next one: the engine writes each event only after the client has the one before."""
    wanted = asyncio.Semaphore(0)
    events = [chunk({"role": "assistant", "content": ""}), chunk({"content": "a"}), chunk({"content": "b"}, "stop"), DONE]

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        for event in events:
            writer.write(chunked(event))
            await wanted.acquire()
        writer.write(LAST_CHUNK)

    scripted.script = script
    async with scripted_http.stream("POST", CHAT, json=ASKED) as response:
        parts = response.aiter_raw()
        for event in events:
            assert await anext(parts) == event
            wanted.release()


async def test_b34_numbers_that_json_does_not_have_do_not_come_from_the_router(http: httpx.Client) -> None:
    """Log probabilities are strict JSON. vLLM clamps what would be minus infinity to -9999."""
    for stream in (False, True):
        assert ask_chat(http, {**PLAIN, "logprobs": True, "top_logprobs": 5}, stream=stream).only.logprobs


@pytest.fixture(scope="module")
def patient_router() -> Iterator[RouterProcess]:
    """Says every 0.2 s that a stream still lives, and calls the model by a longer name."""
    with start_router((), "--keep-alive", "0.2", "--served-model-name", "public/name-of-the-model") as router:
        yield router


@pytest.fixture
async def patient(patient_router: RouterProcess) -> AsyncIterator[ScriptedEngine]:
    async with scripted_behind(patient_router) as engine:
        yield engine


NAMED = {**ASKED, "model": "public/name-of-the-model"}


@pytest.mark.parametrize("silent_at", ["the beginning", "the middle"])
async def test_b50_a_silent_engines_stream_is_kept_alive(
    patient: ScriptedEngine, patient_router: RouterProcess, silent_at: str
) -> None:
    """Comments, which every client skips, come while the request waits; the answer behind them is whole."""
    events = [chunk({"role": "assistant", "content": "a"}), chunk({}, "stop"), DONE]

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        if silent_at == "the beginning":
            await asyncio.sleep(0.9)  # the silence is what is tested
        writer.write(SSE_HEAD + chunked(events[0]))
        await writer.drain()
        if silent_at == "the middle":
            await asyncio.sleep(0.9)
        writer.write(chunked(*events[1:]) + LAST_CHUNK)

    patient.script = script
    async with httpx.AsyncClient(base_url=patient_router.url, timeout=10) as http:
        response = await http.post(CHAT, json=NAMED)
    got = strict.read_events(response.content)
    assert response.status_code == 200
    assert 2 <= len(got.comments) <= 6
    assert set(got.comments) == {b": keep-alive"}
    assert [event.data for event in got.events][-1] == b"[DONE]"
    async with openai.AsyncOpenAI(base_url=patient_router.v1, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model="public/name-of-the-model", messages=[], stream=True)
        assert [part.choices[0].delta.content async for part in stream] == ["a", None]


async def test_b50_a_failure_behind_a_keep_alive_is_an_error_event(
    patient: ScriptedEngine, patient_router: RouterProcess
) -> None:
    """The status has been sent by then, so the error comes in the stream, and the connection breaks."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.5)  # longer than the keep-alive
        writer.write(json_answer({"error": {"message": "no such luck"}}, "400 X"))

    patient.script = script
    data = await asyncio.to_thread(broken_stream, patient_router.url, NAMED)
    payloads, error = check_error_event(data)
    assert payloads == []
    assert b": keep-alive\n\n" in data
    assert (error["message"], error["type"]) == ("no such luck", "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
async def test_b33_a_renamed_models_body_has_its_right_length(
    patient: ScriptedEngine, patient_router: RouterProcess, stream: bool
) -> None:
    """The engine gets its own name for the model in an otherwise equal body; the client reads the name it asked for."""

    async def script(request: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        if stream:
            part = chunk({"role": "assistant", "content": "a"}, "stop").replace(b'": ', b'":')  # engines write no spaces
            writer.write(SSE_HEAD + chunked(part, DONE) + LAST_CHUNK)
        else:
            body = b'{"id":"x","model":"scripted","choices":[]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    patient.script = script
    body = {**NAMED, "stream": True, "user": "\u00e4"} if stream else {"model": NAMED["model"], "user": "\u00e4", "seed": 1}
    async with httpx.AsyncClient(base_url=patient_router.url) as http:
        response = await http.post(
            CHAT, content=json.dumps(body, ensure_ascii=False).encode(), headers={"x-request-id": f"n-{stream}"}
        )
    assert response.status_code == 200
    assert b'"model":"public/name-of-the-model"' in response.content
    assert b"scripted" not in response.content
    if not stream:
        assert int(response.headers["content-length"]) == len(response.content)
    (request,) = patient.requests
    assert json.loads(request.body) == {**body, "model": "scripted"}
    assert int(request.headers["content-length"]) == len(request.body)
    assert (await asyncio.to_thread(logged, patient_router, f"n-{stream}"))["model"] == NAMED["model"]
