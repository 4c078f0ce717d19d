"""Pooled connections that the engine closes just when the router wants to use them."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from tests.faults.fault_proxy import Break, Fault
from tests.faults.stage import CHAT, STREAM, Stage, whole_text
from tests.faults.view import assert_refused, assert_whole

_KEEP_ALIVE_S = 0.15
_SPREAD_S = 0.05
_ROUNDS = 15
_AT_ONCE = 4
both_kinds = pytest.mark.parametrize("body", [CHAT, STREAM], ids=["json", "stream"])


async def test_no_request_is_lost_to_an_idle_close(one: Stage) -> None:
    """Sixty requests, each sent within 50 ms of the moment at which the engine closes the connection it would use."""
    one.proxies[0].closes_idle_after_s = _KEEP_ALIVE_S
    text = whole_text(one.engines[0], CHAT)
    for number in range(_ROUNDS):
        for view in await asyncio.gather(*(one.ask(STREAM if lane % 2 else CHAT) for lane in range(_AT_ONCE))):
            assert_whole(view, text)
        # The pause is what the case is about: idle times from well before the close to well behind it.
        await asyncio.sleep(_KEEP_ALIVE_S + _SPREAD_S * (2 * number / (_ROUNDS - 1) - 1))
    assert one.sent == _ROUNDS * _AT_ONCE
    assert one.upstream >= one.sent


async def test_no_request_is_lost_to_a_close_right_behind_an_answer(one: Stage) -> None:
    """An engine that closes each connection after one answer, without saying so, costs nothing but the connections."""
    one.proxies[0].closes_idle_after_s = 0.0005
    text = whole_text(one.engines[0], CHAT)
    for number in range(30):
        assert_whole(await one.ask(STREAM if number % 2 else CHAT), text)


@pytest.mark.parametrize("how", [Break.RESET, Break.CLOSE], ids=["RST", "FIN"])
@both_kinds
async def test_a_connection_that_dies_unread_is_replaced_once(one: Stage, body: Mapping[str, Any], how: Break) -> None:
    """The only replica is asked again on a fresh connection: the first one had been closed before the request came."""
    text = whole_text(one.engines[0], body)
    assert_whole(await one.ask(body), text)
    one.faults.arm(Fault(breaks=how, reaches_engine=False))
    assert_whole(await one.ask(body), text)
    first, second, third = (request.connection for request in one.proxies[0].requests)
    assert first == second != third
    assert await one.metric("intellect_router_upstream_retries_total", replica=one.proxies[0].replica_id) == 0


@both_kinds
async def test_the_fresh_connection_is_not_replaced_again(one: Stage, body: Mapping[str, Any]) -> None:
    """One replacement and no more, or a dying engine would be asked for ever."""
    assert_whole(await one.ask(body), whole_text(one.engines[0], body))
    one.faults.arm(Fault(breaks=Break.RESET, reaches_engine=False), times=None)
    assert_refused(await one.ask(body), 502, "upstream_error")
    assert one.upstream == 3
    one.faults.clear()
    await one.assert_well(1)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(breaks=Break.CLOSE, after_bytes=20),
        Fault(breaks=Break.CLOSE, after_events=0),
        Fault(breaks=Break.CLOSE, delay_s=0.3),
    ],
    ids=["inside the head", "behind the head", "late"],
)
@both_kinds
async def test_a_request_that_the_engine_has_seen_is_not_replayed(one: Stage, body: Mapping[str, Any], fault: Fault) -> None:
    """A pooled connection that dies with bytes of an answer, or long after the request, was not stale."""
    assert_whole(await one.ask(body), whole_text(one.engines[0], body))
    one.faults.arm(fault)
    assert_refused(await one.ask(body), 502, "upstream_error")
    assert one.upstream == 2
