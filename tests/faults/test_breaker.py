"""A replica that fails again and again gets no traffic until one trial request has shown that it is mended."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest

from tests.faults.fault_proxy import Break, Fault, FaultProxy, Faults
from tests.faults.stage import CHAT, STREAM, Stage, staged, whole_text
from tests.faults.test_retries import engine_error
from tests.faults.view import assert_whole
from tests.router.process import RouterProcess, start_router
from tests.sim import SimEngine
from tests.waiting import await_until

_FAILURES_TO_OPEN = 5
_OPEN_S = 5.0


@pytest.fixture(scope="module")
def own_router() -> Iterator[RouterProcess]:
    """With a retry budget of its own."""
    with start_router() as running:
        yield running


@pytest.fixture
async def three(own_router: RouterProcess, engines: tuple[SimEngine, SimEngine]) -> AsyncIterator[Stage]:
    async with staged(own_router, engines, 3) as stage:
        yield stage


def make_sick(proxy: FaultProxy, fault: Fault) -> Faults:
    """From now on every request to this replica is hit, and no other one's."""
    proxy.faults = Faults()
    proxy.faults.arm(fault, times=None)
    return proxy.faults


async def open_breaker(stage: Stage, fault: Fault) -> Faults:
    """Asks until the first replica, which fails every request, is taken out."""
    sick = stage.proxies[0]
    faults = make_sick(sick, fault)
    text = whole_text(stage.engines[0], CHAT)
    while await stage.health(sick) == "ready":
        for view in await asyncio.gather(stage.ask(CHAT), stage.ask(STREAM), stage.ask(CHAT)):
            assert_whole(view, text)
        assert len(sick.requests) <= _FAILURES_TO_OPEN + 1, "two were asked at once"
    assert await stage.health(sick) == "tripped"
    assert len(sick.requests) >= _FAILURES_TO_OPEN
    return faults


@pytest.mark.parametrize(
    "fault",
    [engine_error(500), engine_error(504), Fault(breaks=Break.RESET), Fault(breaks=Break.CLOSE, after_events=0)],
    ids=["500", "504", "no answer", "broken answer"],
)
async def test_a_failing_replica_is_taken_out(three: Stage, fault: Fault) -> None:
    """After five failures it gets nothing any more, and clients notice nothing of any of them."""
    await open_breaker(three, fault)
    before = three.upstream
    await three.assert_well(10)
    assert three.upstream == before + 10


async def test_a_mended_replica_returns_after_a_trial(three: Stage) -> None:
    """It gets one trial at a time, and its share of the traffic once one succeeds."""
    sick = three.proxies[0]
    text = whole_text(three.engines[0], CHAT)
    faults = await open_breaker(three, engine_error(500))
    opened_at = time.monotonic()
    failures = len(sick.requests)

    # The trial takes a while, so that others have the chance to join it.
    faults.clear()
    faults.arm(Fault(delay_s=0.3))
    most_at_once = 0

    async def is_tried() -> bool:
        nonlocal most_at_once
        asking = [asyncio.ensure_future(three.ask(CHAT)) for _ in range(6)]
        while not all(task.done() for task in asking):
            most_at_once = max(most_at_once, sick.open_requests)
            if await three.health(sick) != "tripped":
                break
            await asyncio.sleep(0.005)
        for task in asking:
            assert_whole(await task, text)
        return len(sick.requests) > failures

    await await_until(is_tried, _OPEN_S + 3, "a trial")
    assert time.monotonic() - opened_at > _OPEN_S - 1.5, "it was left alone for a while"
    assert most_at_once <= 1
    await three.await_health(sick, "ready")
    before = len(sick.requests)
    await three.assert_well(12)
    assert len(sick.requests) > before


async def test_the_last_replica_is_never_taken_out(own_router: RouterProcess, engines: tuple[SimEngine, SimEngine]) -> None:
    """A replica that fails is better than none: every request reaches it, and the first good answer reaches the client."""
    async with staged(own_router, engines[:1], 1) as stage:
        stage.faults.arm(engine_error(500, "sick"), times=None)
        for _ in range(30):
            view = await stage.ask(CHAT)
            assert (view.status, view.error["message"]) == (500, "sick")
        assert stage.upstream == 30
        stage.faults.clear()
        await stage.assert_well(1)


async def test_a_fleet_that_fails_as_a_whole_still_gets_its_requests(
    own_router: RouterProcess, engines: tuple[SimEngine, SimEngine]
) -> None:
    """With every replica failing at least one is always asked, and the service is back with the first that is mended."""
    async with staged(own_router, engines, 2) as stage:
        stage.faults.arm(engine_error(500, "sick"), times=None)
        for _ in range(30):
            before = stage.upstream
            view = await stage.ask(CHAT)
            assert (view.status, view.error["message"]) == (500, "sick")
            assert stage.upstream > before
        stage.faults.clear()
        await stage.assert_well(3)


@pytest.mark.parametrize("status", [400, 404, 422, 429, 503])
async def test_refusals_and_overload_are_no_failures(three: Stage, status: int) -> None:
    """Bad requests of one client, or a full queue, take no replica from the others."""
    sick = three.proxies[0]
    make_sick(sick, engine_error(status))
    for _ in range(12):
        await asyncio.gather(*(three.ask(CHAT) for _ in range(3)))
    assert len(sick.requests) > 2 * _FAILURES_TO_OPEN
    assert await three.health(sick) == "ready"


async def test_clients_that_leave_are_no_failures(three: Stage) -> None:
    """Closing tabs takes no replica out."""
    sick = three.proxies[0]
    make_sick(sick, Fault(breaks=Break.SILENCE))
    while len(sick.requests) < 2 * _FAILURES_TO_OPEN:
        asking = [asyncio.ensure_future(three.ask(STREAM)) for _ in range(3)]
        before = len(sick.requests)
        await await_until(partial(is_asked_again, sick, before), 3, "the silent replica to be asked")
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await await_until(lambda: sick.open_requests == 0, 2, "the router to let go")
    assert await three.health(sick) == "ready"


def is_asked_again(proxy: FaultProxy, before: int) -> bool:
    return len(proxy.requests) > before
