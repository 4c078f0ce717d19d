"""Engines that answer in ways meant to hang the router, to be taken for sound, or to make a part look like a whole."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from router.state.replicas import Replica, ReplicaTable
from router.types import Endpoint, Health, Observation, ReplicaId, Verdict
from tests.conformance import raw
from tests.conformance.replies import CHAT, COMPLETIONS
from tests.conformance.service import scripted_behind
from tests.conformance.streams import BASE, DONE, broken_stream, check_error_event, chunk
from tests.faults.stage import total
from tests.router.process import RouterProcess, start_router
from tests.scripted_engine import LAST_CHUNK, SSE_HEAD, Script, ScriptedEngine, ScriptedRequest, chunked, json_answer
from tests.waiting import await_until

# Short enough to wait for; a stall is declared after three flat scrapes.
SETTINGS = '[router]\nstall_after_s = 0.6\npolicy = "round_robin"\n'
ERROR_EVENT = b'data: {"error":{"message":"EngineCore died","type":"InternalServerError","param":null,"code":500}}\n\n'
FINISH = chunk({}, "stop")
WHOLE = SSE_HEAD + chunked(chunk({"role": "assistant", "content": "whole"}), FINISH, DONE) + LAST_CHUNK
Write = Callable[[asyncio.StreamWriter], Awaitable[None]]


def request(body: dict[str, Any], path: str = CHAT) -> bytes:
    return raw.request("POST", path, {"content-type": "application/json"}, json.dumps({"model": "scripted", **body}).encode())


def chat(**fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


async def ask(router: RouterProcess, body: dict[str, Any]) -> raw.Answer:
    """One whole answer. The engines run in this loop, so the blocking client runs in a thread."""
    return await asyncio.to_thread(raw.exchange, router.url, request(body))


def events_of(answer: raw.Answer) -> list[str]:
    blocks = answer.body.decode().split("\n\n")
    return [block.removeprefix("data: ") for block in blocks if block and not block.startswith(":")]


def text_of(answer: raw.Answer) -> str:
    """Of a whole stream: [DONE] once and last, no error."""
    *events, last = events_of(answer)
    assert (last, events.count("[DONE]")) == ("[DONE]", 0)
    chunks = [json.loads(event) for event in events]
    assert not any("error" in part for part in chunks), chunks
    return "".join(choice["delta"].get("content") or "" for part in chunks for choice in part["choices"])


def writes(data: bytes) -> Script:
    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return script


def first_fails(fail: Write, then: bytes) -> Script:
    """For several engines: whichever generating request comes first fails, all others are answered with `then`."""
    failing = iter([fail])

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        if (failure := next(failing, None)) is not None:
            await failure(writer)
        else:
            writer.write(then)

    return script


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    config = tmp_path_factory.mktemp("router") / "router.toml"
    config.write_text(SETTINGS)
    with start_router((), "--config", str(config)) as running:
        yield running


@pytest.fixture
async def engine(router: RouterProcess) -> AsyncIterator[ScriptedEngine]:
    async with scripted_behind(router) as behind:
        yield behind


@pytest.fixture
async def other(router: RouterProcess, engine: ScriptedEngine) -> AsyncIterator[ScriptedEngine]:
    """The second replica of the same model."""
    async with scripted_behind(router) as behind:
        yield behind


@pytest.mark.parametrize(("size", "times"), [(600_000, 20), (900_000, 20), (3_000_000, 8)])
async def test_a_long_answer_in_one_burst_arrives_whole(
    router: RouterProcess, engine: ScriptedEngine, size: int, times: int
) -> None:
    """Every time, on warm connections too, where all of it may be there before the router looks at its head."""
    content = "x" * size
    engine.script = writes(json_answer({"text": content}))

    def ask_often() -> None:
        with raw.Wire(router.url, timeout_s=5) as wire:
            for _ in range(times):
                wire.send(request(chat()))
                answer = wire.read_answer()
                assert (answer.status, json.loads(answer.body)["text"] == content) == (200, True)

    await asyncio.to_thread(ask_often)
    assert len(engine.requests) == times


def text(index: int, finish_reason: str | None = None) -> bytes:
    choice = {"index": index, "text": "t", "logprobs": None, "finish_reason": finish_reason}
    return b"data: %b\n\n" % json.dumps({**BASE, "object": "text_completion", "choices": [choice]}).encode()


LISTED = {"prompt": ["a", "b", "c"]}
UNFINISHED: dict[str, tuple[str, dict[str, Any], tuple[bytes, ...]]] = {
    "one of three prompts": (COMPLETIONS, LISTED, (text(0), text(1), text(2), text(0, "stop"))),
    "two of three prompts": (COMPLETIONS, LISTED, (text(0), text(1), text(2), text(0, "stop"), text(2, "stop"))),
    "one of two choices, twice": (COMPLETIONS, {"prompt": "a", "n": 2}, (text(0), text(1), text(0, "stop"), text(0, "stop"))),
    "two prompts with two choices": (
        COMPLETIONS,
        {"prompt": ["a", "b"], "n": 2},
        tuple(text(index, "stop") for index in range(3)),
    ),
    "chat, one of two choices, twice": (
        CHAT,
        chat(n=2),
        (chunk({"content": "a"}), chunk({"content": "b"}, index=1), chunk({}, "stop"), chunk({}, "stop")),
    ),
}


@pytest.mark.parametrize(("path", "body", "events"), UNFINISHED.values(), ids=UNFINISHED.keys())
async def test_an_answer_in_which_a_choice_has_not_finished_is_not_whole(
    router: RouterProcess, engine: ScriptedEngine, path: str, body: dict[str, Any], events: tuple[bytes, ...]
) -> None:
    """However cleanly the engine ends it: the client gets an error and no [DONE], from neither engine nor router."""
    engine.script = writes(SSE_HEAD + chunked(*events) + LAST_CHUNK)
    asked = {"model": "scripted", "stream": True, "seed": 1, **body}
    payloads, error = check_error_event(await asyncio.to_thread(broken_stream, router.url, asked, path))
    assert len(payloads) == sum(event != DONE for event in events)
    assert error["type"] == "server_error"


async def test_comments_behind_the_end_hold_nothing(router: RouterProcess, engine: ScriptedEngine) -> None:
    """An engine that goes on writing behind [DONE] gets its connection ended; the request was answered, and counts once."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE.removesuffix(LAST_CHUNK))
        while True:
            await writer.drain()
            await asyncio.sleep(0.2)
            writer.write(chunked(b": ping\n\n"))

    engine.script = script
    before = _outcomes(router)
    started = time.monotonic()
    assert text_of(await ask(router, chat(stream=True))) == "whole"
    await await_until(lambda: router.in_flight() == 0, 3, "the lease to be settled")
    await await_until(lambda: engine.open_requests == 0, 1, "the engine's connection to be ended")
    assert time.monotonic() - started < 4
    assert [after - start for after, start in zip(_outcomes(router), before, strict=True)] == [1, 1]


