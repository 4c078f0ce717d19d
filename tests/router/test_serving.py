"""The router in front of simulated engines: clients, failures, keys, draining, discovery."""

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from protocol.sse import DONE
from protocol.status import ReplicaState
from tests.ports import free_port
from tests.router.process import RouterProcess, start_router
from tests.scripted_engine import LAST_CHUNK, MODEL, SSE_HEAD, ScriptedRequest, chunked, json_answer, scripted_engine
from tests.server.agent_process import AgentProcess
from tests.sim import SimEngine, start_sim_engine
from tests.waiting import await_until, wait_until

MESSAGES = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[SimEngine, SimEngine]]:
    with start_sim_engine("--served-model-name", "org/sim") as one, start_sim_engine("--served-model-name", "org/sim") as two:
        yield one, two


@pytest.fixture(scope="module")
def router(engines: tuple[SimEngine, SimEngine]) -> Iterator[RouterProcess]:
    with start_router([engine.url for engine in engines]) as router:
        yield router


def running_requests(engine: SimEngine) -> float:
    return engine.metric("vllm:num_requests_running") + engine.metric("vllm:num_requests_waiting")


@pytest.fixture
def client(router: RouterProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=router.v1, api_key="none") as client:
        yield client


def test_the_openai_client_gets_the_same_text_streamed_and_whole(client: openai.OpenAI) -> None:
    """The quickstart of OpenAI's own library works unchanged."""
    whole = client.chat.completions.with_raw_response.create(
        model="org/sim",
        messages=[{"role": "user", "content": "hello"}],
        temperature=0,
        max_tokens=8,
    )
    assert whole.headers["x-intellect-checkpoint"] == "base"
    answer = whole.parse()
    stream = client.chat.completions.create(
        model="org/sim",
        messages=[{"role": "user", "content": "hello"}],
        temperature=0,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer.choices[0].message.content
    )
    assert answer.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens
    assert client.models.retrieve("org/sim").id == "org/sim"
    assert client.completions.create(model="org/sim", prompt="once", max_tokens=3).choices[0].text


async def test_the_async_client_works_too_and_load_is_spread(
    router: RouterProcess, engines: tuple[SimEngine, SimEngine]
) -> None:
    """Many requests at once all answer, and both replicas do a share."""
    before = [engine.metric("vllm:e2e_request_latency_seconds_count") for engine in engines]

    async with openai.AsyncOpenAI(base_url=router.v1, api_key="none") as client:

        async def ask(number: int) -> str | None:
            answer = await client.chat.completions.create(
                model="org/sim", messages=[{"role": "user", "content": f"question {number}"}], max_tokens=20
            )
            return answer.choices[0].message.content

        assert all(await asyncio.gather(*(ask(number) for number in range(40))))
    assert router.in_flight() == 0
    assert all(
        engine.metric("vllm:e2e_request_latency_seconds_count") - was >= 10 for engine, was in zip(engines, before, strict=True)
    )


