"""How long the router waits for engines, for all models and for one."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from protocol.sse import event
from tests.router.process import RouterProcess, start_router
from tests.scripted_engine import MODEL, SSE_HEAD, ScriptedRequest, chunked, scripted_engine

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TOKEN = event(b'{"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}')


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    """Patient with every model but the scripted engine's."""
    config = tmp_path_factory.mktemp("timeouts") / "router.toml"
    config.write_text(
        f'[router]\nkeep_alive_s = 0.4\n[router.model."{MODEL}"]\n'
        "first_byte_timeout_s = 1.0\nidle_timeout_s = 1.5\ntotal_timeout_s = 3.0\n"
    )
    with start_router((), "--config", str(config)) as router:
        yield router


async def silent(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def one_token(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(SSE_HEAD + chunked(TOKEN))
    await asyncio.Event().wait()


async def endless(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(SSE_HEAD)
    while True:
        writer.write(chunked(TOKEN))
        await writer.drain()
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("script", "stream", "status", "said"),
    [
        (silent, False, 504, "did not answer within 1 s; ask for fewer tokens"),
        (silent, True, 200, "sent nothing within 1 s"),  # comments were sent already: the failure is an event
        (one_token, True, 200, "this answer is incomplete"),
        (endless, True, 200, "this answer is incomplete"),
    ],
    ids=["first byte", "first byte of a stream", "idle", "total"],
)
async def test_one_models_limits_end_its_requests(
    impatient: RouterProcess, script: object, stream: bool, status: int, said: str
) -> None:
    """An answer that does not begin, stops, or never ends is cut by its model's own limit, and says so."""
    async with scripted_engine(script) as engine, httpx.AsyncClient(verify=False, timeout=20) as client:  # type: ignore[arg-type]
        added = (await client.post(f"{impatient.admin}/admin/replicas", json={"url": engine.url})).json()
        await asyncio.to_thread(impatient.wait_ready, 1)
        received = b""
        is_broken = False
        async with client.stream("POST", f"{impatient.v1}/chat/completions", json={**CHAT, "stream": stream}) as response:
            try:
                async for part in response.aiter_raw():
                    received += part
            except httpx.RemoteProtocolError:
                is_broken = True
        assert (response.status_code, is_broken) == (status, stream)
        assert said in received.decode()
        assert b"[DONE]" not in received
        if script is silent and stream:
            assert b": keep-alive\n\n" in received
        await client.delete(f"{impatient.admin}/admin/replicas/{added['id']}")
