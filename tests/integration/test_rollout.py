"""A new checkpoint brought to a whole fleet through the router, under load: router, agents and engines as real processes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import uvicorn
from fastapi import FastAPI, Response

from protocol.publisher import publish
from protocol.status import ReplicaState, ReplicaStatus, SwapOutcome, SwapReport
from server.sim_model import write_sim_model
from tests.ports import free_port
from tests.router.process import RouterProcess, start_router
from tests.server.agent_process import AgentProcess
from tests.waiting import await_until, wait_until

MODEL = "sim"
PROMPT = "a fixed prompt of some length, so that it fills blocks of the cache " * 4


@dataclass
class Fleet:
    router: RouterProcess
    agents: tuple[AgentProcess, AgentProcess]
    store: Path

    def start_rollout(self, version: str) -> httpx.Response:
        body = {"model": MODEL, "version": version, "strategy": "in_place"}
        return httpx.post(f"{self.router.admin}/admin/rollouts", json=body)

    def wait_rollout(self, started: httpx.Response) -> dict[str, Any]:
        assert started.status_code == 202, started.text
        url = f"{self.router.admin}/admin/rollouts/{started.json()['id']}"
        wait_until(lambda: httpx.get(url).json()["state"] != "running", 30, "the rollout to end")
        ended: dict[str, Any] = httpx.get(url).json()
        return ended

    def roll_out(self, version: str) -> dict[str, Any]:
        return self.wait_rollout(self.start_rollout(version))

    def healths(self) -> list[str]:
        return [replica["health"] for replica in httpx.get(f"{self.router.admin}/admin/replicas").json()]

    def served(self) -> list[str]:
        return [replica["checkpoint"] for replica in httpx.get(f"{self.router.admin}/admin/replicas").json()]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds v1 and v2 of the model in `base`."""
    folder = tmp_path_factory.mktemp("rollout")
    write_sim_model(folder / "base", seed=0)
    for seed in (1, 2):
        write_sim_model(folder / f"source{seed}", seed=seed)
        publish(folder / f"source{seed}", store=folder / "store", model=MODEL, version=f"v{seed}")
    return folder / "store"


@contextmanager
def start_fleet(store: Path, second_engine: tuple[str, ...] = ()) -> Iterator[Fleet]:
    settings = {"model": str(store.parent / "base"), "store": store}
    quick = ("--time-scale", "0.1")
    with (
        AgentProcess(**settings, engine_arguments=quick) as one,
        AgentProcess(**settings, engine_arguments=(*quick, *second_engine)) as two,
    ):
        # In the order of their ids, which is the order in which a rollout asks them.
        agents = sorted((one, two), key=lambda agent: str(agent.admin.base_url.netloc))
        for agent in agents:
            agent.reach(ReplicaState.READY)
        with start_router([str(agent.admin.base_url) for agent in agents]) as router:
            yield Fleet(router, (agents[0], agents[1]), store)


@pytest.fixture(scope="module")
def fleet(store: Path) -> Iterator[Fleet]:
    with start_fleet(store) as fleet:
        yield fleet


async def test_rollouts_under_load_fail_nothing_and_mix_no_cache(fleet: Fleet) -> None:
    """Through six swaps of both replicas every request is answered whole, by one of the versions, from no foreign KV."""
    stop = asyncio.Event()
    answers: dict[str, set[str]] = {}  # version -> texts
    faults: list[str] = []

    async def keep_asking(client: httpx.AsyncClient, number: int) -> int:
        asked = 0
        while not stop.is_set():
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stream": number % 2 == 0}
            response = await client.post("/v1/completions", json=body)
            asked += 1
            if response.status_code != 200 or (number % 2 == 0 and not response.text.endswith("data: [DONE]\n\n")):
                faults.append(response.text)
            if "STALE-KV" in response.text:
                faults.append("an answer used another version's cache")
            if number % 2:
                version = response.headers["x-intellect-checkpoint"].partition("+")[0]
                answers.setdefault(version, set()).add(response.json()["choices"][0]["text"])
        return asked

    async with httpx.AsyncClient(base_url=fleet.router.url, timeout=60) as client:
        askers = [asyncio.create_task(keep_asking(client, number)) for number in range(12)]
        for version in ("v1", "v2", "base", "v2", "v1", "base"):
            ended = await asyncio.to_thread(fleet.roll_out, version)
            assert (ended["state"], [report["outcome"] for report in ended["replicas"]]) == ("done", ["swapped"] * 2)
            assert {name.partition("+")[0] for name in fleet.served()} == {version}
        stop.set()
        assert sum(await asyncio.gather(*askers)) > 100
    assert faults == []
    assert set(answers) == {"base", "v1", "v2"}
    assert fleet.router.in_flight() == 0
    assert fleet.router.metric("intellect_router_replica_swaps_total", outcome="swapped") == 12
    pure = [min(texts, key=len) for texts in answers.values()]
    assert len(set(pure)) == 3, "each version has words of its own"


