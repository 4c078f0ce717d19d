"""SIGTERM: the router takes nothing new, what runs is finished, and the process ends with 0."""

import asyncio
import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.faults.fault_proxy import Break, Fault, Faults, fault_proxy
from tests.faults.stage import CHAT, CHAT_PATH, ENDLESS, STREAM, in_engine, no_tls, whole_text
from tests.faults.view import View, assert_cut, assert_whole
from tests.router.process import RouterProcess, start_router
from tests.sim import SimEngine
from tests.waiting import await_until

_LONG: Mapping[str, Any] = {**STREAM, "max_tokens": 2500}  # about a second
_LONG_WHOLE: Mapping[str, Any] = {**CHAT, "max_tokens": 2500}


async def ask(router: RouterProcess, body: Mapping[str, Any]) -> View:
    async with httpx.AsyncClient(base_url=router.url, timeout=30, verify=no_tls()) as client:
        raw, is_broken = bytearray(), False
        async with client.stream("POST", CHAT_PATH, json=dict(body)) as response:
            try:
                async for part in response.aiter_raw():
                    raw += part
            except httpx.RemoteProtocolError:
                is_broken = True
        return View(response.status_code, response.headers, bytes(raw), is_broken)


async def all_run(engines: Sequence[SimEngine], count: int) -> None:
    await await_until(lambda: sum(in_engine(engine) for engine in engines) == count, 10, f"{count} requests to run")


async def ended(router: RouterProcess, timeout_s: float) -> int:
    """The exit status of a router that was told to stop."""
    await await_until(lambda: router.process.poll() is not None, timeout_s, f"the router to end; its log:\n{router.log}")
    status = router.process.returncode
    assert status is not None
    return status


def outcomes(router: RouterProcess) -> list[str]:
    """From the access log, since nobody answers for the metrics any more."""
    lines = [line for line in router.log.splitlines() if line.startswith("{") and '"outcome"' in line]
    return [json.loads(line)["outcome"] for line in lines]


async def test_running_streams_are_finished_before_the_router_ends(engines: tuple[SimEngine, SimEngine]) -> None:
    """Every one of them ends with its [DONE]; /ready says no meanwhile, nothing new is taken, and the status is 0."""
    with start_router([engine.url for engine in engines]) as router:
        async with httpx.AsyncClient(base_url=router.url, timeout=10, verify=no_tls()) as kept:
            assert (await kept.get("/ready")).status_code == 200
            asking = [asyncio.create_task(ask(router, body)) for body in (_LONG, _LONG_WHOLE) for _ in range(5)]
            await all_run(engines, 10)
            router.process.send_signal(signal.SIGTERM)
            text = whole_text(engines[0], _LONG)

            async def is_refused() -> bool:
                try:
                    response = await kept.get("/ready")
                except httpx.TransportError:
                    return True
                return response.status_code == 503

            await await_until(is_refused, 1, "the router not to be ready")
            try:
                refused = await kept.post(CHAT_PATH, json=dict(STREAM))
            except httpx.TransportError:
                pass  # nobody listens any more
            else:
                assert refused.status_code == 503
                assert refused.headers["connection"] == "close"
            for view in await asyncio.gather(*asking):
                assert_whole(view, text)
        assert await ended(router, 5) == 0
        assert outcomes(router).count("completed") == 10
        assert set(outcomes(router)) <= {"completed", "rejected_no_replica", "shutdown"}
    for engine in engines:
        assert in_engine(engine) == 0


async def test_a_stream_is_continued_while_the_router_drains(engines: tuple[SimEngine, SimEngine]) -> None:
    """A replica that dies in the last seconds of a router costs no answer either."""
    faults = Faults()
    async with fault_proxy(engines[0].port, faults) as one, fault_proxy(engines[1].port, faults) as two:
        one.hides_weights = two.hides_weights = True
        with start_router([one.url, two.url], wait=False) as router:
            await await_ready(router, 2)
            faults.arm(Fault(breaks=Break.CLOSE, after_events=1500))
            asking = asyncio.create_task(ask(router, _LONG))
            await all_run(engines, 1)
            router.process.send_signal(signal.SIGTERM)
            view = await asking
            assert_whole(view, whole_text(engines[0], _LONG))
            assert view.seams == [1]
            assert await ended(router, 5) == 0


async def await_ready(router: RouterProcess, count: int) -> None:
    async with httpx.AsyncClient(base_url=router.admin, verify=no_tls()) as admin:

        async def is_ready() -> bool:
            listed: list[dict[str, Any]] = (await admin.get("/admin/replicas")).json()
            return len([replica for replica in listed if replica["health"] == "ready"]) == count

        await await_until(is_ready, 10, f"{count} ready replicas")


async def test_what_takes_too_long_is_cut_honestly(engines: tuple[SimEngine, SimEngine], tmp_path: Path) -> None:
    """When the drain's time is over a stream gets an error event and a broken connection, and its engine is freed."""
    config = tmp_path / "router.toml"
    config.write_text("[router]\ndrain_timeout_s = 1\n")
    with start_router([engines[0].url], "--config", str(config)) as router:
        stream = asyncio.create_task(ask(router, {**ENDLESS, "stream": True}))
        whole = asyncio.create_task(ask(router, ENDLESS))
        await all_run(engines[:1], 2)
        router.process.send_signal(signal.SIGTERM)
        views = await asyncio.gather(stream, whole, return_exceptions=True)
        streamed, answered = views
        assert isinstance(streamed, View)
        assert (streamed.is_broken, streamed.done) == (True, 0)
        if streamed.errors:
            assert_cut(streamed, streamed.text, streamed.errors[0]["code"])
        assert isinstance(answered, httpx.RemoteProtocolError) or (isinstance(answered, View) and answered.status == 503)
        assert await ended(router, 5) == 0
        assert outcomes(router) == ["shutdown", "shutdown"]
    await await_until(lambda: in_engine(engines[0]) == 0, 1, "the engine to be free")