def _outcomes(router: RouterProcess) -> tuple[float, float]:
    """Of all requests, and of the completed ones."""
    exposition = router.http.get(f"{router.admin}/metrics").text
    name = "intellect_router_requests_total"
    return total(exposition, name), total(exposition, name, outcome="completed")


async def _error_first(writer: asyncio.StreamWriter) -> None:
    writer.write(SSE_HEAD + chunked(ERROR_EVENT, DONE) + LAST_CHUNK)


async def _error_late(writer: asyncio.StreamWriter) -> None:
    writer.write(SSE_HEAD)
    await writer.drain()
    await asyncio.sleep(0.1)
    await _comment(writer)
    writer.write(chunked(ERROR_EVENT, DONE) + LAST_CHUNK)


async def _comment(writer: asyncio.StreamWriter) -> None:
    writer.write(chunked(b": ping\n\n"))
    await writer.drain()
    await asyncio.sleep(0.1)


async def _death(writer: asyncio.StreamWriter) -> None:
    writer.write(SSE_HEAD)
    await _comment(writer)
    writer.close()


FAILURES: dict[str, Write] = {"error": _error_first, "error behind a comment": _error_late, "death behind a comment": _death}
seeded_or_not = pytest.mark.parametrize("options", [{"seed": 5}, {}], ids=["seed", "continuable"])


