"""Which streams go on from another replica when theirs dies, and which end in an error because a seam could show."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest

from tests.faults.fault_proxy import Break, Fault, Faults
from tests.faults.stage import CHAT, ENDLESS, LOAD_FLAG, MODEL, STREAM, Stage, staged, whole_text
from tests.faults.view import View, assert_cut, assert_whole
from tests.router.process import RouterProcess
from tests.sim import SimEngine, start_sim_engine
from tests.waiting import await_until

_DEATH = Fault(breaks=Break.CLOSE, after_events=7)
_NO_ANSWER = Fault(breaks=Break.CLOSE, after_events=0)  # with a head, so on no stale connection
_NATURAL: Mapping[str, Any] = {name: value for name, value in STREAM.items() if name not in ("max_tokens", "ignore_eos")}
_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in "abcdefgh"},
    "required": list("abcdefgh"),
}
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
_TOOL_WITH_ARGUMENTS = {"type": "function", "function": {"name": "look", "parameters": _SCHEMA}}
SAFE: Mapping[str, Mapping[str, Any]] = {
    "to its natural end": _NATURAL,
    "greedy": {**STREAM, "temperature": 0},
    "max_completion_tokens": {**_NATURAL, "ignore_eos": True, "max_completion_tokens": 30},
    "n of 1": {**STREAM, "n": 1},
    "nulls": {**STREAM, "seed": None, "logprobs": None, "stop": None, "tools": None, "response_format": None},
    "a stop that is nowhere near": {**STREAM, "stop": ["#"]},
    "response_format text": {**STREAM, "response_format": {"type": "text"}},
    "penalties of nothing": {**STREAM, "presence_penalty": 0, "frequency_penalty": 0.0},
    "a message that the client began": {
        **STREAM,
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure:"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "a long conversation": {
        **STREAM,
        "messages": [
            {"role": "system", "content": 'Say "naïve \\ 你好".'},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "go on"},
        ],
    },
}
UNSAFE: list[dict[str, Any]] = [
    {"n": 2},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 2},
    {"seed": 7},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"repetition_penalty": 1.1},
    {"logit_bias": {"50": 1}},
    {"min_tokens": 20},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}},
    {"tools": [_TOOL], "tool_choice": "none"},
    {"tools": [_TOOL_WITH_ARGUMENTS], "tool_choice": "required"},
]


@pytest.fixture(scope="module")
def reasoning_engine() -> Iterator[SimEngine]:
    with start_sim_engine(LOAD_FLAG, "--reasoning-parser", "any", "--answer-tokens-mean", "40") as engine:
        yield engine


@pytest.fixture
async def reasoning(router: RouterProcess, reasoning_engine: SimEngine) -> AsyncIterator[Stage]:
    async with staged(router, [reasoning_engine], 2) as stage:
        yield stage


def assert_ended_in_error(view: View) -> None:
    """Whatever had come, the client knows that it is not the whole."""
    assert (view.status, view.is_broken, view.done) == (200, True, 0)
    assert [error["code"] for error in view.errors] == ["upstream_error"]
    assert view.seams == []
    assert view.usages == []


@pytest.mark.parametrize("body", SAFE.values(), ids=SAFE.keys())
async def test_a_stream_that_another_replica_can_finish_goes_on(two: Stage, body: Mapping[str, Any]) -> None:
    """The text, the finish and the usage are those of the uninterrupted answer."""
    whole = two.engines[0].client.post("/v1/chat/completions", json={**body, "stream": False, "stream_options": None}).json()
    two.faults.arm(_DEATH)
    view = await two.ask(body)
    assert_whole(view, whole["choices"][0]["message"]["content"])
    assert view.finishes == [whole["choices"][0]["finish_reason"]]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [[usage[name] for name in counts] for usage in view.usages] == [[whole["usage"][name] for name in counts]]
    assert (view.roles, view.seams, two.upstream) == (1, [1], 2)
    await two.assert_well()


@pytest.mark.parametrize("fields", UNSAFE, ids=[", ".join(fields) for fields in UNSAFE])
async def test_a_stream_that_would_not_be_the_same_ends_in_an_error(two: Stage, fields: Mapping[str, Any]) -> None:
    """What cannot be continued exactly is not continued: an error event, a broken connection, no second request."""
    two.faults.arm(_DEATH)
    counted = await two.metric("intellect_router_continuations_total")
    assert_ended_in_error(await two.ask({**STREAM, **fields}))
    assert two.upstream == 1
    assert await two.metric("intellect_router_continuations_total") == counted + 1, "why not is counted"
    await two.assert_well(1)


async def test_a_half_matched_stop_is_not_continued(two: Stage) -> None:
    """The second engine would not know that the first letters of the stop string are already out."""
    words = whole_text(two.engines[0], STREAM).split(" ")
    body = {**STREAM, "stop": [f"{words[5][-2:]}QQ"], "include_stop_str_in_output": True}
    two.faults.arm(_DEATH)
    view = await two.ask(body)
    assert view.text == " ".join(words[:6])
    assert_ended_in_error(view)
    assert two.upstream == 1


async def test_reasoning_that_is_out_is_not_continued(reasoning: Stage) -> None:
    """A reasoning that was begun cannot be handed over as text."""
    reasoning.faults.arm(_DEATH)
    view = await reasoning.ask(STREAM)
    assert any("reasoning" in choice["delta"] for choice in view.choices)
    assert_ended_in_error(view)
    assert reasoning.upstream == 1


async def test_an_echoing_completion_is_not_continued(two: Stage) -> None:
    """The prompt would come twice."""
    two.faults.arm(_DEATH)
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 20, "ignore_eos": True, "stream": True, "echo": True}
    assert_ended_in_error(await two.ask(body, "/v1/completions"))
    assert two.upstream == 1


async def test_a_completion_of_several_prompts_is_not_continued(two: Stage) -> None:
    """Its choices are answers to different prompts."""
    two.faults.arm(_DEATH)
    body = {"model": MODEL, "prompt": ["hi", "ho"], "max_tokens": 20, "ignore_eos": True, "stream": True}
    assert_ended_in_error(await two.ask(body, "/v1/completions"))
    assert two.upstream == 1


async def test_engines_that_name_the_same_weights_continue_each_other(
    router: RouterProcess, engines: tuple[SimEngine, SimEngine]
) -> None:
    """Engines without an agent say only with an answer which weights they serve; that is early enough."""
    async with staged(router, engines, 2, hides_weights=False) as stage:
        stage.faults.arm(_DEATH)
        view = await stage.ask(STREAM)
        assert_whole(view, whole_text(engines[0], STREAM))
        assert (view.headers["x-intellect-checkpoint"], view.seams, stage.upstream) == ("base", [1], 2)
        await stage.assert_well()


async def test_no_answer_is_continued_with_other_weights(router: RouterProcess, engines: tuple[SimEngine, SimEngine]) -> None:
    """The words of one version are never followed by those of another, and to serve another is no fault of a replica."""
    relabel(engines[1], "v9")
    try:
        async with staged(router, engines, 2, hides_weights=False) as stage:
            dying, other = stage.proxies
            dying.faults = Faults()
            dying.faults.arm(_DEATH, times=None)
            # While the other one has something to do it gets only what the dying one has left.
            await stage.drain(dying, True)
            busy = asyncio.create_task(stage.ask({**ENDLESS, "stream": True}))
            await await_until(lambda: other.open_requests == 1, 5, "the other one to be busy")
            await stage.drain(dying, False)
            for _ in range(5):  # as many failures as would take a replica out
                view = await stage.ask(STREAM)
                assert_ended_in_error(view)
                assert view.text == " ".join(whole_text(engines[0], STREAM).split(" ")[:6])
            assert len(dying.requests) == 5
            busy.cancel()
            await asyncio.gather(busy, return_exceptions=True)
            assert await stage.health(other) == "ready"
    finally:
        relabel(engines[1], "base")


def relabel(engine: SimEngine, version: str) -> None:
    engine.admin("POST", "/update_weight_version", json={"new_version": version}).raise_for_status()


async def test_a_second_replica_that_cannot_go_on_is_an_error_too(two: Stage) -> None:
    """The client gets the one error event of a broken answer, not a second head or an error page in its stream."""
    two.faults.arm(_DEATH)
    two.faults.arm(_NO_ANSWER)
    view = await two.ask(STREAM)
    assert_cut(view, whole_text(two.engines[0], STREAM))
    assert two.upstream == 2


async def test_a_continuation_goes_past_a_replica_that_refuses_it(
    router: RouterProcess, engines: tuple[SimEngine, SimEngine]
) -> None:
    """With a third replica there, the failure of the second before its first byte is retried like any other."""
    async with staged(router, engines, 3) as stage:
        stage.faults.arm(_DEATH)
        stage.faults.arm(_NO_ANSWER)
        view = await stage.ask(STREAM)
        assert_whole(view, whole_text(engines[0], CHAT))
        assert (view.seams, stage.upstream) == ([1], 3)
        await stage.assert_well()
