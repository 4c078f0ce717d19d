"""The client that talks to engines, on real sockets."""

import asyncio
import resource

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.edge.fleet import endpoint_of
from router.edge.upstream import (
    BUFFER_BYTES_MAX,
    HEAD_BYTES_MAX,
    STALE_WITHIN_S,
    Answer,
    Patience,
    Timeouts,
    UpstreamPool,
    request_head,
)
from router.errors import (
    BrokenAnswerError,
    LocalLimitError,
    NoAnswerError,
    StalledError,
    UnreachableError,
    UpstreamError,
    UpstreamTimeoutError,
)
from tests.ports import free_port
from tests.scripted_engine import LAST_CHUNK, SSE_HEAD, ScriptedRequest, chunked, json_answer, scripted_engine
from tests.waiting import await_until

HEAD = request_head(b"POST", b"/v1/completions", [(b"content-length", b"2")])
PATIENCE = Patience()


async def read_all(answer: Answer) -> bytes:
    body = b""
    while part := await answer.read():
        body += part
    return body


async def ask(pool: UpstreamPool, patience: Patience = PATIENCE) -> bytes:
    answer = await pool.send(HEAD, b"{}", patience)
    try:
        return await read_all(answer)
    finally:
        answer.close()


async def test_a_connection_is_used_again() -> None:
    """A request pays for a new connection only when none is free."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({"ok": True}))

    async with scripted_engine(script) as engine:
        pool = UpstreamPool(endpoint_of(engine.url))
        assert [await ask(pool) for _ in range(5)] == [b'{"ok": true}'] * 5
        assert engine.connections == 1
        pool.close()


async def test_a_connection_that_the_engine_closed_meanwhile_costs_no_request() -> None:
    """The keep-alive race between router and engine is invisible to clients."""
    served = 0

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        if served == 2:  # the answer that this connection's second request would have got, was it not too late
            writer.transport.abort()
        else:
            writer.write(json_answer({"n": served}))

    async with scripted_engine(script) as engine:
        pool = UpstreamPool(endpoint_of(engine.url))
        assert await ask(pool) == b'{"n": 1}'
        assert await ask(pool) == b'{"n": 3}'
        pool.close()


async def test_a_new_connection_that_ends_without_an_answer_is_not_tried_again_here() -> None:
    """An engine that dies on a request is not given the same request over and over."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with scripted_engine(script) as engine:
        pool = UpstreamPool(endpoint_of(engine.url))
        with pytest.raises(NoAnswerError):
            await ask(pool)
        assert len(engine.requests) == 1


async def test_a_request_that_an_engine_worked_on_is_not_sent_to_it_again() -> None:
    """Only the keep-alive race is repaired in silence: a connection that ends later was closed on the request."""
    served = 0

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        if served == 2:
            await asyncio.sleep(2 * STALE_WITHIN_S)
            writer.transport.abort()
        else:
            writer.write(json_answer({}))

    async with scripted_engine(script) as engine:
        pool = UpstreamPool(endpoint_of(engine.url))
        await ask(pool)
        with pytest.raises(NoAnswerError):
            await ask(pool)
        assert served == 2
        pool.close()


async def test_running_out_of_descriptors_is_not_the_replicas_fault() -> None:
    """A router under too much load does not take healthy replicas out."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    pool = UpstreamPool(endpoint_of(f"http://127.0.0.1:{free_port()}"))
    await asyncio.sleep(0)  # the loop has its own descriptors by now
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(LocalLimitError):
            await ask(pool)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_the_first_token_has_its_whole_time_even_if_the_head_comes_at_once() -> None:
    """A bare vLLM sends a stream's head before it has a token; prefill may take longer than a pause between tokens."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        await asyncio.Event().wait()

    async with scripted_engine(script) as engine:
        pool = UpstreamPool(endpoint_of(engine.url))
        answer = await pool.send(HEAD, b"{}", Patience(Timeouts(first_byte=1000, idle=0.01)))
        reading = asyncio.create_task(answer.read())
        end = asyncio.get_running_loop().time() + 0.1
        while asyncio.get_running_loop().time() < end:
            pool.sweep(is_paused=False)
            await asyncio.sleep(0)
        assert not reading.done()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        answer.close()