def test_a_bad_version_is_refused_with_the_reason_and_nothing_changes(fleet: Fleet) -> None:
    """The operator reads why, and the fleet serves on."""
    before = fleet.served()
    ended = fleet.roll_out("v9")
    assert ended["state"] == "failed"
    assert "v9 is not in" in ended["reason"]
    assert fleet.served() == before
    write_sim_model(fleet.store.parent / "spoilt", seed=5)
    publish(fleet.store.parent / "spoilt", store=fleet.store, model=MODEL, version="spoilt")
    weights = fleet.store / MODEL / "spoilt" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    ended = fleet.roll_out("spoilt")
    assert (ended["state"], ended["replicas"][0]["code"]) == ("failed", "file_changed")
    assert fleet.served() == before


def test_a_rollout_that_fails_on_a_later_replica_is_undone_on_the_earlier_ones(store: Path) -> None:
    """The fleet never ends up answering with two versions: what was swapped goes back."""
    fault = '{"kind": "fail_reload", "times": 1}'
    with start_fleet(store, ("--fault", fault)) as fleet:
        faulty = next(agent for agent in fleet.agents if fault in str(agent.settings["engine_arguments"]))
        if faulty is fleet.agents[0]:
            # Let the faulty one come second: the order is that of the ids, which are ports picked by the system.
            replica = f"127.0.0.1:{fleet.agents[0].settings['admin_port']}"
            httpx.delete(f"{fleet.router.admin}/admin/replicas/{replica}")
            url = f"http://localhost:{fleet.agents[0].settings['admin_port']}"
            httpx.post(f"{fleet.router.admin}/admin/replicas", json={"url": url})
            fleet.router.wait_ready(2)
        ended = fleet.roll_out("v1")
        assert ended["state"] == "failed"
        assert [report["outcome"] for report in ended["replicas"]] == ["swapped", "restored", "swapped"]
        assert [report["version"] for report in ended["replicas"]] == ["v1", "base", "base"]
        # The router hears of it with its next probe.
        wait_until(lambda: {name.partition("+")[0] for name in fleet.served()} == {"base"}, 5, "the whole fleet to serve base")


async def test_an_agent_that_stalls_in_a_rollout_does_not_take_the_router_down(store: Path) -> None:
    """While one agent hangs, requests go on; when it wakes up, the rollout ends."""
    with start_fleet(store, ("--weights-load-seconds", "5")) as fleet:
        # Whichever is asked second is stopped before its turn comes.
        second = psutil.Process(fleet.agents[1].process.pid)
        started = fleet.start_rollout("v1")
        second.suspend()
        try:
            await await_until(lambda: "down" in fleet.healths(), 15, "the stalled agent to be noticed")
            body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
            assert httpx.post(f"{fleet.router.v1}/completions", json=body, timeout=30).status_code == 200
        finally:
            second.resume()
        ended = await asyncio.to_thread(fleet.wait_rollout, started)
        assert ended["state"] in ("done", "failed")
        fleet.router.wait_ready(2)
        assert len({name.partition("+")[0] for name in fleet.served()}) == 1


async def test_a_router_stopped_in_a_rollout_does_not_call_it_done(store: Path) -> None:
    """The operator reads in the log that the fleet may be mixed."""
    with start_fleet(store, ("--weights-load-seconds", "20")) as fleet:
        fleet.start_rollout("v1")
        await await_until(lambda: "swapping" in fleet.healths(), 5, "the rollout to be under way")
        assert await asyncio.to_thread(fleet.router.terminate) == 0
        assert "v1: failed: the router was stopped; some replicas may serve the new version" in fleet.router.log


async def test_a_second_rollout_is_refused_while_one_runs(store: Path) -> None:
    """Two trainers cannot fight over a model."""
    with start_fleet(store, ("--weights-load-seconds", "20")) as fleet:
        first = fleet.start_rollout("v1")
        second = fleet.start_rollout("v2")
        assert (second.status_code, first.json()["id"] in second.text) == (409, True)
        assert fleet.wait_rollout(first)["state"] == "done"


