"""A replica that fails before the first byte of its answer: another one answers, or the client gets an HTTP error."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx
import openai
import pytest

from tests.faults.fault_proxy import Break, Fault
from tests.faults.stage import CHAT, MODEL, STREAM, Stage, whole_text
from tests.faults.view import assert_refused, assert_whole
from tests.scripted_engine import json_answer
from tests.waiting import await_until

_BREAKS = (Break.RESET, Break.CLOSE, Break.HALF_CLOSE)
_NO_LENGTH = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
FAULTS = {
    **{f"{how.name} unread": Fault(breaks=how, reaches_engine=False) for how in _BREAKS},
    **{f"{how.name} instead of the first byte": Fault(breaks=how) for how in _BREAKS},
    **{f"{how.name} inside the head": Fault(breaks=how, after_bytes=20) for how in _BREAKS},
    **{f"{how.name} behind the head": Fault(breaks=how, after_events=0) for how in _BREAKS},
    "not HTTP": Fault(answer=b"\x16\x03\x01\x02\x00 no HTTP at all\r\n\r\n", breaks=Break.CLOSE),
    "status 999": Fault(answer=b"HTTP/1.1 999 X\r\ncontent-length: 2\r\n\r\n{}"),
    "headers too long": Fault(answer=b"HTTP/1.1 200 OK\r\nx-a: " + b"a" * 300_000 + b"\r\ncontent-length: 2\r\n\r\n{}"),
    "no chunk size": Fault(answer=_NO_LENGTH + b"zz\r\n{}", breaks=Break.CLOSE),
}
HARMLESS = {
    "late": Fault(delay_s=0.3),
    "a byte at a time": Fault(one_byte_a_time=True),
    "slow to take the request": Fault(read_bytes_per_s=8_000_000),
}
both_kinds = pytest.mark.parametrize("body", [CHAT, STREAM], ids=["json", "stream"])


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
@both_kinds
async def test_another_replica_answers_in_its_place(two: Stage, body: Mapping[str, Any], fault: Fault) -> None:
    """The client gets the whole answer of the second replica and notices nothing; the engines got the request once each."""
    two.faults.arm(fault)
    view = await two.ask(body)
    assert_whole(view, whole_text(two.engines[0], body))
    assert len(view.usages) == 1
    assert view.seams == [] if view.is_stream else True
    assert (two.faults.hit, sorted(len(proxy.requests) for proxy in two.proxies)) == (1, [1, 1])
    await two.assert_well()


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
@both_kinds
async def test_without_another_replica_it_is_a_502(one: Stage, body: Mapping[str, Any], fault: Fault) -> None:
    """Also for a stream an HTTP error, which every client library retries; the next request is served."""
    one.faults.arm(fault)
    assert_refused(await one.ask(body), 502, "upstream_error")
    assert one.upstream == 1, "a fresh connection is no stale one"
    await one.assert_well(1)


@pytest.mark.parametrize("fault", HARMLESS.values(), ids=HARMLESS.keys())
@both_kinds
async def test_what_is_only_slow_is_waited_for(one: Stage, body: Mapping[str, Any], fault: Fault) -> None:
    """A slow network changes nothing of an answer."""
    one.faults.arm(fault)
    sent = {**body, "user": "x" * 4_000_000} if fault.read_bytes_per_s else body
    assert_whole(await one.ask(sent), whole_text(one.engines[0], body))
    assert (one.faults.hit, one.upstream) == (1, 1)


@pytest.mark.parametrize("resets", [False, True], ids=["refuses", "resets each connection"])
@both_kinds
async def test_a_replica_that_takes_no_connections_is_replaced(two: Stage, body: Mapping[str, Any], resets: bool) -> None:
    """The request goes to another replica, and so do those behind it; when it listens again it gets requests again."""
    gone = two.proxies[0]
    await gone.refuse()
    if resets:
        gone.resets_connections = True
        await gone.listen()
    for view in await asyncio.gather(*(two.ask(body) for _ in range(4))):
        assert_whole(view, whole_text(two.engines[0], body))
    assert (len(gone.requests), len(two.proxies[1].requests)) == (0, 4)
    await two.await_health(gone, "down")
    gone.resets_connections = False
    if not resets:
        await gone.listen()
    await two.await_health(gone, "ready")

    async def is_used() -> bool:
        await two.assert_well(2)
        return bool(gone.requests)

    await await_until(is_used, 5, "the replica to get requests again")


@both_kinds
async def test_the_only_replica_that_takes_no_connections_is_a_502_and_then_a_503(one: Stage, body: Mapping[str, Any]) -> None:
    """Nobody waits for a connection that nobody takes; once the router knows, it says for how long to stay away."""
    (gone,) = one.proxies
    probes = gone.probes
    await await_until(lambda: gone.probes > probes, 5, "a probe: the router believes the replica to be well")
    await gone.refuse()
    view = await one.ask(body)
    assert (view.status, view.error["code"]) in ((502, "upstream_error"), (503, "no_replica"))  # a probe may be first
    await one.await_health(gone, "down")
    assert_refused(await one.ask(body), 503, "no_replica")
    await gone.listen()
    await one.await_health(gone, "ready")
    await one.assert_well(1)


async def test_openais_client_raises_an_error_it_would_retry(one: Stage) -> None:
    """A failure before the first byte is an InternalServerError for a stream too; with its retries the client succeeds."""
    async with openai.AsyncOpenAI(base_url=one.router.v1, api_key="none", max_retries=0) as client:
        for stream in (False, True):
            one.faults.arm(Fault(breaks=Break.RESET))
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream=stream
                )
            assert (caught.value.status_code, caught.value.code) == (502, "upstream_error")
        one.faults.arm(Fault(breaks=Break.RESET))
        retrying = client.with_options(max_retries=2)
        answer = await retrying.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=3)
        assert answer.choices[0].message.content
    one.sent += 4


async def test_each_route_fails_in_its_own_shape(one: Stage) -> None:
    """Completions fail as chat does; Anthropic's clients find the error where they look for it."""
    one.faults.arm(Fault(breaks=Break.RESET), times=2)
    assert_refused(await one.ask({"model": MODEL, "prompt": "hi", "max_tokens": 3}, "/v1/completions"), 502, "upstream_error")
    body = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
    view = await one.ask(body, "/v1/messages")
    assert view.status == 502
    assert view.json["type"] == "error"
    assert view.json["error"]["type"] == "api_error"
    assert set(view.json) == {"type", "error", "request_id"}


async def test_a_refused_request_leaves_its_connection_usable(one: Stage) -> None:
    """The client's own connection survives the failures of replicas."""
    async with httpx.AsyncClient(base_url=one.router.url, timeout=10) as client:
        streams = set()
        for _ in range(3):
            one.faults.arm(Fault(answer=json_answer({"error": {"message": "broken"}}, "500 X")))
            one.sent += 2
            for expected in (500, 200):
                response = await client.post("/v1/chat/completions", json=dict(CHAT))
                assert response.status_code == expected, response.text
                json.loads(response.content)
                streams.add(id(response.extensions["network_stream"]))
        assert len(streams) == 1
