"""A replica that dies inside its answer: the same answer goes on, or the client can tell that it does not."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import openai
import pytest

from tests.faults.fault_proxy import Break, Fault
from tests.faults.stage import CHAT, MODEL, STREAM, Stage, staged, whole_text
from tests.faults.view import View, assert_cut, assert_refused, assert_whole
from tests.router.process import RouterProcess
from tests.sim import SimEngine

_BREAKS = (Break.RESET, Break.CLOSE, Break.HALF_CLOSE)
STREAM_FAULTS = {
    **{f"{how.name} behind the role": Fault(breaks=how, after_events=1) for how in _BREAKS},
    **{f"{how.name} after 7 events": Fault(breaks=how, after_events=7) for how in _BREAKS},
    **{f"{how.name} inside an event": Fault(breaks=how, after_events=7, after_bytes=60) for how in _BREAKS},
    "one byte before an event's end": Fault(breaks=Break.CLOSE, after_events=7, after_bytes=-3),
    "a byte at a time": Fault(breaks=Break.CLOSE, after_events=3, one_byte_a_time=True),
}
JSON_FAULTS = {
    **{f"{how.name} in the body": Fault(breaks=how, after_events=0, after_bytes=100) for how in _BREAKS},
    **{f"{how.name} one byte too early": Fault(breaks=how, after_events=0, after_bytes=-1) for how in _BREAKS},
}
NO_USAGE: Mapping[str, Any] = {**CHAT, "stream": True}
streams = pytest.mark.parametrize("fault", STREAM_FAULTS.values(), ids=STREAM_FAULTS.keys())


@pytest.fixture
async def without_continuation(
    router_without_continuation: RouterProcess, engines: tuple[SimEngine, SimEngine]
) -> AsyncIterator[Stage]:
    async with staged(router_without_continuation, engines, 2) as stage:
        yield stage


def assert_continued(view: View, stage: Stage, body: Mapping[str, Any]) -> None:
    """As if nothing had happened: one role, one usage of the whole answer, one seam that the answer tells of."""
    assert_whole(view, whole_text(stage.engines[0], body))
    assert (view.roles, view.finishes) == (1, ["length"])
    assert view.seams == [1]
    if "stream_options" in body:
        (usage,) = view.usages
        assert usage["completion_tokens"] == body["max_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        whole = stage.engines[0].client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1}).json()
        assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"], "what was sent already is not paid as prompt"
    else:
        assert view.usages == []
        assert all(chunk["choices"] for chunk in view.chunks), "the usage chunk that the client did not ask for"
    assert stage.upstream == 2


@streams
async def test_a_stream_goes_on_from_another_replica(two: Stage, fault: Fault) -> None:
    """The client reads one answer, no word missing and none twice, and pays it once."""
    two.faults.arm(fault)
    assert_continued(await two.ask(STREAM), two, STREAM)
    await two.assert_well()


async def test_a_continued_stream_is_counted(two: Stage) -> None:
    """Operators see that replicas die in the midst of answers although no client notices."""
    before = await two.metric("intellect_router_continuations_total")
    two.faults.arm(Fault(breaks=Break.CLOSE, after_events=7))
    assert_continued(await two.ask(STREAM), two, STREAM)
    assert await two.metric("intellect_router_continuations_total") == before + 1
    await two.assert_well()


async def test_a_stream_without_usage_goes_on_without_one(two: Stage) -> None:
    """The router's own count of tokens stays its own."""
    two.faults.arm(Fault(breaks=Break.CLOSE, after_events=7))
    assert_continued(await two.ask(NO_USAGE), two, NO_USAGE)


