"""The whole path on real vLLM: client, router, agent, expert-parallel engine, checkpoint swap."""

import asyncio
import re
import shutil
from pathlib import Path

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.real.stack import MODEL, RealStack
from tests.real.tiny_glm import ANSWER_TOKENS, QUESTION
from tests.waiting import await_until

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]


async def answer(client: openai.AsyncOpenAI) -> tuple[str, str]:
    """What the model says to a fixed prompt, and the version that the response names."""
    raw = await client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=ANSWER_TOKENS, extra_body={"ignore_eos": True}
    )
    return raw.parse().choices[0].message.content or "", raw.headers["x-intellect-checkpoint"]


async def test_the_openai_client_gets_the_same_text_streamed_and_whole(client: openai.AsyncOpenAI, stack: RealStack) -> None:
    """OpenAI's own library works unchanged on a real engine."""
    text, version = await answer(client)
    assert (text, version) == (stack.answers["first"], "base")
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=ANSWER_TOKENS, extra_body={"ignore_eos": True}, stream=True
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text
    assert (await client.models.retrieve(MODEL)).id == MODEL
    status = httpx.get(f"{stack.agent}/status").json()
    assert status["kv_capacity_tokens"] > 2048
    assert (status["max_model_len"], status["kv_block_size"]) == (2048, 128)


async def test_a_long_prompt_that_comes_again_is_read_from_the_cache(client: openai.AsyncOpenAI) -> None:
    """The client sees in its usage what it did not have to pay for."""
    prompt = "The quick brown fox jumps over the lazy dog. " * 15
    cached = []
    for _ in range(2):
        done = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
        assert done.usage is not None
        assert done.usage.prompt_tokens > 600
        details = done.usage.prompt_tokens_details
        cached.append(details.cached_tokens if details is not None and details.cached_tokens is not None else 0)
    assert cached[0] == 0
    assert cached[1] >= 512


@pytest.mark.parametrize("stream", [True, False], ids=["mid-stream", "before the first byte"])
async def test_a_client_that_leaves_stops_the_engines_work(client: openai.AsyncOpenAI, stack: RealStack, stream: bool) -> None:
    """The engine's running count falls within a second of the disconnect."""
    async with httpx.AsyncClient(base_url=stack.router.url, timeout=60) as http:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": stream}
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        await await_until(lambda: stack.engine_metric("vllm:num_requests_running") == 1, 10, "the request to run")
        asking.cancel()
        await await_until(lambda: stack.engine_metric("vllm:num_requests_running") == 0, 1, "the engine to stop it")
    await await_until(lambda: stack.router.in_flight() == 0, 1, "the router's count")


def test_development_routes_of_the_engine_are_closed(stack: RealStack) -> None:
    """Who reaches the engine's port can use the model but not pause it or load weights."""
    for path in ("/pause", "/collective_rpc", "/update_weight_version", "/v1/load_lora_adapter", "/invocations", "/nowhere"):
        assert httpx.post(f"{stack.engine}{path}", json={}).status_code == 403, path
    assert httpx.post(f"{stack.router.url}/pause").status_code == 404


async def test_a_swap_under_load_cuts_nothing_and_changes_the_answer(client: openai.AsyncOpenAI, stack: RealStack) -> None:
    """Sixteen running streams live through a swap; afterwards the new weights answer, exactly, and after the way back the old.

    The answers are compared with those of another implementation: an engine that loads a checkpoint into the wrong places
    answers just as fluently.
    """
    stack.publish("second", "v2")
    first, second = stack.answers["first"], stack.answers["second"]
    assert first != second

    async def one_stream(number: int) -> int:
        stream = await client.completions.create(
            model=MODEL,
            prompt=f"stream {number}: ",
            max_tokens=600,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        tokens = 0
        async for chunk in stream:
            tokens += len((chunk.choices[0].model_extra or {}).get("token_ids") or ())
        return tokens

    streams = [asyncio.create_task(one_stream(number)) for number in range(16)]
    await await_until(lambda: stack.engine_metric("vllm:num_requests_running") == 16, 30, "16 running streams")
    done = await asyncio.to_thread(stack.swap, "v2")
    assert done.returncode == 0, done.stderr + done.stdout
    assert re.search(r"\d+(\.\d+)? s", done.stdout), "the swap's time is printed"
    assert not any(stream.done() for stream in streams), "the streams were still running when the swap ended"
    assert await asyncio.gather(*streams) == [600] * 16
    assert await answer(client) == (second, "v2+1")
    listed = httpx.get(f"{stack.router.admin}/admin/replicas").json()
    assert listed[0]["checkpoint"] == "v2+1"

    done = await asyncio.to_thread(stack.swap, "base")
    assert done.returncode == 0, done.stderr
    assert await answer(client) == (first, "base+2")


def spoil_nothing(_: Path) -> None:
    pass


def flip_a_byte(version: Path) -> None:
    shard = next(iter(sorted(version.glob("*.safetensors"))))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)


def unseal(version: Path) -> None:
    (version / "STABLE").unlink()


@pytest.mark.parametrize(
    ("variant", "spoil", "reason"),
    [
        ("lacking", spoil_nothing, r"experts\.5\.down_proj\.weight.*not in the checkpoint"),
        ("misshapen", spoil_nothing, r"experts\.5\.down_proj\.weight has shape \[64, 128\].*needs \[128, 64\]"),
        ("second", flip_a_byte, "a byte changed"),
        ("second", unseal, "STABLE"),
    ],
)
async def test_a_checkpoint_with_a_fault_is_refused_and_the_old_weights_answer_as_before(
    client: openai.AsyncOpenAI, stack: RealStack, variant: str, spoil: object, reason: str
) -> None:
    """A bad checkpoint never reaches the engine; the operator reads why."""
    before = await answer(client)
    stack.publish(variant, "bad")
    folder = stack.store / MODEL / "bad"
    try:
        assert callable(spoil)
        spoil(folder)
        done = stack.swap("bad")
        assert done.returncode == 1
        assert re.search(reason, (done.stderr + done.stdout).replace("\n", " ")), done.stderr + done.stdout
        assert await answer(client) == before
    finally:
        shutil.rmtree(folder)