@seeded_or_not
@pytest.mark.parametrize("fail", FAILURES.values(), ids=FAILURES.keys())
async def test_a_stream_that_fails_before_it_says_anything_is_answered_by_another_replica(
    router: RouterProcess, engine: ScriptedEngine, other: ScriptedEngine, fail: Write, options: dict[str, Any]
) -> None:
    """Nothing of the answer has been sent, so it may come from elsewhere, also one that could not be continued."""
    engine.script = other.script = first_fails(fail, WHOLE)
    answer = await ask(router, chat(stream=True, **options))
    assert answer.status == 200
    assert text_of(answer) == "whole"
    assert [len(engine.requests), len(other.requests)] == [1, 1]


@seeded_or_not
async def test_a_stream_that_fails_before_it_says_anything_is_an_http_error(
    router: RouterProcess, engine: ScriptedEngine, options: dict[str, Any]
) -> None:
    """With no other replica: a status that clients understand, not a 200 that begins with an error."""
    engine.script = first_fails(_error_first, WHOLE)
    answer = await ask(router, chat(stream=True, **options))
    assert answer.status >= 500
    assert answer.error["type"] == "server_error"


@pytest.mark.parametrize("how", ["404", "500", "dies", "not JSON"])
async def test_a_stream_goes_on_without_token_counts(
    router: RouterProcess, engine: ScriptedEngine, other: ScriptedEngine, how: str
) -> None:
    """/tokenize only helps to count; an engine that has none, or fails in it, can still go on with the answer."""

    async def die(writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunked(chunk({"role": "assistant", "content": "one"}), chunk({"content": " two"})))
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()

    generate = first_fails(die, SSE_HEAD + chunked(chunk({"content": " three"}), FINISH, DONE) + LAST_CHUNK)

    async def script(asked: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        if "/tokenize" not in asked.line:
            await generate(asked, writer)
        elif how == "dies":
            writer.close()
        elif how == "not JSON":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno")
        else:
            writer.write(json_answer({"detail": "no"}, f"{how} X"))

    engine.script = other.script = script
    answer = await ask(router, chat(stream=True, max_tokens=50))
    assert text_of(answer) == "one two three"
    assert answer.body.count(b'"continuations":1') == 1


async def test_an_error_page_that_dribbles_is_cut(router: RouterProcess, engine: ScriptedEngine, other: ScriptedEngine) -> None:
    """A byte now and then keeps no client waiting: within seconds another replica answers, or the client gets an error."""

    async def dribble(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 X\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(chunked(b"x"))
            await writer.drain()
            await asyncio.sleep(0.2)

    engine.script = other.script = first_fails(dribble, json_answer({"text": "whole"}))
    started = time.monotonic()
    answer = await ask(router, chat())
    if answer.status == 200:
        assert json.loads(answer.body) == {"text": "whole"}
    else:
        assert (answer.status // 100, answer.error["type"]) == (5, "server_error")
    assert time.monotonic() - started < 8


async def test_an_engine_whose_streams_always_fail_gets_single_trials(
    router: RouterProcess, engine: ScriptedEngine, other: ScriptedEngine
) -> None:
    """A sound head or a first word proves nothing: once taken out it gets one request, and is out again when that fails."""
    async with scripted_behind(router) as sound:
        sound.script = writes(WHOLE)
        engine.script = writes(SSE_HEAD + chunked(ERROR_EVENT, DONE) + LAST_CHUNK)
        begun = chunk({"role": "assistant", "content": "a"})
        other.script = writes(SSE_HEAD + chunked(begun, ERROR_EVENT, DONE) + LAST_CHUNK)
        failing = {"failed at once": engine, "failed after a word": other}

        def asked() -> dict[str, int]:
            return {name: len(one.requests) for name, one in failing.items()}

        async def ask_once() -> None:
            with suppress(ValueError):  # a stream that breaks off
                await ask(router, chat(stream=True, seed=5))

        async def are_out() -> bool:
            await ask_once()
            return all(_health(router, one) == "tripped" for one in failing.values())

        async def are_tried() -> bool:
            await ask_once()
            return all(asked()[name] > before[name] for name in failing)

        await await_until(are_out, 5, "the failing replicas to be taken out")
        before = asked()
        await await_until(are_tried, 9, "a trial of each")
        for _ in range(12):
            await ask_once()
        assert {name: asked()[name] - before[name] for name in failing} == dict.fromkeys(failing, 1)


def _health(router: RouterProcess, engine: ScriptedEngine) -> str:
    listed = router.http.get(f"{router.admin}/admin/replicas").json()
    (health,) = [replica["health"] for replica in listed if replica["id"] == engine.url.removeprefix("http://")]
    return str(health)


async def test_a_stalled_replica_without_metrics_returns_when_it_serves(router: RouterProcess, engine: ScriptedEngine) -> None:
    """Its metrics proved the stall, but their absence does not prolong it: bytes of an answer are proof enough."""
    flat = b"vllm:iteration_tokens_total_count 5\nvllm:num_requests_running 1\n"
    engine.gets["/metrics"] = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(flat), flat)

    async def hang(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    engine.script = hang
    wire = raw.Wire(router.url)
    wire.send(request(chat()))
    await await_until(lambda: _health(router, engine) == "stalled", 5, "the stall to be found")
    wire.close()
    await await_until(lambda: router.in_flight() == 0, 2, "the client to be gone")
    del engine.gets["/metrics"]
    engine.script = writes(json_answer({}))
    assert (await ask(router, chat())).status == 200
    await await_until(lambda: _health(router, engine) == "ready", 2, "the replica to return")


def _table(*healths: Health) -> tuple[ReplicaTable, list[Replica]]:
    table = ReplicaTable()
    replicas = [table.add(ReplicaId(f"r{number}"), f"http://r{number}") for number in range(len(healths))]
    for replica, health in zip(replicas, healths, strict=True):
        table.observe(replica, Observation(health, engine=Endpoint("127.0.0.1", 8200), models=("m",)), 0)
    return table, replicas


def _trip(table: ReplicaTable, replica: Replica, now: float) -> None:
    while replica.breaker.admits:
        table.lease(replica).settle(Verdict.BAD, now)


def test_a_replica_that_failed_leaves_the_paused_one_to_be_asked() -> None:
    """Where the only ready replica has failed a request, one that is swapping is better than an error."""
    table, (ready, paused) = _table(Health.READY, Health.SWAPPING)
    assert table.candidates("m") == [ready]
    assert table.candidates("m", [ready]) == [paused]
    assert table.candidates("m", [ready, paused]) == []


def test_a_replica_that_failed_leaves_the_tripped_one_to_be_asked() -> None:
    """A replica that fails often is better than an error, but only after the paused one."""
    table, (ready, tripped, paused) = _table(Health.READY, Health.READY, Health.SWAPPING)
    _trip(table, tripped, 0.0)
    assert table.candidates("m") == [ready]
    assert table.candidates("m", [ready]) == [paused]
    assert table.candidates("m", [ready, paused]) == [tripped]


def test_a_replica_whose_trials_fail_is_tried_once_after_5_10_and_20_seconds() -> None:
    """However often it says a sound head first: between the trials it gets nothing."""
    table, (failing, sound) = _table(Health.READY, Health.READY)
    now = 100.0
    _trip(table, failing, now)
    for delay_s in (5.0, 10.0, 20.0):
        table.tick(now + delay_s - 0.1)
        assert table.candidates("m") == [sound]
        now += delay_s
        table.tick(now)
        assert failing in table.candidates("m")
        trial = table.lease(failing)
        assert table.candidates("m") == [sound]
        trial.settle(Verdict.BAD, now)
        assert table.candidates("m") == [sound]