async def test_a_killed_engine_rejoins_with_the_version_of_the_fleet(fleet: Fleet) -> None:
    """kill -9 of an engine under load: the other serves, no later request fails, the dead one returns on the same version."""
    assert fleet.roll_out("v2")["state"] == "done"
    victim = fleet.agents[0]
    pid = victim.status().engine_pid
    assert pid is not None
    failed: list[str] = []
    stop = asyncio.Event()
    async with httpx.AsyncClient(base_url=fleet.router.url, timeout=60) as client:

        async def keep_asking() -> None:
            while not stop.is_set():
                dead = not psutil.pid_exists(pid)
                response = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 4})
                if dead and response.status_code != 200:
                    failed.append(response.text)

        asked = fleet.router.metric("intellect_router_requests_total")
        askers = [asyncio.create_task(keep_asking()) for _ in range(8)]
        await await_until(lambda: fleet.router.metric("intellect_router_requests_total") > asked + 20, 10, "load")
        psutil.Process(pid).kill()
        await await_until(lambda: not psutil.pid_exists(pid), 5, "the engine to be gone")
        await await_until(lambda: victim.is_in(ReplicaState.READY) and victim.status().engine_pid != pid, 30, "its return")
        stop.set()
        await asyncio.gather(*askers)
    assert failed == []
    fleet.router.wait_ready(2)
    assert {name.partition("+")[0] for name in fleet.served()} == {"v2"}
    response = victim.engine.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 2})
    assert response.headers["x-intellect-checkpoint"].startswith("v2+")
    assert fleet.router.in_flight() == 0


def test_an_engine_added_without_its_agent_cannot_be_swapped(fleet: Fleet) -> None:
    """The operator is told how to add it so that it can."""
    with start_router([str(fleet.agents[0].engine.base_url)]) as router:
        body = {"model": MODEL, "version": "v1"}
        refused = httpx.post(f"{router.admin}/admin/rollouts", json=body)
        assert (refused.status_code, "by its agent's URL" in refused.text) == (409, True)


@asynccontextmanager
async def scripted_agent(group: str, meet: Callable[[], Awaitable[SwapReport]]) -> AsyncIterator[str]:
    """The HTTP face of an agent and its engine, of a wide expert-parallel group that no CPU can run. `meet` answers a swap."""
    app = FastAPI()
    port = free_port()

    @app.get("/status")
    async def status() -> Response:
        value = ReplicaStatus(
            state=ReplicaState.READY, engine_url=f"http://127.0.0.1:{port}", model=MODEL, expert_parallel_group=group
        )
        return Response(msgspec.json.encode(value), media_type="application/json")

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"data": [{"id": MODEL}]}

    @app.post("/checkpoint")
    async def checkpoint() -> Response:
        return Response(msgspec.json.encode(await meet()), media_type="application/json")

    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None, lifespan="off", ws="none"))
    serving = asyncio.create_task(server.serve())
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


async def test_the_ranks_of_an_expert_parallel_group_are_swapped_together_and_groups_one_by_one() -> None:
    """A pause of one rank ends only when all ranks were asked, so asking them in turn would hang the swap."""
    asked: list[str] = []
    barriers = {"west": asyncio.Barrier(2), "east": asyncio.Barrier(2)}

    def rank(group: str) -> Callable[[], Awaitable[SwapReport]]:
        async def meet() -> SwapReport:
            asked.append(group)
            await barriers[group].wait()
            return SwapReport(outcome=SwapOutcome.SWAPPED, version="v2", epoch=1, requested="v2", seconds=0.1)

        return meet

    async with AsyncExitStack() as agents:
        urls = [await agents.enter_async_context(scripted_agent(group, rank(group))) for group in ("west", "east") * 2]
        with start_router(urls, wait=False) as router:
            async with httpx.AsyncClient(base_url=router.admin) as admin:

                async def all_ready() -> bool:
                    return [r["health"] for r in (await admin.get("/admin/replicas")).json()] == ["ready"] * 4

                await await_until(all_ready, 10, "four ranks")
                started = (await admin.post("/admin/rollouts", json={"model": MODEL, "version": "v2"})).json()

                async def ended() -> bool:
                    return bool((await admin.get(f"/admin/rollouts/{started['id']}")).json()["state"] == "done")

                await await_until(ended, 10, "the rollout to end")
    assert asked in (["west", "west", "east", "east"], ["east", "east", "west", "west"])