async def test_an_idle_connection_is_dropped_before_the_engine_would_drop_it() -> None:
    """Idle connections never grow old enough to meet the engine's own timeout."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({}))

    async with scripted_engine(script) as engine:
        pool = UpstreamPool(endpoint_of(engine.url), idle_s=0.0)
        await ask(pool)
        await ask(pool)
        assert engine.connections == 2
        pool.sweep(is_paused=False)
        assert repr(pool).endswith("busy=0 idle=0>")


async def test_nobody_listening_is_said_at_once() -> None:
    """A dead replica costs a request no time."""
    with pytest.raises(UnreachableError, match="no connection to"):
        await ask(UpstreamPool(endpoint_of(f"http://127.0.0.1:{free_port()}")))


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", NoAnswerError),
        (b"HTTP/1.1 200 OK\r\ncontent-le", BrokenAnswerError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", BrokenAnswerError),
        (SSE_HEAD + chunked(b"data: {}\n\n"), BrokenAnswerError),
        (SSE_HEAD + b"zz\r\n", BrokenAnswerError),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", BrokenAnswerError),
        (b"HTTP/1.1 200 OK\r\nx: " + b"a" * (HEAD_BYTES_MAX + 1), BrokenAnswerError),
    ],
)
async def test_an_answer_cut_short_or_garbled_is_an_error_and_never_a_short_answer(
    sent: bytes, error: type[UpstreamError]
) -> None:
    """A client never takes a part of an answer for the whole."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        writer.close()

    async with scripted_engine(script) as engine:
        pool = UpstreamPool(endpoint_of(engine.url))
        with pytest.raises(error):
            await ask(pool)
        assert repr(pool).endswith("busy=0 idle=0>")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.binary(min_size=1, max_size=300), max_size=8), cuts=st.sets(st.integers(1, 2500), max_size=25))
def test_a_body_arrives_byte_for_byte_however_the_network_cuts_it(parts: list[bytes], cuts: set[int]) -> None:
    """No byte is lost, doubled or moved, wherever a packet ends."""
    wire = SSE_HEAD + chunked(*parts) + LAST_CHUNK

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        last = 0
        for cut in [*sorted(cut for cut in cuts if cut < len(wire)), len(wire)]:
            writer.write(wire[last:cut])
            await writer.drain()
            await asyncio.sleep(0)
            last = cut

    async def check() -> None:
        async with scripted_engine(script) as engine:
            pool = UpstreamPool(endpoint_of(engine.url))
            assert await ask(pool) == b"".join(parts)
            assert await ask(pool) == b"".join(parts), "the connection is clean for the next request"
            pool.close()

    asyncio.run(check())


async def test_a_slow_client_slows_the_engine_instead_of_filling_memory() -> None:
    """An unread answer is held back in the network, not in the router."""
    block = b"x" * 65536
    written = 0

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(SSE_HEAD)
        for _block in range(400):
            writer.write(chunked(block))
            await writer.drain()
            written += len(block)
        writer.write(LAST_CHUNK)

    async with scripted_engine(script) as engine:
        pool = UpstreamPool(endpoint_of(engine.url))
        answer = await pool.send(HEAD, b"{}", PATIENCE)
        before = -1
        while before != written:  # until the engine can write no more
            before = written
            await asyncio.sleep(0.05)
        assert written < 400 * len(block)
        assert sum(map(len, answer._connection._chunks)) < BUFFER_BYTES_MAX + 512 * 1024
        assert len(await read_all(answer)) == 400 * len(block)
        answer.close()
        pool.close()


