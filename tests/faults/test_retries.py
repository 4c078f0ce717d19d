"""Engine errors before the first byte: which are retried, how often, and what the client gets when nothing helps."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import openai
import pytest

from tests.faults.fault_proxy import Break, Fault
from tests.faults.stage import CHAT, MODEL, STREAM, Stage, staged, whole_text
from tests.faults.view import assert_refused, assert_whole
from tests.router.process import RouterProcess, start_router
from tests.scripted_engine import json_answer
from tests.sim import SimEngine

_FLOOR = 10  # retries that each ten seconds allow whatever succeeds
_WINDOW_S = 10
_SHARE = 0.2
both_kinds = pytest.mark.parametrize("body", [CHAT, STREAM], ids=["json", "stream"])


def engine_error(status: int, message: str = "not now", retry_after: str | None = None) -> Fault:
    error = {"message": message, "type": "SomeError", "param": None, "code": status}
    extra = "" if retry_after is None else f"retry-after: {retry_after}\r\n"
    return Fault(answer=json_answer({"error": error}, f"{status} X", extra))


@pytest.fixture
async def fresh(engines: tuple[SimEngine, SimEngine]) -> AsyncIterator[Stage]:
    """Two replicas behind a router whose retry budget nobody has used."""
    with start_router() as router:
        async with staged(router, engines, 2) as stage:
            yield stage


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
@both_kinds
async def test_an_engines_error_is_answered_by_another_replica(two: Stage, body: Mapping[str, Any], status: int) -> None:
    """One replica's trouble is not the client's."""
    two.faults.arm(engine_error(status))
    view = await two.ask(body)
    assert_whole(view, whole_text(two.engines[0], body))
    assert [len(proxy.requests) for proxy in two.proxies] == [1, 1]
    await two.assert_well()


@pytest.mark.parametrize("status", [400, 404, 409, 413, 422])
@both_kinds
async def test_a_refusal_of_the_request_is_final(two: Stage, body: Mapping[str, Any], status: int) -> None:
    """What is wrong with a request is wrong everywhere: one attempt, the engine's own word, no mark against the replica."""
    two.faults.arm(engine_error(status, "bad idea"), times=12)
    for _ in range(12):
        view = await two.ask(body)
        assert (view.status, view.error["message"]) == (status, "bad idea")
        assert view.error["type"] == "invalid_request_error"
    assert two.upstream == 12
    assert [await two.health(proxy) for proxy in two.proxies] == ["ready", "ready"]
    await two.assert_well(2)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
@both_kinds
async def test_when_all_replicas_fail_the_last_ones_word_counts(two: Stage, body: Mapping[str, Any], status: int) -> None:
    """The client gets the engine's status and message, and how long it says to wait."""
    two.faults.arm(engine_error(500 if status != 500 else 503, "the first one's"))
    two.faults.arm(engine_error(status, "the last one's", "7"))
    view = await two.ask(body)
    assert (view.status, view.error["message"]) == (status, "the last one's")
    assert view.error["type"] == ("rate_limit_error" if status == 429 else "server_error")
    assert view.headers["retry-after"] == "7"
    assert two.upstream == 2
    await two.assert_well()


@both_kinds
async def test_an_engines_word_counts_more_than_a_connection_that_broke(two: Stage, body: Mapping[str, Any]) -> None:
    """A full queue on one replica and a dead one: the client is told to wait, not that something broke."""
    two.faults.arm(engine_error(429, "slow down", "7"))
    two.faults.arm(Fault(breaks=Break.RESET, reaches_engine=False))
    view = await two.ask(body)
    assert_refused(view, 429, None)
    assert (view.error["message"], view.headers["retry-after"]) == ("slow down", "7")


@pytest.mark.parametrize(("given", "told"), [("300", "60"), ("0", "1"), ("soon", "2"), (None, "2")])
async def test_the_wait_is_one_that_clients_obey(one: Stage, given: str | None, told: str) -> None:
    """Between 1 and 60 seconds, whatever the engine says."""
    one.faults.arm(engine_error(503, retry_after=given))
    view = await one.ask(CHAT)
    assert_refused(view, 503, None)
    assert view.headers["retry-after"] == told


async def test_at_most_three_replicas_are_asked(router: RouterProcess, engines: tuple[SimEngine, SimEngine]) -> None:
    """A request that fails everywhere fails soon."""
    async with staged(router, engines, 4) as stage:
        stage.faults.arm(engine_error(503), times=None)
        assert_refused(await stage.ask(CHAT), 503, None)
        assert sorted(len(proxy.requests) for proxy in stage.proxies) == [0, 1, 1, 1]
        stage.faults.clear()
        await stage.assert_well(10)


async def test_a_dead_fleet_is_not_asked_more_often_than_the_budget_allows(fresh: Stage) -> None:
    """Two hundred requests to a fleet of two that is dead cost ten retries, not two hundred; successes add to that."""
    fresh.faults.arm(engine_error(503), times=None)
    started = time.monotonic()
    for _ in range(20):
        for view in await asyncio.gather(*(fresh.ask(STREAM if number % 2 else CHAT) for number in range(10))):
            assert_refused(view, 503, None)
    retries = fresh.upstream - 200
    assert 0 < retries <= allowed(started, successes=0)
    fresh.faults.clear()
    await fresh.assert_well(30)
    before = fresh.upstream
    fresh.faults.arm(engine_error(503), times=None)
    views = await asyncio.gather(*(fresh.ask(CHAT) for _ in range(30)))
    assert [view.status for view in views] == [503] * 30
    more = fresh.upstream - before - 30
    assert 0 < more <= allowed(started, successes=30) - retries


def allowed(started: float, successes: int) -> float:
    """Retries, as long as the successes are of the last ten seconds."""
    return _FLOOR * (1 + int((time.monotonic() - started) / _WINDOW_S)) + _SHARE * successes


async def test_retries_of_client_libraries_use_the_budget_up(fresh: Stage) -> None:
    """When clients already retry by themselves the router does not multiply it."""
    text = whole_text(fresh.engines[0], CHAT)
    for _ in range(20):  # more than the floor and a fifth of them
        assert_whole(await fresh.ask(CHAT, headers={"x-stainless-retry-count": "1"}), text)
    before = fresh.upstream
    for _ in range(3):
        fresh.faults.arm(engine_error(503))
        assert_refused(await fresh.ask(CHAT), 503, None)
    assert fresh.upstream - before == 3


async def test_openais_client_and_the_router_do_not_multiply_their_retries(two: Stage) -> None:
    """A client with two retries of its own against a dead fleet: three requests, at most two replicas each."""
    two.faults.arm(engine_error(503, retry_after="1"), times=None)
    async with openai.AsyncOpenAI(base_url=two.router.v1, api_key="none", max_retries=2) as client:
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    two.sent += 3
    assert 3 <= two.upstream <= 6
    two.faults.clear()
    await two.assert_well(15)
