"""Replicas that accept a request and say nothing: comments keep the client's connection alive, and the timeouts end it."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest

from tests.faults.fault_proxy import Break, Fault
from tests.faults.stage import CHAT, STREAM, Stage, staged, whole_text
from tests.faults.view import assert_cut, assert_refused, assert_whole
from tests.router.process import RouterProcess, start_router
from tests.sim import SimEngine

_SETTINGS = """
[router]
keep_alive_s = 0.2
first_byte_timeout_s = 0.9
idle_timeout_s = 0.7
"""


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    config = tmp_path_factory.mktemp("silence") / "router.toml"
    config.write_text(_SETTINGS)
    with start_router((), "--config", str(config)) as running:
        yield running


@pytest.fixture
async def pair(impatient: RouterProcess, engines: tuple[SimEngine, SimEngine]) -> AsyncIterator[Stage]:
    async with staged(impatient, engines, 2) as stage:
        yield stage


async def test_a_replica_that_never_answers_is_a_504_or_an_error_event(pair: Stage) -> None:
    """What is worked on for too long is not given to another replica to be worked on as well.

    A stream hears a comment every 0.2 s meanwhile, so that no proxy on the way gives up, and then an error event.
    """
    pair.faults.arm(Fault(breaks=Break.SILENCE), times=2)
    started = time.monotonic()
    whole, stream = await asyncio.gather(pair.ask(CHAT), pair.ask(STREAM))
    assert 0.8 < time.monotonic() - started < 4
    assert_refused(whole, 504, "upstream_timeout")
    assert_cut(stream, "", "upstream_timeout")
    assert 2 <= stream.comments <= 8
    assert pair.upstream == 2


async def test_comments_come_in_time(pair: Stage) -> None:
    """A slow first token: comments, then the whole answer; nothing of it is late."""
    pair.faults.arm(Fault(delay_s=0.7))
    view = await pair.ask(STREAM)
    assert_whole(view, whole_text(pair.engines[0], STREAM))
    assert 2 <= view.comments <= 4
    assert view.raw.startswith(b": keep-alive\n\n")


async def test_a_replica_that_dies_behind_comments_is_replaced(pair: Stage) -> None:
    """Comments are no answer: another replica may still give one."""
    pair.faults.arm(Fault(delay_s=0.5, breaks=Break.RESET))
    view = await pair.ask(STREAM)
    assert_whole(view, whole_text(pair.engines[0], STREAM))
    assert view.comments >= 1
    assert (pair.upstream, view.seams) == (2, [])


async def test_an_error_behind_comments_is_an_error_event(
    impatient: RouterProcess, engines: tuple[SimEngine, SimEngine]
) -> None:
    """The status is out already, so the failure comes as an event, and the connection breaks off."""
    async with staged(impatient, engines[:1], 1) as stage:
        stage.faults.arm(Fault(delay_s=0.5, breaks=Break.RESET))
        view = await stage.ask(STREAM)
        assert_cut(view, "")
        assert view.comments >= 1


async def test_a_stream_that_falls_silent_goes_on_elsewhere(pair: Stage) -> None:
    """Silence in the middle of an answer is a death like any other, only later."""
    pair.faults.arm(Fault(breaks=Break.SILENCE, after_events=7))
    started = time.monotonic()
    view = await pair.ask(STREAM)
    assert_whole(view, whole_text(pair.engines[0], STREAM))
    assert (view.seams, view.roles, pair.upstream) == ([1], 1, 2)
    assert view.comments >= 1
    assert 0.6 < time.monotonic() - started < 4


async def test_a_stream_that_falls_silent_ends_in_an_error_where_nobody_else_is(
    impatient: RouterProcess, engines: tuple[SimEngine, SimEngine]
) -> None:
    """The words stay, no half event comes, and the engine is freed."""
    async with staged(impatient, engines[:1], 1) as stage:
        for after_bytes in (0, 60):
            stage.faults.arm(Fault(breaks=Break.SILENCE, after_events=7, after_bytes=after_bytes))
        for view in await asyncio.gather(stage.ask(STREAM), stage.ask(STREAM)):
            assert_cut(view, whole_text(engines[0], STREAM))
            assert len(view.chunks) == 7
            assert view.comments >= 1


async def test_a_whole_answer_that_stops_in_its_middle_is_an_error(pair: Stage) -> None:
    """It had begun, so the replica is silent for the shorter of the two times."""
    pair.faults.arm(Fault(breaks=Break.SILENCE, after_events=0, after_bytes=100))
    assert_refused(await pair.ask(CHAT), 504, "upstream_timeout")
    assert pair.upstream == 1


@pytest.mark.parametrize(
    ("body", "fault"),
    [(CHAT, Fault(one_byte_a_time=True, pause_s=0.002)), (STREAM, Fault(pause_s=0.3))],
    ids=["json", "stream"],
)
async def test_slowness_is_no_silence(pair: Stage, body: Mapping[str, Any], fault: Fault) -> None:
    """An answer may take longer than any of the timeouts, as long as something of it comes now and then."""
    slow = {**body, "max_tokens": 4}
    pair.faults.arm(fault)
    started = time.monotonic()
    view = await pair.ask(slow)
    assert time.monotonic() - started > 1.2
    assert_whole(view, whole_text(pair.engines[0], slow))
    assert pair.upstream == 1


async def test_many_silent_answers_end_in_time(impatient: RouterProcess, engines: tuple[SimEngine, SimEngine]) -> None:
    """Nobody hangs, however many wait at once, and the replicas are not taken for dead afterwards."""
    async with staged(impatient, engines, 2) as stage:
        stage.faults.arm(Fault(breaks=Break.SILENCE), times=20)
        views = await asyncio.gather(*(stage.ask(STREAM if number % 2 else CHAT) for number in range(20)))
        for view in views:
            if view.status == 200:
                assert_cut(view, "", "upstream_timeout")
            else:
                assert_refused(view, 504, "upstream_timeout")
        await stage.assert_well(3)
