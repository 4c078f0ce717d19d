"""The simulated engine's development routes: pausing, swapping weights, resetting caches."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.sim_model import write_sim_model
from server.sim_text import STALE_KV_MARKER
from tests.server.test_sim_weights import write_tensors
from tests.sim import SimEngine, start_sim_engine
from tests.waiting import await_until

LONG_PROMPT = "a long prompt that fills several blocks " * 20


def body(prompt: str = LONG_PROMPT, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 20, **fields}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folders `a` and `b` of one layout, and ones that cannot replace them."""
    root = tmp_path_factory.mktemp("models")
    write_sim_model(root / "a", seed=1)
    write_sim_model(root / "b", seed=2)
    (root / "empty").mkdir()
    write_tensors(root / "other-layout", x=[2])
    return root


def start(models: Path) -> SimEngine:
    flags = ("--enable-prompt-tokens-details", "--weights-load-seconds", "0", "--max-num-seqs", "32")
    return start_sim_engine("--model", str(models / "a"), *flags)


@pytest.fixture
def engine(models: Path) -> Iterator[SimEngine]:
    with start(models) as running:
        yield running


@pytest.fixture(scope="module")
def shared_engine(models: Path) -> Iterator[SimEngine]:
    """For tests that leave the engine as it was."""
    with start(models) as running:
        yield running