async def test_a_stream_goes_on_as_often_as_replicas_die(router: RouterProcess, engines: tuple[SimEngine, SimEngine]) -> None:
    """Two deaths in one answer are two seams in it, and still one answer."""
    async with staged(router, engines, 3) as stage:
        stage.faults.arm(Fault(breaks=Break.CLOSE, after_events=7), times=2)
        view = await stage.ask(STREAM)
        assert_whole(view, whole_text(engines[0], STREAM))
        assert (view.roles, view.seams, stage.upstream) == (1, [1, 2], 3)
        assert [usage["completion_tokens"] for usage in view.usages] == [30]
        await stage.assert_well()


@streams
async def test_without_another_replica_a_stream_ends_in_an_error(one: Stage, fault: Fault) -> None:
    """An error event, then a broken connection; the words before it stay, and no half event comes."""
    one.faults.arm(fault)
    view = await one.ask(STREAM)
    assert_cut(view, whole_text(one.engines[0], STREAM))
    events = fault.after_events or 0
    assert events - 1 <= len(view.chunks) <= events
    assert view.usages == []
    assert one.upstream == 1
    await one.assert_well(1)


@streams
async def test_with_continuation_off_a_stream_ends_in_an_error(without_continuation: Stage, fault: Fault) -> None:
    """Nothing is repeated once a byte of the answer is out: no second attempt at all."""
    without_continuation.faults.arm(fault)
    view = await without_continuation.ask(STREAM)
    assert_cut(view, whole_text(without_continuation.engines[0], STREAM))
    assert without_continuation.upstream == 1


@pytest.mark.parametrize("fault", JSON_FAULTS.values(), ids=JSON_FAULTS.keys())
async def test_a_whole_answer_is_asked_for_again(two: Stage, fault: Fault) -> None:
    """Nothing of it had been sent, so another replica's answer comes in its place, and one usage."""
    two.faults.arm(fault)
    view = await two.ask(CHAT)
    assert_whole(view, whole_text(two.engines[0], CHAT))
    assert [usage["completion_tokens"] for usage in view.usages] == [30]
    assert two.upstream == 2
    await two.assert_well()


@pytest.mark.parametrize("fault", JSON_FAULTS.values(), ids=JSON_FAULTS.keys())
async def test_without_another_replica_a_whole_answer_is_a_502(one: Stage, fault: Fault) -> None:
    """An error that client libraries retry, not half a JSON."""
    one.faults.arm(fault)
    assert_refused(await one.ask(CHAT), 502, "upstream_error")
    assert one.upstream == 1


@pytest.mark.parametrize("how", _BREAKS, ids=[how.name for how in _BREAKS])
@pytest.mark.parametrize(("body", "events"), [(STREAM, 31), (STREAM, 32), (NO_USAGE, 31)], ids=["finish", "usage", "unasked"])
async def test_a_death_between_the_finish_and_done_is_never_a_clean_end_of_less(
    two: Stage, how: Break, body: Mapping[str, Any], events: int
) -> None:
    """The text is there once; the end is either complete, usage and [DONE] included, or an error and a broken connection."""
    two.faults.arm(Fault(breaks=how, after_events=events))
    view = await two.ask(body)
    assert view.text == whole_text(two.engines[0], body)
    assert (view.finishes, view.roles, view.seams) == (["length"], 1, [])
    if view.is_broken:
        assert_cut(view, whole_text(two.engines[0], body))
    else:
        assert_whole(view, whole_text(two.engines[0], body))
        assert len(view.usages) == ("stream_options" in body)
    assert two.upstream == 1, "what is finished is not asked for again"


@pytest.mark.parametrize("how", _BREAKS, ids=[how.name for how in _BREAKS])
async def test_a_death_behind_done_harms_nobody(two: Stage, how: Break) -> None:
    """The answer was whole; only the last bytes of HTTP are missing, and the router has its own."""
    two.faults.arm(Fault(breaks=how, after_events=33))
    assert_whole(await two.ask(STREAM), whole_text(two.engines[0], STREAM))
    assert two.upstream == 1


