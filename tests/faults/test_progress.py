"""A replica that looks healthy and computes nothing is found out by its progress; one that is only slow or paused is not."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from protocol.publisher import publish
from protocol.status import ReplicaState
from server.sim_model import write_sim_model
from tests.faults.stage import CHAT, LOAD_FLAG, STREAM, Stage, staged, whole_text
from tests.faults.view import assert_whole
from tests.router.process import RouterProcess, start_router
from tests.server.agent_process import AgentProcess
from tests.sim import SimEngine, start_sim_engine
from tests.waiting import await_until

_EJECTED_WITHIN_S = 5.0
_SUSPICIOUS_AFTER_S = 1.0
_SWAPPED = "swapped"


@pytest.fixture(scope="module")
def watchful() -> Iterator[RouterProcess]:
    """At the default interval of a second."""
    with start_router((), "--health-interval", "1") as running:
        yield running


@pytest.fixture(scope="module")
def suspicious(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    """Takes a second without progress for a stall, so that what it lets pass is well on the safe side."""
    config = tmp_path_factory.mktemp("progress") / "router.toml"
    config.write_text(f"[router]\nstall_after_s = {_SUSPICIOUS_AFTER_S}\n")
    with start_router((), "--config", str(config)) as running:
        yield running


@asynccontextmanager
async def watching(stage: Stage) -> AsyncIterator[list[str]]:
    """Every health that any replica is seen in meanwhile."""
    seen: list[str] = []

    async def watch() -> None:
        while True:
            seen.extend(replica["health"] for replica in (await stage.replicas()).values())
            await asyncio.sleep(0.05)

    task = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_stalled_replica_is_ejected_and_its_waiting_requests_are_placed_again(
    watchful: RouterProcess, engines: tuple[SimEngine, SimEngine]
) -> None:
    """/health says 200 all the time; within five seconds the requests that wait there are answered by the other replica."""
    hung = engines[0]
    long = {**STREAM, "max_tokens": 200}
    async with staged(watchful, engines, 2) as stage:
        stalled, well = stage.proxies
        hung.add_faults({"kind": "stall", "after_chunks": 7, "times": 1})
        begun = [asyncio.ensure_future(stage.ask(long, timeout_s=30)) for _ in range(2)]  # one on each
        try:
            await await_until(lambda: is_hung(hung), 5, "the engine to hang")
            started = time.monotonic()
            bodies = [STREAM if number % 2 else CHAT for number in range(8)]
            asking = [asyncio.ensure_future(stage.ask(body, timeout_s=30)) for body in bodies]
            await await_until(lambda: len(stalled.requests) > 1, 3, "requests to wait there")
            await stage.await_health(stalled, "stalled", _EJECTED_WITHIN_S)
            views = await asyncio.gather(*asking)
            assert time.monotonic() - started < _EJECTED_WITHIN_S + 0.5
            for view in views:
                assert_whole(view, whole_text(engines[1], CHAT))
                assert len(view.usages) == 1
            before = len(stalled.requests)
            assert len(well.requests) == 1 + len(views), "each of them was answered there"
            await stage.assert_well(6)
            assert len(stalled.requests) == before, "nothing new goes to a stalled replica"
        finally:
            hung.clear_faults()
        for view in await asyncio.gather(*begun):
            assert_whole(view, whole_text(engines[1], long))
            assert view.seams == [], "what had output waited for its engine"
        await stage.await_health(stalled, "ready", _EJECTED_WITHIN_S)

        async def is_used() -> bool:
            await stage.assert_well(2)
            return len(stalled.requests) > before

        await await_until(is_used, 5, "the recovered replica to get requests")


async def test_requests_wait_for_the_only_replica_when_it_stalls(
    suspicious: RouterProcess, engines: tuple[SimEngine, SimEngine]
) -> None:
    """Nobody else could answer them: they are not thrown away, and an engine that comes back answers them."""
    hung = engines[0]
    async with staged(suspicious, engines[:1], 1) as stage:
        hung.add_faults({"kind": "stall", "after_chunks": 7, "times": 1})
        begun = asyncio.ensure_future(stage.ask(STREAM, timeout_s=30))
        try:
            await await_until(lambda: is_hung(hung), 5, "the engine to hang")
            waiting = asyncio.ensure_future(stage.ask(CHAT, timeout_s=30))
            await stage.await_health(stage.proxies[0], "stalled", _EJECTED_WITHIN_S)
            assert not waiting.done()
        finally:
            hung.clear_faults()
        for view in await asyncio.gather(begun, waiting):
            assert_whole(view, whole_text(hung, CHAT))
        assert stage.upstream == 2


def is_hung(engine: SimEngine) -> bool:
    faults = engine.admin("GET", "/sim/faults").json()["faults"]
    return all(fault["left"] == 0 for fault in faults) and engine.metric("vllm:num_requests_running") > 0


async def test_a_slow_replica_is_not_a_stalled_one(suspicious: RouterProcess, engines: tuple[SimEngine, SimEngine]) -> None:
    """An engine with one step in 0.5 s makes progress: its requests stay, and nobody says that it is stalled."""
    with start_sim_engine(LOAD_FLAG, "--time-scale", "1", "--step-seconds", "0.5") as slow:
        async with staged(suspicious, [slow, engines[1]], 2) as stage, watching(stage) as seen:
            body = {**CHAT, "max_tokens": 4}
            for view in await asyncio.gather(*(stage.ask(body, timeout_s=30) for _ in range(4))):
                assert_whole(view, whole_text(engines[1], body))
            assert stage.upstream == 4
            assert stage.proxies[0].requests
    assert set(seen) == {"ready"}


async def test_a_paused_replica_is_not_a_stalled_one(suspicious: RouterProcess, engines: tuple[SimEngine, SimEngine]) -> None:
    """An engine that somebody has frozen computes nothing with good reason; its requests wait and go on, begun or not."""
    paused = engines[0]
    body = {**CHAT, "max_tokens": 1500}
    async with staged(suspicious, engines[:1], 1) as stage, watching(stage) as seen:
        asking = [asyncio.ensure_future(stage.ask({**body, "stream": stream}, timeout_s=30)) for stream in (False, True)]
        await await_until(lambda: paused.metric("vllm:num_requests_running") == 2, 3, "the requests to run")
        # As the agent pauses for a swap: what runs stays in the engine's batch.
        paused.admin("POST", "/pause?mode=keep&clear_cache=false").raise_for_status()
        try:
            asking.append(asyncio.ensure_future(stage.ask(body, timeout_s=30)))
            done, _ = await asyncio.wait(asking, timeout=1.8 * _SUSPICIOUS_AFTER_S)
            assert not done
        finally:
            paused.admin("POST", "/resume").raise_for_status()
        for view in await asyncio.gather(*asking):
            assert_whole(view, whole_text(paused, body))
        assert stage.upstream == 3
    assert set(seen) == {"ready"}


async def test_a_swapping_replica_is_not_a_stalled_one(suspicious: RouterProcess, tmp_path: Path) -> None:
    """A swap that takes longer than a stall may last costs no request: what runs goes on behind it, on the same replica."""
    write_sim_model(tmp_path / "base", seed=0)
    write_sim_model(tmp_path / "source", seed=1)
    publish(tmp_path / "source", store=tmp_path / "store", model=_SWAPPED, version="v1")
    slowly = ("--time-scale", "0.1", "--weights-load-seconds", "18")
    body = {**CHAT, "model": _SWAPPED, "max_tokens": 600}
    with AgentProcess(
        served_model_name=_SWAPPED, model=str(tmp_path / "base"), store=tmp_path / "store", engine_arguments=slowly
    ) as agent:
        agent.reach(ReplicaState.READY)
        url = str(agent.admin.base_url).rstrip("/")
        async with staged(suspicious, (), 0, agents=[url]) as stage, watching(stage) as seen:
            asking = [asyncio.ensure_future(stage.ask({**body, "stream": stream}, timeout_s=30)) for stream in (False, True)]
            await await_until(lambda: running(agent) == 2, 5, "the requests to run")
            swapping = asyncio.create_task(asyncio.to_thread(agent.swap, "v1"))
            for view in await asyncio.gather(*asking):
                assert_whole(view, view.text)
                assert len(view.text.split()) == body["max_tokens"], "no word is lost"
            assert (await swapping).status_code == 200
    assert "swapping" in seen
    assert set(seen) <= {"ready", "swapping"}


def running(agent: AgentProcess) -> float:
    """Requests in the batch of its engine."""
    lines = agent.engine.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_requests_running{"))