@pytest.fixture
async def client(engine: SimEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as client:
        yield client


def say(engine: SimEngine, **fields: Any) -> str:
    answer = engine.client.post("/v1/chat/completions", json=body(**fields))
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def call(engine: SimEngine, method: str, path: str, **kwargs: Any) -> Any:
    answer = engine.admin(method, path, **kwargs)
    assert answer.status_code == 200, answer.text
    return answer.json()


def reload(engine: SimEngine, folder: Path) -> httpx.Response:
    arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    return engine.admin("POST", "/collective_rpc", json=arguments)


def test_a_swap_changes_the_answer_and_back(engine: SimEngine, models: Path) -> None:
    """pause, reload, resume: other weights answer otherwise, the first weights as before, and no answer is stale."""
    texts = [say(engine)]
    for folder in ("b", "a"):
        assert call(engine, "POST", "/pause?mode=keep") == {"status": "paused"}
        assert reload(engine, models / folder).json() == {"results": [None]}
        assert call(engine, "POST", "/reset_prefix_cache") == {"success": True}
        label = {"new_version": f"{folder}+1"}
        assert call(engine, "POST", "/update_weight_version", json=label) == {"success": True, **label}
        assert call(engine, "POST", "/resume") == {"status": "resumed"}
        texts.append(say(engine))
    assert texts[0] == texts[2] != texts[1]
    assert not any(STALE_KV_MARKER in text for text in texts)
    assert call(engine, "GET", "/weight_info") == {"weight_version": "a+1"}
    answer = engine.client.post("/v1/chat/completions", json=body())
    assert answer.headers["x-intellect-checkpoint"] == "a+1"


@pytest.mark.parametrize("method", ["reload_weights", "load_checkpoint"])
def test_both_loading_methods_load(engine: SimEngine, models: Path, method: str) -> None:
    """vLLM's own method and that of our worker extension do the same here."""
    before = say(engine)
    arguments = {"method": method, "kwargs": {"weights_path": str(models / "b")}}
    assert call(engine, "POST", "/collective_rpc", json=arguments) == {"results": [None]}
    call(engine, "POST", "/reset_prefix_cache")
    assert say(engine) != before


def test_a_swap_without_a_cache_reset_shows_in_the_answer(engine: SimEngine, models: Path) -> None:
    """The marker proves that blocks of the old weights were read; with clear_cache they are not."""
    say(engine)
    call(engine, "POST", "/pause?mode=keep&clear_cache=false")
    reload(engine, models / "b")
    call(engine, "POST", "/resume")
    assert say(engine).startswith(STALE_KV_MARKER)
    call(engine, "POST", "/pause?mode=keep&clear_cache=true")
    call(engine, "POST", "/resume")
    assert STALE_KV_MARKER not in say(engine)


async def test_kept_streams_freeze_and_go_on(engine: SimEngine, client: httpx.AsyncClient, models: Path) -> None:
    """16 streams through a swap: none fails, none is cut, each keeps what it had said; a new request waits for resume."""
    alone = say(engine, max_tokens=300, ignore_eos=True)
    requests = [body(max_tokens=300, ignore_eos=True, stream=True) for _ in range(16)]
    streams = [asyncio.create_task(client.post("/v1/chat/completions", json=request)) for request in requests]
    await await_until(lambda: engine.metric("vllm:num_requests_running") == 16, 10, "16 running streams")
    tokens = engine.metric("vllm:generation_tokens_total")
    await await_until(lambda: engine.metric("vllm:generation_tokens_total") > tokens + 160, 10, "some tokens of each")
    call(engine, "POST", "/pause?mode=keep&clear_cache=false")
    steps = engine.metric("vllm:iteration_tokens_total_count")
    assert call(engine, "POST", "/reset_prefix_cache") == {"success": False}
    assert call(engine, "POST", "/reset_prefix_cache?reset_running_requests=true") == {"success": True}
    assert reload(engine, models / "b").status_code == 200
    late = asyncio.create_task(client.post("/v1/chat/completions", json=body(max_tokens=5)))
    await await_until(lambda: engine.metric("vllm:num_requests_waiting") == 17, 5, "everything to wait")
    assert call(engine, "GET", "/is_paused") == {"is_paused": True}
    assert engine.metric("vllm:iteration_tokens_total_count") == steps
    assert not late.done()
    call(engine, "POST", "/resume")
    texts = []
    for stream in streams:
        events = [event.removeprefix("data: ") for event in (await stream).text.split("\n\n") if event]
        assert events[-1] == "[DONE]"
        deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
        assert len(deltas) == 301
        texts.append("".join(deltas))
    assert (await late).status_code == 200
    for text in texts:
        words = text.split()
        same = next(index for index, pair in enumerate(zip(words, alone.split(), strict=True)) if pair[0] != pair[1])
        assert 5 < same < 300
        assert STALE_KV_MARKER not in text


async def test_aborted_requests_end_with_their_finish_reason(engine: SimEngine, client: httpx.AsyncClient) -> None:
    """pause?mode=abort ends what is in flight with `abort`; later requests wait for resume."""
    running = asyncio.create_task(client.post("/v1/chat/completions", json=body(max_tokens=4000, ignore_eos=True)))
    await await_until(lambda: engine.metric("vllm:num_requests_running") == 1, 5, "the request to run")
    assert call(engine, "POST", "/pause") == {"status": "paused"}
    assert (await running).json()["choices"][0]["finish_reason"] == "abort"
    assert engine.metric("vllm:request_success_total", finished_reason="abort") == 1
    queued = asyncio.create_task(client.post("/v1/chat/completions", json=body(max_tokens=1)))
    await await_until(lambda: engine.metric("vllm:num_requests_waiting") == 1, 5, "the new request to wait")
    call(engine, "POST", "/resume")
    assert (await queued).status_code == 200


async def test_a_waiting_pause_lets_running_requests_finish(engine: SimEngine, client: httpx.AsyncClient) -> None:
    """pause?mode=wait answers once the running request has ended by itself."""
    running = asyncio.create_task(client.post("/v1/chat/completions", json=body(max_tokens=300, ignore_eos=True)))
    await await_until(lambda: engine.metric("vllm:num_requests_running") == 1, 5, "the request to run")
    token = {"x-intellect-engine-token": engine.token}
    assert (await client.post("/pause?mode=wait", headers=token)).json() == {"status": "paused"}
    assert engine.metric("vllm:num_requests_running") == 0
    assert (await running).json()["choices"][0]["finish_reason"] == "length"


async def test_single_requests_can_be_aborted_by_their_ids(engine: SimEngine, client: httpx.AsyncClient) -> None:
    """abort_requests ends the named answers only, or all."""
    long = body(max_tokens=4000, ignore_eos=True)
    tasks = [
        asyncio.create_task(client.post("/v1/chat/completions", json=long, headers={"x-request-id": name})) for name in "xyz"
    ]
    await await_until(lambda: engine.metric("vllm:num_requests_running") == 3, 5, "three to run")
    named = call(engine, "POST", "/abort_requests", json={"request_ids": ["chatcmpl-x"]})
    assert named == {"status": "aborted", "aborted": 1}
    assert (await tasks[0]).json()["choices"][0]["finish_reason"] == "abort"
    assert engine.metric("vllm:num_requests_running") == 2
    assert call(engine, "POST", "/abort_requests", json={}) == {"status": "aborted", "aborted": 2}
    assert [(await task).json()["choices"][0]["finish_reason"] for task in tasks[1:]] == ["abort", "abort"]


@pytest.mark.parametrize(
    ("folder", "reason"),
    [("nowhere", "no such folder"), ("empty", "model weights"), ("other-layout", "missing tensors: lm_head.weight")],
)
def test_weights_that_cannot_be_loaded_leave_the_old_ones(
    shared_engine: SimEngine, models: Path, folder: str, reason: str
) -> None:
    """A failing reload is a 500 as vLLM's collective_rpc gives it, without the path, and the old weights still answer."""
    before = say(shared_engine)
    failed = reload(shared_engine, models / folder)
    error = failed.json()["error"]
    assert (failed.status_code, error["type"], error["code"]) == (500, "InternalServerError", 500)
    assert error["message"].startswith("Call to collective_rpc method failed: ")
    assert reason in error["message"]
    assert str(models) not in error["message"]
    assert say(shared_engine) == before


@pytest.mark.parametrize(
    ("request_body", "status", "words"),
    [
        (b"{", 400, "JSON decode error"),
        (b"[]", 400, "must be a JSON object"),
        (b"{}", 400, "Missing 'method'"),
        (b'{"method": "fly"}', 500, "no attribute 'fly'"),
        (b'{"method": "reload_weights", "kwargs": {"weights_path": 5}}', 500, "Worker failed"),
    ],
)
def test_malformed_remote_calls_are_refused(shared_engine: SimEngine, request_body: bytes, status: int, words: str) -> None:
    """collective_rpc names what is wrong with the call."""
    answer = shared_engine.admin("POST", "/collective_rpc", content=request_body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/pause?mode=gently", "'abort', 'wait' or 'keep'"),
        ("POST", "/pause?clear_cache=perhaps", "valid boolean"),
        ("POST", "/sim/faults", "cannot read a fault"),
    ],
)
def test_malformed_admin_requests_are_refused(shared_engine: SimEngine, method: str, path: str, words: str) -> None:
    """Status 400 with what was expected."""
    answer = shared_engine.admin(method, path)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_development_routes_need_the_token(shared_engine: SimEngine) -> None:
    """Without the engine's token every one of them is refused, and nothing happens; whether it is paused anybody may ask."""
    for method, path in [("POST", "/pause"), ("POST", "/collective_rpc"), ("GET", "/weight_info"), ("POST", "/sim/faults")]:
        assert shared_engine.client.request(method, path).status_code == 403
    assert shared_engine.client.get("/is_paused").json() == {"is_paused": False}


def test_event_sources_and_server_info_exist(shared_engine: SimEngine) -> None:
    """An engine without KV events names no source; server_info describes the simulation."""
    assert call(shared_engine, "GET", "/kv_event_sources") == {}
    assert call(shared_engine, "GET", "/server_info").keys() == {"vllm_config", "vllm_env", "system_env"}
