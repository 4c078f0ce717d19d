"""The simulated engine's serving routes, as a client sees them."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest

from server.sim_text import encode
from tests.sim import SimEngine, start_sim_engine
from tests.waiting import await_until, wait_until

MODEL = "intellect-3"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello there"}], "temperature": 0}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[SimEngine]:
    flags = ("--enable-prompt-tokens-details", "--max-model-len", "4096", "--timeout-keep-alive", "5")
    with start_sim_engine("--served-model-name", MODEL, "alias", *flags) as running:
        yield running


@pytest.fixture
async def client(engine: SimEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as client:
        yield client


@pytest.fixture
async def sdk(engine: SimEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="any", max_retries=0) as sdk:
        yield sdk


def events(text: str) -> list[Any]:
    """The JSON payloads of server-sent events, whose last must be [DONE]."""
    data = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert data[-1] == "[DONE]"
    assert data.count("[DONE]") == 1
    return [json.loads(payload) for payload in data[:-1]]


async def stream_chat(client: httpx.AsyncClient, **fields: Any) -> list[Any]:
    answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True, **fields})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events(answer.text)


async def chat(client: httpx.AsyncClient, **fields: Any) -> Any:
    answer = await client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_the_openai_client_gets_an_answer(sdk: openai.AsyncOpenAI) -> None:
    """openai-python parses a plain answer and its usage."""
    answer = await sdk.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello there"}], max_tokens=5, temperature=0
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content is not None
    assert len(answer.choices[0].message.content.split()) == 5
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


async def test_a_streamed_answer_is_the_same_text(client: httpx.AsyncClient) -> None:
    """Deltas joined give the unstreamed answer; one id, role first, the finish reason once, [DONE] last."""
    whole = (await chat(client, max_tokens=20))["choices"][0]["message"]["content"]
    chunks = await stream_chat(client, max_tokens=20)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]] == ["length"]


@pytest.mark.parametrize("wanted", [True, False])
async def test_usage_comes_in_a_last_chunk_of_its_own_where_it_is_asked_for(client: httpx.AsyncClient, wanted: bool) -> None:
    """stream_options.include_usage adds a chunk without choices; without it no chunk has usage."""
    options = {"stream_options": {"include_usage": True}} if wanted else {}
    chunks = await stream_chat(client, max_tokens=3, **options)
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert len(usages) == wanted
    if wanted:
        assert chunks[-1]["choices"] == []
        assert usages[0]["completion_tokens"] == 3


async def test_a_repeated_prompt_reports_its_cached_tokens(client: httpx.AsyncClient) -> None:
    """cached_tokens is 0, then the whole blocks of the prompt; created_cache_tokens the other way round."""
    body = {"messages": [{"role": "user", "content": "a prompt of its own " * 40}], "max_tokens": 1}
    details = [(await chat(client, **body))["usage"]["prompt_tokens_details"] for _ in range(2)]
    tokens = (await client.post("/tokenize", json=body)).json()["count"]
    blocks = (tokens - 1) // 16 * 16
    assert [item["cached_tokens"] for item in details] == [0, blocks]
    assert details[0]["created_cache_tokens"] >= blocks > 0
    assert details[1]["created_cache_tokens"] in (0, 16)


async def test_an_answer_can_be_continued_from_where_it_broke_off(client: httpx.AsyncClient) -> None:
    """continue_final_message with the first part of an answer gives exactly the rest."""
    whole = (await chat(client))["choices"][0]["message"]["content"]
    begun = " ".join(whole.split()[:7])
    messages = [*CHAT["messages"], {"role": "assistant", "content": begun}]
    rest = await chat(client, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert begun + rest["choices"][0]["message"]["content"] == whole
    assert rest["choices"][0]["finish_reason"] == "stop"


async def test_several_choices_come_interleaved_and_differ(client: httpx.AsyncClient) -> None:
    """n=3: three indices, each with its own text and finish reason."""
    chunks = await stream_chat(client, n=3, temperature=1, max_tokens=6)
    texts = dict.fromkeys(range(3), "")
    finished = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
        finished += [choice["index"]] if choice["finish_reason"] else []
    assert len(set(texts.values())) == 3
    assert sorted(finished) == [0, 1, 2]


async def test_log_probabilities_name_every_token(client: httpx.AsyncClient) -> None:
    """Chat logprobs have token, bytes and as many alternatives as asked for."""
    choice = (await chat(client, max_tokens=4, logprobs=True, top_logprobs=3))["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 3 and entry["bytes"] == list(entry["token"].encode()) for entry in content)


async def test_a_tool_is_called_streamed_and_not(sdk: openai.AsyncOpenAI) -> None:
    """The call has an id, the function's name and JSON arguments; streamed, the arguments come in pieces."""
    arguments: dict[str, Any] = {"model": MODEL, "messages": CHAT["messages"], "tools": [TOOL], "temperature": 0}
    plain = (await sdk.chat.completions.create(**arguments)).choices[0]
    assert plain.finish_reason == "tool_calls"
    (call,) = plain.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments).keys() == {"city"}
    pieces, names, reasons = "", [], []
    async for chunk in await sdk.chat.completions.create(**arguments, stream=True):
        reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert delta.function is not None
            names += [delta.function.name] if delta.function.name else []
            pieces += delta.function.arguments or ""
    assert (names, pieces, reasons) == (["weather"], call.function.arguments, ["tool_calls"])