def test_a_client_that_disconnects_stops_the_engines_work(router: RouterProcess, engines: tuple[SimEngine, SimEngine]) -> None:
    """An abandoned long answer stops within a second: the engine's running count falls."""
    client = openai.OpenAI(base_url=router.v1, api_key="none")
    stream = client.chat.completions.create(
        model="org/sim",
        messages=[{"role": "user", "content": "a long one"}],
        max_tokens=100_000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    assert sum(map(running_requests, engines)) == 1
    stream.close()
    wait_until(lambda: sum(map(running_requests, engines)) == 0, 1, "the engines to be idle")
    wait_until(lambda: router.in_flight() == 0, 1, "the count to fall")


async def test_after_many_resets_and_errors_the_counts_are_zero(
    router: RouterProcess, engines: tuple[SimEngine, SimEngine]
) -> None:
    """A bad hour on an engine leaves no ghost load behind that would keep traffic away from it."""
    for engine in engines:
        engine.add_faults(
            {"kind": "reset", "probability": 0.3, "seed": 1},
            {"kind": "status", "status": 500, "probability": 0.2, "seed": 2},
            {"kind": "truncate", "after_chunks": 2, "probability": 0.3, "seed": 3},
        )
    try:
        async with httpx.AsyncClient(base_url=router.url, timeout=30) as client:

            async def ask(number: int) -> str:
                body = {"model": "org/sim", "messages": MESSAGES, "max_tokens": 6, "stream": number % 2 == 0}
                try:
                    return str((await client.post("/v1/chat/completions", json=body)).status_code)
                except httpx.RemoteProtocolError:
                    return "broken"

            endings = await asyncio.gather(*(ask(number) for number in range(150)))
    finally:
        for engine in engines:
            engine.clear_faults()
    assert {"200", "broken"} <= set(endings) <= {"200", "500", "502", "broken"}
    await await_until(lambda: router.in_flight() == 0, 2, "the counts to be zero")


async def test_killing_a_replica_under_load_fails_no_new_request() -> None:
    """After kill -9 of one of two replicas every later request is answered by the other, and the dead one returns."""
    port = free_port()
    with (
        start_sim_engine() as survivor,
        start_sim_engine(port=port) as victim,
        start_router([survivor.url, victim.url]) as router,
    ):
        async with httpx.AsyncClient(base_url=router.url, timeout=30) as client:
            failed: list[str] = []
            stop = asyncio.Event()

            async def keep_asking() -> int:
                asked = 0
                while not stop.is_set():
                    began_after_kill = not victim.is_alive
                    body = {"model": "simulated", "messages": MESSAGES, "max_tokens": 5}
                    response = await client.post("/v1/chat/completions", json=body)
                    asked += 1
                    if began_after_kill and response.status_code != 200:
                        failed.append(response.text)
                return asked

            askers = [asyncio.create_task(keep_asking()) for _ in range(8)]
            await await_until(lambda: router.metric("intellect_router_requests_total") > 30, 10, "some load")
            victim.signal(signal.SIGKILL)
            victim.wait(5)
            at_kill = router.metric("intellect_router_requests_total")
            await await_until(lambda: router.metric("intellect_router_requests_total") > at_kill + 60, 20, "more load")
            stop.set()
            assert sum(await asyncio.gather(*askers)) > 90
        assert failed == []
        dead = router.metric("intellect_router_replica_health", replica=f"127.0.0.1:{port}", health="down")
        assert dead == 1
        assert router.in_flight() == 0
        with start_sim_engine(port=port):
            router.wait_ready(2)


def test_with_every_replica_down_the_client_is_told_to_come_back() -> None:
    """A full outage is a 503 with Retry-After, the models stay listed, and /ready says why."""
    with start_sim_engine() as engine, start_router([engine.url]) as router:
        engine.signal(signal.SIGKILL)
        engine.wait(5)
        wait_until(lambda: httpx.get(f"{router.url}/ready").status_code == 503, 5, "the router to notice")
        response = httpx.post(f"{router.v1}/chat/completions", json={"model": "simulated", "messages": MESSAGES})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_replica")
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert [card["id"] for card in httpx.get(f"{router.v1}/models").json()["data"]] == ["simulated"]
        assert "127.0.0.1" in httpx.get(f"{router.url}/ready").text
        assert httpx.get(f"{router.url}/health").status_code == 200


def test_a_key_is_needed_on_every_route_that_shows_or_does_something() -> None:
    """With keys configured nobody uses the models without one; liveness stays open for probes."""
    with (
        start_sim_engine("--api-key", "engine-key") as engine,
        start_router(
            [engine.url], "--api-key", "k1", "--api-key", "k2", env={"INTELLECT_UPSTREAM_KEY": "engine-key"}
        ) as router,
    ):
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic k1"}, {"authorization": "k1"}):
            for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/simulated")):
                response = httpx.request(method, router.url + path, headers=header)
                assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
        for key in ("k1", "k2"):
            with openai.OpenAI(base_url=router.v1, api_key=key) as client:
                assert client.chat.completions.create(
                    model="simulated", messages=[{"role": "user", "content": "hi"}], max_tokens=2
                ).choices
        assert httpx.get(f"{router.url}/health").status_code == 200
        with openai.OpenAI(base_url=router.v1, api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert "engine-key" not in router.log
        assert "k1" not in router.log


def test_an_agent_whose_engine_refuses_the_routers_key_is_not_ready(tmp_path: Path) -> None:
    """The operator reads which key is missing, instead of clients being refused."""
    with AgentProcess(engine_arguments=("--api-key", "engine-key")) as agent:
        agent.reach(ReplicaState.READY)
        url = str(agent.admin.base_url)
        with start_router([url], wait=False) as router:
            wait_until(lambda: "INTELLECT_UPSTREAM_KEY" in httpx.get(f"{router.url}/ready").text, 10, "the reason")
            assert httpx.get(f"{router.url}/ready").status_code == 503
        with start_router([url], "--upstream-key", "engine-key") as router:
            body = {"model": "sim", "messages": MESSAGES, "max_tokens": 2}
            assert httpx.post(f"{router.v1}/chat/completions", json=body).status_code == 200


def test_the_admin_api_wants_its_token() -> None:
    """With a token set nobody changes the fleet without it; metrics stay open for Prometheus."""
    with start_router((), env={"INTELLECT_ADMIN_TOKEN": "s3cret"}) as router:
        assert httpx.get(f"{router.admin}/admin/replicas").status_code == 401
        assert httpx.post(f"{router.admin}/admin/replicas", json={"url": "http://127.0.0.1:1"}).status_code == 401
        assert httpx.get(f"{router.admin}/admin/replicas", headers={"authorization": "Bearer s3cret"}).json() == []
        assert httpx.get(f"{router.admin}/metrics").status_code == 200


def test_replicas_are_added_drained_and_removed_while_it_runs(engines: tuple[SimEngine, SimEngine]) -> None:
    """An operator changes the fleet without a restart, and mistakes get an answer that says what to do."""
    with start_router() as router, httpx.Client(base_url=router.admin) as admin:
        added = admin.post("/admin/replicas", json={"url": engines[0].url})
        assert added.status_code == 201
        replica = added.json()["id"]
        router.wait_ready(1)
        assert admin.post("/admin/replicas", json={"url": engines[0].url}).status_code == 409
        bad = admin.post("/admin/replicas", json={"url": "ftp://x"})
        assert (bad.status_code, "http://HOST:PORT" in bad.text) == (400, True)
        untyped = admin.post("/admin/replicas", content=b'{"url": "http://127.0.0.1:1"}')
        assert (untyped.status_code, "content-type: application/json" in untyped.text) == (415, True)
        assert "docs/admin.md" in admin.get("/admin/nothing").text
        unknown_field = admin.post("/admin/replicas", json={"uri": "http://x:1"})
        assert unknown_field.status_code == 422
        assert unknown_field.json()["error"]["param"] in ("url", "uri")
        assert admin.get("/admin/models").json()[0]["model"] == "org/sim"
        ask = {"model": "org/sim", "messages": MESSAGES, "max_tokens": 2}
        assert admin.post(f"/admin/replicas/{replica}/drain", json={"draining": True}).json()["health"] == "draining"
        assert httpx.post(f"{router.v1}/chat/completions", json=ask).status_code == 503
        admin.post(f"/admin/replicas/{replica}/drain", json={"draining": False})
        assert httpx.post(f"{router.v1}/chat/completions", json=ask).status_code == 200
        assert admin.delete(f"/admin/replicas/{replica}").status_code == 200
        assert admin.delete(f"/admin/replicas/{replica}").status_code == 404
        refused = admin.post("/admin/rollouts", json={"model": "org/sim", "version": "v2"})
        assert (refused.status_code, "not served" in refused.text) == (409, True)


def test_a_replica_file_is_followed(engines: tuple[SimEngine, SimEngine], tmp_path: Path) -> None:
    """Editing the file adds and removes replicas; a bad line changes nothing and is logged."""
    file = tmp_path / "replicas.txt"
    file.write_text(f"# our engines\n{engines[0].url}\n")
    with start_router((), "--replica-file", str(file)) as router:

        def listed() -> list[str]:
            return sorted(replica["url"] for replica in httpx.get(f"{router.admin}/admin/replicas").json())

        wait_until(lambda: listed() == [engines[0].url], 5, "the first replica")
        file.write_text(f"{engines[1].url}  # the other\n\n{engines[0].url}\n")
        wait_until(lambda: listed() == sorted(engine.url for engine in engines), 5, "both replicas")
        file.write_text("not-a-url\n")
        wait_until(lambda: "line 1" in router.log, 5, "the bad line to be logged")
        assert len(listed()) == 2
        file.write_text(f"{engines[1].url}\n")
        wait_until(lambda: listed() == [engines[1].url], 5, "the first to leave")


async def test_an_alias_hides_the_engines_name() -> None:
    """Clients see one name everywhere, whatever the engine calls its model, also when an event is cut in two."""

    async def script(request: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        assert f'"{MODEL}"'.encode() in request.body
        if b'"stream": true' in request.body or b'"stream":true' in request.body:
            event = b'data: {"model":"scripted","text":"say \\"model\\":\\"scripted\\""}\n\n'
            writer.write(SSE_HEAD + chunked(event[:14], event[14:20], event[20:], DONE) + LAST_CHUNK)
        else:
            writer.write(json_answer({"ok": 1}).replace(b'{"ok": 1}', b'{"model":"scripted"}').replace(b": 9\r\n", b": 20\r\n"))

    async with scripted_engine(script) as engine:
        with start_router([engine.url], "--served-model-name", "acme", wait=False) as router:
            async with httpx.AsyncClient(base_url=router.url) as client:

                async def is_ready() -> bool:
                    return (await client.get("/ready")).status_code == 200

                await await_until(is_ready, 5, "the router to be ready")
                assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["acme"]
                whole = await client.post("/v1/completions", json={"model": "acme", "prompt": "x"})
                assert whole.json() == {"model": "acme"}
                streamed = await client.post("/v1/completions", json={"model": "acme", "prompt": "x", "stream": True})
                assert streamed.content == b'data: {"model":"acme","text":"say \\"model\\":\\"scripted\\""}\n\n' + DONE
                assert (await client.post("/v1/completions", json={"model": MODEL})).status_code == 404


async def test_a_router_told_to_stop_finishes_what_it_has_and_ends_with_status_zero() -> None:
    """A deployment's restart cuts no answer."""
    with start_sim_engine("--time-scale", "1") as engine, start_router([engine.url]) as router:
        async with httpx.AsyncClient(base_url=router.url, timeout=30) as client:
            body = {"model": "simulated", "messages": MESSAGES, "max_tokens": 60, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                parts = response.aiter_raw()
                received = await anext(parts)
                router.process.send_signal(signal.SIGTERM)
                received += b"".join([part async for part in parts])
        assert received.endswith(b"data: [DONE]\n\n")
        assert router.process.wait(10) == 0
        assert '"outcome":"completed"' in router.log


async def test_a_drain_that_takes_too_long_ends_answers_with_an_error(tmp_path: Path) -> None:
    """When the time is over, what is left is broken off, not ended as if it were whole."""
    config = tmp_path / "router.toml"
    config.write_text("[router]\ndrain_timeout_s = 1\n")
    with start_sim_engine("--time-scale", "1") as engine, start_router([engine.url], "--config", str(config)) as router:
        async with httpx.AsyncClient(base_url=router.url, timeout=30) as client:
            body = {"model": "simulated", "messages": MESSAGES, "max_tokens": 100_000, "ignore_eos": True, "stream": True}

            async def stream() -> None:
                async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    async for _ in response.aiter_raw():
                        if router.process.poll() is None and not told:
                            told.append(time.monotonic())
                            router.process.send_signal(signal.SIGTERM)

            told: list[float] = []
            with pytest.raises(httpx.RemoteProtocolError):
                await stream()
        assert router.process.wait(10) == 0
        assert '"outcome":"shutdown"' in router.log
        wait_until(lambda: running_requests(engine) == 0, 2, "the engine to be idle")


def test_a_port_in_use_is_one_line_that_names_it(router: RouterProcess) -> None:
    """Starting a second router on a taken port says which one and what to do."""
    port = router.url.rsplit(":", 1)[1]
    with (
        pytest.raises(AssertionError, match=rf"error: port {port} on 127\.0\.0\.1 cannot be used.*choose another port"),
        start_router((), "--port", port),
    ):
        pass