async def test_closing_early_cuts_the_connection() -> None:
    """When a client leaves, its engine is told at once."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunked(b"data: 1\n\n"))
        await asyncio.Event().wait()

    async with scripted_engine(script) as engine:
        pool = UpstreamPool(endpoint_of(engine.url))
        answer = await pool.send(HEAD, b"{}", PATIENCE)
        assert await answer.read() == b"data: 1\n\n"
        answer.close()
        await await_until(lambda: engine.open_requests == 0, 2, "the engine to see the connection closed")
        assert repr(pool).endswith("busy=0 idle=0>")


@pytest.mark.parametrize(("first", "limit"), [(b"", "first byte"), (SSE_HEAD + chunked(b"data: 1\n\n"), "two parts")])
async def test_an_engine_that_falls_silent_is_given_up_unless_it_is_paused(first: bytes, limit: str) -> None:
    """A hung engine ends its requests with an error; one that is swapping its checkpoint does not."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        await asyncio.Event().wait()

    async with scripted_engine(script) as engine:
        pool = UpstreamPool(endpoint_of(engine.url))
        asking = asyncio.create_task(ask(pool, Patience(Timeouts(first_byte=0.05, idle=0.05))))
        await await_until(lambda: engine.open_requests == 1, 2, "the request")
        end = asyncio.get_running_loop().time() + 0.2
        while asyncio.get_running_loop().time() < end:
            pool.sweep(is_paused=True)
            await asyncio.sleep(0)
        assert not asking.done()

        def swept() -> bool:
            pool.sweep(is_paused=False)
            return asking.done()

        await await_until(swept, 2, "the request to be given up")
        with pytest.raises(UpstreamTimeoutError, match=limit):
            await asking


async def test_an_interim_answer_is_passed_over() -> None:
    """103 Early Hints and 100 Continue do not confuse the router."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + json_answer({"ok": 1}))

    async with scripted_engine(script) as engine:
        pool = UpstreamPool(endpoint_of(engine.url))
        answer = await pool.send(HEAD, b"{}", PATIENCE)
        assert (answer.status, answer.headers.get(b"link"), await read_all(answer)) == (200, None, b'{"ok": 1}')
        answer.close()
        pool.close()


async def test_a_stream_is_handed_on_without_being_asked_for() -> None:
    """Each part of a stream reaches the client as it comes, and the connection serves the next request afterwards."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        for part in (b"one", b"two", b"three"):
            writer.write(chunked(part))
            await writer.drain()
        writer.write(LAST_CHUNK)

    async with scripted_engine(script) as engine:
        pool = UpstreamPool(endpoint_of(engine.url))
        for _ in range(2):
            got: list[bytes] = []
            answer = await pool.send(HEAD, b"{}", PATIENCE)
            await answer.pump(got.append)
            answer.close()
            assert b"".join(got) == b"onetwothree"
        assert engine.connections == 1
        pool.close()


async def test_what_a_sink_raises_ends_the_answer_and_cuts_the_connection() -> None:
    """A stream that must not go on stops at once, and frees the engine."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunked(b"one"))
        await asyncio.Event().wait()

    def refuse(_: bytes) -> None:
        raise ValueError("enough")

    async with scripted_engine(script) as engine:
        pool = UpstreamPool(endpoint_of(engine.url))
        answer = await pool.send(HEAD, b"{}", PATIENCE)
        with pytest.raises(ValueError, match="enough"):
            await answer.pump(refuse)
        answer.close()
        await await_until(lambda: engine.open_requests == 0, 2, "the engine to see the connection closed")


async def test_silence_is_noticed_again_and_again_while_an_engine_thinks() -> None:
    """A client can be told that its request still waits."""
    noticed = 0

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    def notice() -> None:
        nonlocal noticed
        noticed += 1

    async with scripted_engine(script) as engine:
        pool = UpstreamPool(endpoint_of(engine.url))
        asking = asyncio.create_task(ask(pool, Patience(silence_s=0.03, on_silence=notice)))

        def swept() -> bool:
            pool.sweep(is_paused=True)
            return noticed >= 3

        await await_until(swept, 5, "three notices")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_requests_without_output_are_given_up_when_the_engine_makes_no_progress() -> None:
    """They can be placed again; one that has output keeps it and goes on waiting."""
    has_output = True

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal has_output
        if has_output:
            writer.write(SSE_HEAD + chunked(b"one"))
            has_output = False
        await asyncio.Event().wait()

    async with scripted_engine(script) as engine:
        pool = UpstreamPool(endpoint_of(engine.url))
        running = await pool.send(HEAD, b"{}", PATIENCE)
        assert await running.read() == b"one"
        waiting = asyncio.create_task(ask(pool))
        await await_until(lambda: engine.open_requests == 2, 2, "both requests")
        pool.give_up_waiting()
        with pytest.raises(StalledError):
            await waiting
        assert engine.open_requests >= 1
        assert not running.is_complete
        running.close()
