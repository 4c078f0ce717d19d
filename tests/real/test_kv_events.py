"""KV events of real vLLM: what the router believes of its cache is what it finds there."""

import asyncio
import random

import httpx
import msgspec
import pytest

from protocol.openai import Surface
from router.edge.fleet import endpoint_of
from router.edge.kv_endpoints import KvEndpoints
from router.edge.prompt_tokens import PromptTokens
from router.edge.upstream import UpstreamPool
from router.state.kv_blocks import block_keys
from router.state.kv_source import KvMode
from tests.real.stack import MODEL, RealStack
from tests.router.edge.test_kv_events import REPLICA, Following, following, replayed
from tests.router.edge.test_prompt_tokens import head
from tests.waiting import await_until

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

BLOCK = 128  # of vLLM on a CPU


async def usage(http: httpx.AsyncClient, prompt: str | list[int]) -> tuple[int, int]:
    """Tokens of the prompt, and how many of them it read from its cache."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    told = (await http.post("/v1/completions", json=body)).raise_for_status().json()["usage"]
    details = told.get("prompt_tokens_details") or {}
    return told["prompt_tokens"], details.get("cached_tokens") or 0


async def caught_up(followed: Following, endpoints: KvEndpoints) -> None:
    """All that is published until now is taken in."""
    assert endpoints.replay is not None
    last = max((seq for seq, _ in await replayed(endpoints.replay)), default=-1)
    await followed.until_heard(last)


async def test_vllms_events_tell_what_it_will_find_cached(stack: RealStack) -> None:
    """Block by block, by keys that are made from the tokens alone; also for a router that comes when it runs already."""
    rng = random.Random(7)
    prompts = [[65 + rng.randrange(26) for _ in range(300)] for _ in range(3)]
    prompts += [prompts[0][:200] + prompts[1][:400], prompts[1] * 3, prompts[2][:256]]
    async with httpx.AsyncClient(base_url=stack.engine, timeout=60) as http, following(stack.kv_events) as followed:
        await followed.until_mode(KvMode.LIVE)
        for prompt in [*prompts, *rng.choices(prompts, k=6)]:
            await caught_up(followed, stack.kv_events)
            resident = followed.events.resident(REPLICA, 0, block_keys(prompt, BLOCK))
            assert resident is not None
            _, cached = await usage(http, prompt)
            assert cached == min(resident * BLOCK, (len(prompt) - 1) // BLOCK * BLOCK)
        assert cached > 0
        await asyncio.gather(*[usage(http, [number, *prompts[0]]) for number in (66, 66, 66, 67)])
        await caught_up(followed, stack.kv_events)
        source = followed.source
        assert (source.mode, source.losses, source.malformed, source.restarts, source.unrooted) == (KvMode.LIVE, 0, 0, 0, 0)
        async with following(stack.kv_events) as late:
            await late.until_mode(KvMode.LIVE)
            assert late.mirror.held == followed.mirror.held != set()
        async with following(KvEndpoints(stack.kv_events.events)) as without_replay:

            async def is_heard() -> bool:
                await usage(http, [rng.randrange(97, 122) for _ in range(300)])
                return without_replay.mode is KvMode.PARTIAL

            await await_until(is_heard, 30, "the first message")
            assert without_replay.events.resident(REPLICA, 0, block_keys(prompts[0], BLOCK)) is None


async def test_a_conversations_tokens_name_the_blocks_that_it_left(stack: RealStack) -> None:
    """The chat template's tokens are asked of the engine, and lead to the blocks that its events tell of."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "tell me more " * 40}], "max_tokens": 1}
    encoded = msgspec.json.encode(body)
    async with httpx.AsyncClient(base_url=stack.engine, timeout=60) as http, following(stack.kv_events) as followed:
        told = (await http.post("/v1/chat/completions", json=body)).raise_for_status().json()["usage"]
        pool = UpstreamPool(endpoint_of(stack.engine))
        async with asyncio.TaskGroup() as tasks:
            prompts = PromptTokens(tasks=tasks)
            prompts.want(1, Surface.CHAT, encoded, pool, head)
            await await_until(lambda: prompts.tokens(1), 10, "the tokens")
        pool.close()
        await followed.until_mode(KvMode.LIVE)
        await caught_up(followed, stack.kv_events)
        keys = prompts.keys(1, BLOCK)
        assert len(prompts.tokens(1) or ()) == told["prompt_tokens"]
        assert followed.events.resident(REPLICA, 0, keys) == len(keys) == told["prompt_tokens"] // BLOCK > 3