async def test_a_response_format_gets_json_that_fits(client: httpx.AsyncClient) -> None:
    """json_object and json_schema answers parse."""
    schema = {"type": "object", "properties": {"label": {"enum": ["spam", "ham"]}}, "required": ["label"]}
    formats = [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}]
    values = [json.loads((await chat(client, response_format=each))["choices"][0]["message"]["content"]) for each in formats]
    assert isinstance(values[0], dict)
    assert values[1]["label"] in ("spam", "ham")


async def test_completions_answer_several_prompts(client: httpx.AsyncClient) -> None:
    """Prompts times n choices, in order, and echo repeats the prompt."""
    body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 3, "echo": True}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][:3] for choice in answer["choices"]] == ["one", "one", "two", "two"]
    assert answer["id"].startswith("cmpl-")
    assert answer["usage"]["completion_tokens"] == 12
    streamed = events((await client.post("/v1/completions", json={**body, "stream": True})).text)
    texts = [""] * 4
    for chunk in streamed:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [choice["text"] for choice in answer["choices"]]


async def test_the_request_id_becomes_the_answers_id(client: httpx.AsyncClient) -> None:
    """X-Request-Id names the answer, also twice at the same time."""
    headers = {"x-request-id": "same"}
    requests = (client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 9}, headers=headers) for _ in range(2))
    answers = await asyncio.gather(*requests)
    assert [answer.json()["id"] for answer in answers] == ["chatcmpl-same", "chatcmpl-same"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "status", "kind", "param"),
    [
        ({**CHAT, "model": "other"}, 404, "NotFoundError", "model"),
        ({**CHAT, "max_tokens": 5000}, 400, "BadRequestError", "max_tokens"),
        ({"messages": [{"role": "user", "content": "a " * 5000}]}, 400, "BadRequestError", "input_tokens"),
        ({}, 400, "Bad Request", "body.messages"),
    ],
)
async def test_refusals_have_vllms_shape(
    client: httpx.AsyncClient, body: dict[str, Any], stream: bool, status: int, kind: str, param: str
) -> None:
    """An HTTP status, streaming or not, with {"error": {message, type, param, code: int}}."""
    answer = await client.post("/v1/chat/completions", json={**body, "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"], error["code"]) == (status, kind, param, status)


@pytest.mark.parametrize(
    ("content", "media_type", "words"),
    [
        (b"{", "application/json", "JSON decode error"),
        (b"[]", "application/json", "valid dictionary"),
        (b"{}", "text/plain", "Unsupported Media Type"),
    ],
)
async def test_bodies_that_are_no_json_object_are_refused(
    client: httpx.AsyncClient, content: bytes, media_type: str, words: str
) -> None:
    """Status 400 with the reason."""
    answer = await client.post("/v1/chat/completions", content=content, headers={"content-type": media_type})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


async def test_unknown_paths_and_methods_are_fastapis(client: httpx.AsyncClient) -> None:
    """{"detail": ...} as vLLM's framework gives them; unknown paths outside the guard's list need the token first."""
    wrong_method = await client.get("/v1/chat/completions")
    assert (wrong_method.status_code, wrong_method.json()) == (405, {"detail": "Method Not Allowed"})
    assert wrong_method.headers["allow"] == "POST"
    token = {"x-intellect-engine-token": "test-engine-token"}
    unknown = await client.get("/v1/models/x", headers=token)
    assert (unknown.status_code, unknown.json()) == (404, {"detail": "Not Found"})
    assert (await client.get("/v1/models/x")).status_code == 403


async def test_models_versions_and_health(client: httpx.AsyncClient) -> None:
    """The small routes that routers and probes read."""
    models = (await client.get("/v1/models")).json()
    assert [(card["id"], card["max_model_len"]) for card in models["data"]] == [(MODEL, 4096), ("alias", 4096)]
    assert (await client.get("/version")).json() == {"version": "0.32.0"}
    assert [(await client.get(path)).status_code for path in ("/health", "/ping")] == [200, 200]
    assert (await client.get("/load")).json() == {"server_load": 0}


