"""Token ids of prompts, learned beside the requests."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from protocol.openai import Surface
from router.edge.fleet import endpoint_of
from router.edge.prompt_tokens import PromptTokens
from router.edge.upstream import UpstreamPool, request_head
from router.state.kv_blocks import block_keys
from tests.ports import free_port
from tests.scripted_engine import ScriptedRequest, json_answer, scripted_engine
from tests.sim import start_sim_engine
from tests.waiting import await_until

CHAT = json.dumps({"model": "simulated", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}).encode()


def head(target: bytes, length: int) -> bytes:
    return request_head(b"POST", target, [(b"content-type", b"application/json"), (b"content-length", b"%d" % length)])


@asynccontextmanager
async def asking(url: str, **settings: Any) -> AsyncIterator[tuple[PromptTokens, UpstreamPool]]:
    pool = UpstreamPool(endpoint_of(url))
    async with asyncio.TaskGroup() as tasks:
        prompts = PromptTokens(tasks=tasks, **settings)
        try:
            yield prompts, pool
        finally:
            prompts.close()
            pool.close()


async def settled(prompts: PromptTokens) -> None:
    await await_until(lambda: prompts.in_flight == 0, 10, "the answers")


async def test_a_prompts_tokens_are_those_that_the_engine_will_compute() -> None:
    """For a conversation with the chat template's, for a completion without; asked once, kept for the next."""
    completion = json.dumps({"model": "simulated", "prompt": "hello world " * 50}).encode()
    with start_sim_engine() as engine:
        async with asking(engine.url) as (prompts, pool):
            for number, (surface, body) in enumerate([(Surface.CHAT, CHAT), (Surface.COMPLETIONS, completion)]):
                prompts.want(number, surface, body, pool, head)
                assert (prompts.tokens(number), prompts.keys(number, 16)) == (None, ())
                prompts.want(number, surface, body, pool, head)
                await settled(prompts)
                told = engine.client.post(surface, json=json.loads(body)).json()["usage"]["prompt_tokens"]
                tokens = prompts.tokens(number)
                assert tokens is not None
                assert len(tokens) == told
                for size, scope in ((16, 0), (4, 0), (4, 9), (16, 0)):
                    assert prompts.keys(number, size, scope) == block_keys(tokens, size, scope)
                prompts.want(number, surface, body, pool, head)
            assert (prompts.asked, prompts.failed, prompts.skipped, len(prompts)) == (2, 0, 0, 2)


async def test_a_prompt_that_comes_as_tokens_is_not_asked_for() -> None:
    """As reinforcement learning sends it."""
    async with asking(f"http://127.0.0.1:{free_port()}") as (prompts, pool):
        for number, prompt in enumerate(([1, 2, 3], [[1, 2, 3]])):
            prompts.want(number, Surface.COMPLETIONS, json.dumps({"prompt": prompt}).encode(), pool, head)
            assert list(prompts.tokens(number) or ()) == [1, 2, 3]
        assert prompts.asked == 0


@pytest.mark.parametrize(
    ("surface", "body"),
    [
        (Surface.EMBEDDINGS, b'{"input": "x"}'),
        (Surface.RESPONSES, b'{"input": "x"}'),
        (Surface.CHAT, b"{}"),
        (Surface.CHAT, b"["),
        (Surface.CHAT, b"\xff"),
        (Surface.COMPLETIONS, b"{}"),
        (Surface.COMPLETIONS, b'{"prompt": ["a", "b"]}'),
        (Surface.COMPLETIONS, b'{"prompt": [[1], [2]]}'),
        (Surface.COMPLETIONS, b'{"prompt": [1.5]}'),
        (Surface.COMPLETIONS, b'{"prompt": [true]}'),
        (Surface.COMPLETIONS, b'{"prompt": 5}'),
    ],
)
async def test_what_has_no_one_prompt_is_left_alone(surface: Surface, body: bytes) -> None:
    """Nobody is asked."""
    async with asking(f"http://127.0.0.1:{free_port()}") as (prompts, pool):
        prompts.want(1, surface, body, pool, head)
        assert (prompts.asked, prompts.in_flight, prompts.tokens(1)) == (0, 0, None)


async def test_only_so_many_are_asked_for_at_once_and_none_for_long() -> None:
    """An engine that is slow to tokenise gets no heap of it; the requests never wait."""

    async def silent(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async with scripted_engine(silent) as engine, asking(engine.url, in_flight_max=2, timeout_s=0.3) as (prompts, pool):
        for number in range(5):
            prompts.want(number, Surface.CHAT, CHAT, pool, head)
        assert (prompts.in_flight, prompts.asked, prompts.skipped) == (2, 2, 3)
        await settled(prompts)
        assert (prompts.failed, len(prompts)) == (2, 0)
        await await_until(lambda: engine.open_requests == 0, 5, "its connections to be cut")


@pytest.mark.parametrize(
    "answer",
    [
        json_answer({"tokens": [1]}, "404 Not Found"),
        json_answer({"tokens": ["a"]}),
        json_answer({"tokens": [2**63]}),
        json_answer({}),
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n\xff\xff\xff",
        b"no HTTP at all\r\n\r\n",
    ],
)
async def test_an_answer_that_tells_no_tokens_is_counted(answer: bytes) -> None:
    """And the prompt may be asked for again."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    async with scripted_engine(script) as engine, asking(engine.url) as (prompts, pool):
        for failed in (1, 2):
            prompts.want(1, Surface.CHAT, CHAT, pool, head)
            await settled(prompts)
            assert (prompts.failed, prompts.tokens(1)) == (failed, None)


async def test_the_least_recently_used_prompts_make_room() -> None:
    """By their tokens, not their number."""
    async with asking(f"http://127.0.0.1:{free_port()}", tokens_max=100) as (prompts, pool):
        for number, length in enumerate((40, 40, 20)):
            prompts.want(number, Surface.COMPLETIONS, json.dumps({"prompt": [7] * length}).encode(), pool, head)
        assert prompts.keys(0, 16)
        prompts.want(3, Surface.COMPLETIONS, json.dumps({"prompt": [7] * 30}).encode(), pool, head)
        assert [prompts.tokens(number) is None for number in range(4)] == [False, True, False, False]
        prompts.want(4, Surface.COMPLETIONS, json.dumps({"prompt": [7] * 101}).encode(), pool, head)
        assert [prompts.tokens(number) is None for number in range(5)] == [False, True, False, False, True]


async def test_closing_ends_what_is_being_asked() -> None:
    """At once."""

    async def silent(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async with scripted_engine(silent) as engine, asyncio.timeout(5):
        async with asking(engine.url) as (prompts, pool):
            prompts.want(1, Surface.CHAT, CHAT, pool, head)
            await await_until(lambda: engine.open_requests == 1, 5, "the question")
        assert prompts.in_flight == 0