@pytest.mark.parametrize("replicas", [1, 2])
async def test_an_error_that_the_engine_reports_in_its_stream(
    router: RouterProcess, engines: tuple[SimEngine, SimEngine], replicas: int
) -> None:
    """vLLM writes an error and then [DONE]; the client gets the answer's rest from elsewhere, or the error and no [DONE]."""
    engine = engines[0]
    async with staged(router, engines[:1], replicas) as stage:
        engine.add_faults({"kind": "error_frame", "after_chunks": 7, "times": 1})
        view = await stage.ask(STREAM)
        if replicas == 2:
            assert_continued(view, stage, STREAM)
        else:
            assert_cut_by_engine(view, whole_text(engine, STREAM))


def assert_cut_by_engine(view: View, text: str) -> None:
    assert (view.is_broken, view.done, len(view.errors)) == (True, 0, 1)
    assert text.startswith(view.text)
    assert view.text
    assert view.errors[0]["message"] == "Internal server error"
    assert not isinstance(view.errors[0]["code"], int)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["json", "stream"])
async def test_an_engine_that_gives_its_requests_up(
    router: RouterProcess, engines: tuple[SimEngine, SimEngine], replicas: int, body: Mapping[str, Any]
) -> None:
    """An abort in the engine (its shutdown) is a death like any other: finish reason `abort` and [DONE] reach no client."""
    long = {**body, "max_tokens": 1500}
    async with staged(router, engines, replicas) as stage:
        aborted: list[int] = []

        async def abort_once() -> None:
            while not sum(aborted):
                busy = [engine for engine in engines if engine.metric("vllm:num_requests_running")]
                aborted.extend(engine.admin("POST", "/abort_requests", json={}).json()["aborted"] for engine in busy)
                await asyncio.sleep(0.005)

        view, _ = await asyncio.gather(stage.ask(long), abort_once())
        text = whole_text(engines[0], long)
        if replicas == 2:
            assert_whole(view, text)
            assert view.finishes == ["length"] if view.is_stream else True
        elif view.is_stream and view.status == 200:
            assert_cut(view, text)
        else:
            assert_refused(view, 502, "upstream_error")


async def test_completions_go_on_too(two: Stage) -> None:
    """The second replica is asked to go on behind the words that are out, for as many tokens as are missing."""
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 20, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    two.faults.arm(Fault(breaks=Break.CLOSE, after_events=7))
    view = await two.ask(body, "/v1/completions")
    asked_for = [json.loads(request.body) for proxy in two.proxies for request in proxy.requests]
    (asked,) = [asked for asked in asked_for if asked["max_tokens"] == 13]
    sent = asked["prompt"].removeprefix("Once upon a time")
    assert whole_text(two.engines[0], body, "/v1/completions").startswith(sent)
    assert_whole(view, sent + whole_text(two.engines[0], asked, "/v1/completions"))
    assert (view.seams, [usage["completion_tokens"] for usage in view.usages]) == ([1], [20])
    assert two.upstream == 2


async def test_openais_client_raises_and_never_takes_a_part_for_the_whole(one: Stage) -> None:
    """APIError from the stream in the midst of iteration, with the words before it already delivered."""
    one.faults.arm(Fault(breaks=Break.RESET, after_events=7))
    one.sent += 1
    async with openai.AsyncOpenAI(base_url=one.router.v1, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=30, stream=True
        )
        words: list[str] = []

        async def read() -> None:
            async for chunk in stream:
                (choice,) = chunk.choices
                words.append(choice.delta.content or "")

        with pytest.raises(openai.APIError) as caught:
            await read()
    assert len(words) == 7
    assert caught.value.code == "upstream_error"


async def test_a_client_that_ignores_events_sees_a_broken_connection(one: Stage) -> None:
    """Whoever only concatenates bytes is told by HTTP itself."""
    one.faults.arm(Fault(breaks=Break.CLOSE, after_events=7))
    one.sent += 1
    with pytest.raises(httpx.RemoteProtocolError):
        await one.client.post("/v1/chat/completions", json=dict(STREAM))