async def test_tokenize_and_detokenize_are_inverse(client: httpx.AsyncClient) -> None:
    """Text and chat bodies are tokenized as they would be for an answer."""
    text = "Grüße, world"
    tokens = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert tokens["tokens"] == encode(text)
    assert tokens["count"] == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 4096
    assert (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json() == {"prompt": text}
    count = (await client.post("/tokenize", json=CHAT)).json()["count"]
    assert count == (await chat(client, max_tokens=1))["usage"]["prompt_tokens"]


async def test_metrics_count_what_happened(engine: SimEngine, client: httpx.AsyncClient) -> None:
    """Counters move by exactly one request's worth, under vLLM's names and labels."""
    labels = {"model_name": MODEL, "engine": "0"}
    names = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "iteration_tokens_total_count")
    before = [engine.metric(f"vllm:{name}", **labels) for name in names]
    finished = engine.metric("vllm:request_success_total", finished_reason="length", **labels)
    usage = (await chat(client, max_tokens=7))["usage"]
    after = [engine.metric(f"vllm:{name}", **labels) for name in names]
    prompt = usage["prompt_tokens"]
    assert [new - old for new, old in zip(after, before, strict=True)] == [prompt, 7, prompt, 7]
    assert engine.metric("vllm:request_success_total", finished_reason="length", **labels) == finished + 1
    assert engine.metric("vllm:cache_config_info", block_size="16", num_gpu_blocks="16384") == 1
    assert engine.client.get("/metrics").headers["content-type"].startswith("text/plain; version=")


async def test_the_running_count_falls_as_soon_as_a_client_leaves(engine: SimEngine, client: httpx.AsyncClient) -> None:
    """A closed connection, mid-stream or before the first byte, ends the engine's work within a second."""
    for stream in (True, False):
        body = {**CHAT, "stream": stream, "max_tokens": 4000, "ignore_eos": True}
        request = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await await_until(lambda: engine.metric("vllm:num_requests_running") == 1, 5, "the request to run")
        request.cancel()
        await await_until(lambda: engine.metric("vllm:num_requests_running") == 0, 1, "the running count to fall")
    assert engine.metric("vllm:kv_cache_usage_perc") == 0


def test_an_api_key_guards_the_openai_routes_only() -> None:
    """--api-key: 401 with vLLM's bare string under /v1, nothing elsewhere; request ids are echoed where that is on."""
    with start_sim_engine("--api-key", "secret", "--enable-request-id-headers") as engine:
        refused = engine.client.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
        assert engine.client.get("/health").status_code == 200
        headers = {"authorization": "Bearer secret", "x-request-id": "abc"}
        taken = engine.client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1}, headers=headers)
        assert (taken.status_code, taken.headers["x-request-id"]) == (200, "abc")


def test_a_reasoning_parser_splits_the_answer() -> None:
    """--reasoning-parser: reasoning apart from content, counted in usage, and off where the request says so."""
    with start_sim_engine("--reasoning-parser", "deepseek_r1", "--answer-tokens-mean", "20") as engine:
        answer = engine.client.post("/v1/chat/completions", json=CHAT).json()
        message = answer["choices"][0]["message"]
        assert message["reasoning"]
        assert message["content"]
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
        off = {**CHAT, "chat_template_kwargs": {"enable_thinking": False}}
        assert engine.client.post("/v1/chat/completions", json=off).json()["choices"][0]["message"]["reasoning"] is None


def test_time_passes_as_the_model_says() -> None:
    """20 tokens at 50 ms a step take about a second, and half of it with half the time scale."""
    flags = ("--step-seconds", "0.05", "--decode-seconds-per-sequence", "0")
    for scale in (1.0, 0.5):
        with start_sim_engine("--time-scale", str(scale), *flags) as engine:
            answer = engine.client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 20})
            assert 0.95 * scale <= answer.elapsed.total_seconds() <= 2 * scale


def test_more_sequences_than_slots_wait_their_turn() -> None:
    """--max-num-seqs bounds the batch; the rest is counted as waiting and served later."""

    async def crowd(engine: SimEngine) -> list[int]:
        async with httpx.AsyncClient(base_url=engine.url, timeout=30) as client:
            body = {**CHAT, "max_tokens": 60, "ignore_eos": True}
            tasks = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(5)]
            await await_until(lambda: engine.metric("vllm:num_requests_waiting") == 3, 5, "three to wait")
            assert engine.metric("vllm:num_requests_running") == 2
            return [(await task).status_code for task in tasks]

    with start_sim_engine("--max-num-seqs", "2", "--step-seconds", "0.05") as engine:
        assert asyncio.run(crowd(engine)) == [200] * 5
        wait_until(lambda: engine.metric("vllm:num_requests_running") == 0, 5, "the engine to be idle")
