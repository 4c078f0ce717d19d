"""The stage of a fault test: a real router, real simulated engines, a fault proxy in front of each, and a client that counts.

Leaving it in peace checks what must hold after every fault: no request is in flight any more at the router or at an engine,
and every request that the client sent has ended in exactly one outcome.
"""

import asyncio
import functools
import itertools
import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.faults.fault_proxy import FaultProxy, Faults, fault_proxy
from tests.faults.view import View, assert_whole
from tests.router.process import RouterProcess
from tests.sim import SimEngine
from tests.waiting import await_until

MODEL = "simulated"
CHAT: Mapping[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me something."}],
    "max_tokens": 30,
    "ignore_eos": True,
}
STREAM: Mapping[str, Any] = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
# So long that it ends in no test on its own.
ENDLESS: Mapping[str, Any] = {**CHAT, "max_tokens": 100_000}
LOAD_FLAG = "--enable-server-load-tracking"
CHAT_PATH = "/v1/chat/completions"

_serial = itertools.count()


@dataclass
class Stage:
    router: RouterProcess
    engines: Sequence[SimEngine]
    proxies: Sequence[FaultProxy]
    faults: Faults  # of all proxies together: the next request that any of them gets is hit
    client: httpx.AsyncClient
    admin: httpx.AsyncClient
    sent: int = 0  # requests to the router
    outcomes_before: float = 0.0
    told: dict[str, int] = field(default_factory=dict)  # request id -> completion tokens of which the client was told

    @property
    def upstream(self) -> int:
        """Requests that reached the proxies, so what the router tried."""
        return sum(len(proxy.requests) for proxy in self.proxies)

    @property
    def port(self) -> int:
        return int(self.router.url.rsplit(":", 1)[1])

    async def ask(
        self, body: Mapping[str, Any], path: str = CHAT_PATH, headers: Mapping[str, str] | None = None, timeout_s: float = 20.0
    ) -> View:
        """One request, read to its end whatever that is."""
        self.sent += 1
        request_id = f"fault-{next(_serial)}"
        raw = bytearray()
        is_broken = False
        request = self.client.build_request(
            "POST", path, json=body, headers={"x-request-id": request_id, **(headers or {})}, timeout=timeout_s
        )
        response = await self.client.send(request, stream=True)
        try:
            async for part in response.aiter_raw():
                raw += part
        except httpx.RemoteProtocolError:
            is_broken = True
        finally:
            await response.aclose()
        view = View(response.status_code, response.headers, bytes(raw), is_broken)
        is_whole = view.status == 200 and not is_broken
        self.told[request_id] = sum(usage["completion_tokens"] for usage in view.usages) if is_whole else 0
        return view

    async def assert_well(self, times: int = 5) -> None:
        """The service goes on as if nothing had been. These successes also pay for the retries that a case has used."""
        text = whole_text(self.engines[-1], CHAT)
        for view in await asyncio.gather(*(self.ask(CHAT) for _ in range(times))):
            assert_whole(view, text)

    async def replicas(self) -> dict[str, dict[str, Any]]:
        """What the admin API says of each replica, by id."""
        return {replica["id"]: replica for replica in (await self.admin.get("/admin/replicas")).json()}

    async def is_ready(self) -> bool:
        return all(replica["health"] == "ready" for replica in (await self.replicas()).values())

    async def health(self, proxy: FaultProxy) -> str:
        health: str = (await self.replicas())[proxy.replica_id]["health"]
        return health

    async def drain(self, proxy: FaultProxy, draining: bool) -> None:
        url = f"/admin/replicas/{proxy.replica_id}/drain"
        (await self.admin.post(url, json={"draining": draining})).raise_for_status()

    async def await_health(self, proxy: FaultProxy, health: str, timeout_s: float = 5.0) -> None:
        async def is_so() -> bool:
            return await self.health(proxy) == health

        await await_until(is_so, timeout_s, f"{proxy.replica_id} to be {health}")

    async def metric(self, name: str, **labels: str) -> float:
        """Sum over the series of a metric of the router that carry these labels."""
        return total((await self.admin.get("/metrics")).text, name, **labels)

    async def outcomes(self, **labels: str) -> float:
        """Requests that have ended, all or those of one `outcome`."""
        return await self.metric("intellect_router_requests_total", **labels)

    async def assert_settled(self) -> None:
        """Every counter is back where it was before the first request."""
        ended = 0.0

        async def is_settled() -> bool:
            nonlocal ended
            text = (await self.admin.get("/metrics")).text
            ended = total(text, "intellect_router_requests_total") - self.outcomes_before
            in_flight = total(text, "intellect_router_in_flight_requests") + total(text, "intellect_router_departing_requests")
            return in_flight == 0 and ended >= self.sent

        await await_until(is_settled, 3, f"nothing to be in flight, and {self.sent} requests to have ended")
        assert ended == self.sent, "each request ends in exactly one outcome"
        await await_until(lambda: sum(map(in_engine, self.engines)) == 0, 3, "the engines to have nothing left")
        assert sum(proxy.open_requests for proxy in self.proxies) == 0


@asynccontextmanager
async def staged(
    router: RouterProcess,
    engines: Sequence[SimEngine],
    replicas: int = 2,
    *,
    hides_weights: bool = True,
    agents: Sequence[str] = (),
) -> AsyncIterator[Stage]:
    """`replicas` fresh replicas behind this router; more than there are engines share them.

    `hides_weights`: as a plain vLLM, without the guard that names the checkpoint. `agents` are URLs of more replicas, which
    no proxy stands before.
    """
    async with AsyncExitStack() as stack:
        client, admin = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20, limits=_NO_LIMITS, verify=no_tls()))
            for url in (router.url, router.admin)
        ]
        faults = Faults()
        proxies = [
            await stack.enter_async_context(fault_proxy(engines[number % len(engines)].port, faults))
            for number in range(replicas)
        ]
        for proxy in proxies:
            proxy.hides_weights = hides_weights
        stage = Stage(router, engines, proxies, faults, client, admin)
        urls = [*(proxy.url for proxy in proxies), *agents]
        try:
            for url in urls:
                (await admin.post("/admin/replicas", json={"url": url})).raise_for_status()
            await await_until(stage.is_ready, 5, f"all of {urls} to be ready")
            stage.outcomes_before = await stage.outcomes()
            yield stage
            await stage.assert_settled()
        finally:
            for url in urls:
                await admin.delete(f"/admin/replicas/{url.removeprefix('http://')}")


def total(text: str, name: str, **labels: str) -> float:
    """Sum over the series of an exposition with this name that carry these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in wanted))


def in_engine(engine: SimEngine) -> int:
    """Requests that the engine works on or queues; it was started with LOAD_FLAG, for its metrics cost ten times as much."""
    load: int = engine.client.get("/load").json()["server_load"]
    return load


@functools.cache
def no_tls() -> ssl.SSLContext:
    """For clients that only speak plain HTTP: one's own context costs each of them several milliseconds."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


_texts: dict[str, str] = {}


def whole_text(engine: SimEngine, body: Mapping[str, Any], path: str = CHAT_PATH) -> str:
    """The uninterrupted answer, asked of the engine itself. Simulated engines of one kind give the same."""
    asked = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    key = json.dumps([path, asked])
    if key not in _texts:
        choice = engine.client.post(path, json=asked).raise_for_status().json()["choices"][0]
        _texts[key] = choice["text"] if "text" in choice else choice["message"]["content"]
    return _texts[key]


_NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)
