"""The agent's calls to its engine, over real sockets, against the simulated engine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from server.engine_client import (
    EngineClient,
    EngineFacts,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    cache_config,
    engine_url,
)
from server.sim_model import write_sim_model
from tests.ports import free_port
from tests.sim import TOKEN, SimEngine, start_sim_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimEngine]:
    folder = tmp_path_factory.mktemp("model")
    write_sim_model(folder)
    names = ("--model", str(folder), "--served-model-name", "simulated")
    with start_sim_engine(*names, "--max-model-len", "4096", "--num-gpu-blocks-override", "1000") as engine:
        yield engine


@asynccontextmanager
async def connected(url: str, token: str = TOKEN) -> AsyncIterator[EngineClient]:
    client = EngineClient(url, token)
    try:
        yield client
    finally:
        await client.aclose()


async def test_it_learns_the_sizes_that_the_router_needs(engine: SimEngine) -> None:
    """Context length from /v1/models; block size and capacity from the metrics: 1000 blocks of 16 tokens."""
    async with connected(engine.url) as client:
        assert await client.facts() == EngineFacts(max_model_len=4096, kv_block_size=16, kv_capacity_tokens=16_000)


async def test_a_whole_swap_by_hand(engine: SimEngine, tmp_path: Path) -> None:
    """Pause, load, reset, label and resume do what they say."""
    write_sim_model(tmp_path, seed=1)
    async with connected(engine.url) as client:
        await client.pause()
        assert engine.admin("GET", "/is_paused").json() == {"is_paused": True}
        await client.load(str(tmp_path))
        await client.reset_cache()
        await client.set_label("v2+1")
        await client.resume()
        assert engine.admin("GET", "/is_paused").json() == {"is_paused": False}
        assert engine.admin("GET", "/weight_info").json() == {"weight_version": "v2+1"}
        answer = engine.client.post("/v1/completions", json={"model": "simulated", "prompt": "x"})
        assert answer.headers["x-intellect-checkpoint"] == "v2+1"


async def test_an_engine_of_somebody_else_does_not_count_as_up(engine: SimEngine) -> None:
    """An engine that another agent left on the port is healthy, but it does not know this token."""
    async with connected(engine.url) as client:
        assert await client.answers(3.0)
    async with connected(engine.url, "another-token") as client:
        assert not await client.answers(3.0)
        with pytest.raises(EngineRefused, match=r"/pause answered 403"):
            await client.pause()


async def test_an_error_of_the_engine_is_quoted(engine: SimEngine, tmp_path: Path) -> None:
    """The worker's own words reach the operator."""
    async with connected(engine.url) as client:
        with pytest.raises(EngineRefused, match=r"/collective_rpc answered 500: .*safetensors"):
            await client.load(str(tmp_path))


async def test_nothing_listens() -> None:
    """A dead engine is told apart from one that refuses."""
    async with connected(f"http://127.0.0.1:{free_port()}") as client:
        assert not await client.answers(3.0)
        with pytest.raises(EngineUnreachable, match="/resume"):
            await client.resume()


@asynccontextmanager
async def server_that(answer: bytes | None) -> AsyncIterator[str]:
    """Sends the bytes to whoever connects and closes; None: reads and never answers."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        if answer is None:
            await reader.read()  # until the client gives up
        else:
            writer.write(answer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        closed.set()

    closed = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await closed.wait()


async def test_facts_have_a_deadline() -> None:
    """A hung engine does not hold its agent up."""
    async with server_that(None) as url, connected(url) as client:
        with pytest.raises(EngineTimeout):
            await client.facts()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 18\r\n\r\n" + b'{"success": false}', "success: false"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n" + b"null", "something else than expected"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "something else than expected"),
    ],
)
async def test_a_reset_that_did_not_happen_is_an_error(body: bytes, error: str) -> None:
    """vLLM answers 200 with success: false when blocks are still in use."""
    async with server_that(body) as url, connected(url) as client:
        with pytest.raises(EngineRefused, match=error):
            await client.reset_cache()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", b"garbage\r\n\r\n"])
async def test_a_broken_connection_is_unreachable(answer: bytes) -> None:
    """An engine that dies in the middle of an answer is as good as gone."""
    async with server_that(answer) as url, connected(url) as client:
        with pytest.raises(EngineUnreachable):
            await client.resume()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8200"),
        ("0.0.0.0", "http://127.0.0.1:8200"),
        ("::", "http://[::1]:8200"),
        ("fe80::1", "http://[fe80::1]:8200"),
        ("node-7", "http://node-7:8200"),
    ],
)
def test_where_an_engine_is_reached(host: str, url: str) -> None:
    """An engine that listens everywhere is reached over loopback."""
    assert engine_url(host, 8200) == url


VLLM_LINE = (
    'vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",is_attention_free="False",'
    'kv_cache_size_tokens="22784",num_gpu_blocks="178",sliding_window="None"} 1.0'
)


def test_vllms_cache_information_is_found_among_its_metrics() -> None:
    """The labels of one info metric; other metrics, and their absence, do not matter."""
    labels = cache_config(f"# TYPE vllm:x gauge\nvllm:x 1.0\n{VLLM_LINE}\nvllm:cache_other 2\n")
    assert (labels["block_size"], labels["kv_cache_size_tokens"]) == ("128", "22784")
    assert cache_config("vllm:x 1.0\n") == {}
