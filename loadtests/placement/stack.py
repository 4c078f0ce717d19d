"""Engines, simulated and real, and a router before them: started under the leash, ended whatever happens."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import httpx

from intellect.problem import Problem
from loadtests.overhead.processes import free_ports
from loadtests.placement.client import MODEL
from loadtests.placement.fleet_figures import Counters
from loadtests.soak.replicas import HOST, TOKEN, Process, sum_of
from protocol.headers import ENGINE_TOKEN
from router.edge.engine_metrics import read_cache
from router.policy.catalogue import PolicyName
from router.sim.fleet import EngineLimits
from router.sim.timing import StepTiming
from router.types import CacheFacts
from server.presets import EngineStart, plan_launch
from server.settings import AgentSettings

_READY_S = 300.0  # a cold machine compiles vLLM's bytecode first
_POLL_S = 0.2
# How long it may take until a router has found its engines ready.
_ROUTER_READY_S = 30.0


class Engine:
    """vLLM, or its simulation, on a port of its own."""

    def __init__(self, process: Process, url: str) -> None:
        self.process = process
        self.url = url
        self._client = httpx.AsyncClient(base_url=url, timeout=30.0, headers={ENGINE_TOKEN.decode(): TOKEN})

    async def counters(self) -> Counters:
        text = (await self._client.get("/metrics")).raise_for_status().text
        names = ("vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
        return Counters(*(sum_of(text, name) for name in names))

    async def cache(self) -> CacheFacts:
        """Raises Problem where the engine does not say how much it holds."""
        found = read_cache((await self._client.get("/metrics")).raise_for_status().content)
        if found is None or found.capacity_tokens is None or found.block_tokens is None:
            raise Problem(f"{self.process.name}: its metrics have no whole vllm:cache_config_info")
        return found

    async def forget(self) -> None:
        """Empties the prefix cache. Raises Problem where it keeps something."""
        answer = (await self._client.post("/reset_prefix_cache")).raise_for_status()
        if answer.content and not answer.json().get("success", True):
            raise Problem(f"{self.process.name}: /reset_prefix_cache did not succeed, something still runs")

    async def wait_ready(self) -> None:
        await _wait(self.process, self._client, "/health", _READY_S)

    async def close(self) -> None:
        await self._client.aclose()
        await self.process.stop()


@asynccontextmanager
async def simulated_engines(folder: Path, count: int, limits: EngineLimits, timing: StepTiming) -> AsyncIterator[list[Engine]]:
    """Raises Problem; ValueError for a timing that the simulated engine does not know."""
    if timing.per_attended_pair_s:
        raise ValueError(f"per_attended_pair_s is {timing.per_attended_pair_s}, but a simulated engine knows no such part")
    arguments = [
        *("--served-model-name", MODEL, "--enable-prompt-tokens-details", "--timeout-keep-alive", "75"),
        *("--max-num-seqs", str(limits.max_num_seqs), "--max-num-batched-tokens", str(limits.max_num_batched_tokens)),
        *("--block-size", str(limits.kv_block_tokens)),
        *("--num-gpu-blocks-override", str(limits.kv_capacity_tokens // limits.kv_block_tokens)),
        *("--max-model-len", str(min(8192, limits.kv_capacity_tokens))),
        *("--prefill-tokens-per-second", str(timing.prefill_tokens_per_s), "--step-seconds", str(timing.base_s)),
        *("--decode-seconds-per-sequence", str(timing.per_sequence_s)),
        *("--decode-seconds-per-context-token", str(timing.per_context_token_s)),
    ]
    async with AsyncExitStack() as stack:
        engines = []
        for number, port in enumerate(free_ports(count)):
            command = [sys.executable, "-m", "server.sim_engine", "--host", HOST, "--port", str(port), *arguments]
            engines.append(await _started(stack, folder, f"engine-{number}", command, port))
        for engine in engines:
            await engine.wait_ready()
        yield engines


@asynccontextmanager
async def real_engines(
    folder: Path, model: Path, cores: Sequence[Sequence[int]], limits: EngineLimits
) -> AsyncIterator[list[Engine]]:
    """One vLLM on the CPU for each set of cores. Raises Problem."""
    arguments = (
        *("--max-model-len", str(limits.max_num_batched_tokens), "--max-num-seqs", str(limits.max_num_seqs)),
        *("--max-num-batched-tokens", str(limits.max_num_batched_tokens)),
    )
    async with AsyncExitStack() as stack:
        engines = []
        for number, own in enumerate(cores):
            port, admin_port = free_ports(2)
            settings = AgentSettings(
                served_model_name=MODEL, model=str(model), port=port, admin_port=admin_port, engine_arguments=arguments
            )
            plan = plan_launch(settings, EngineStart(model=str(model), token=TOKEN), environ=os.environ, cores=own)
            engines.append(await _started(stack, folder, f"engine-{number}", plan.argv, port, plan.env))
        for engine in engines:
            await engine.wait_ready()
        yield engines


@asynccontextmanager
async def running_router(folder: Path, engines: Sequence[Engine], policy: PolicyName) -> AsyncIterator[str]:
    """Its address, once it has found every engine ready. Raises Problem."""
    port, admin_port = free_ports(2)
    command = [sys.executable, "-m", "intellect", "router", "--port", str(port), "--admin-port", str(admin_port)]
    command += ["--policy", policy, *(f"--replica={engine.url}" for engine in engines)]
    process = await Process.start("router", command, log=folder / f"router-{policy}.log")
    try:
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{admin_port}", timeout=10.0) as admin:
            await _wait(process, admin, "/health", _ROUTER_READY_S)
            await _wait_replicas(process, admin, len(engines))
        yield f"http://{HOST}:{port}"
    finally:
        await process.stop()


async def _started(
    stack: AsyncExitStack,
    folder: Path,
    name: str,
    command: Sequence[str],
    port: int,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Engine:
    process = await Process.start(name, command, log=folder / f"{name}.log", variables=variables)
    engine = Engine(process, f"http://{HOST}:{port}")
    stack.push_async_callback(engine.close)
    return engine


async def _wait(process: Process, client: httpx.AsyncClient, path: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if (await client.get(path)).is_success:
                return
        if not process.is_running:
            raise Problem(f"{process.name} ended at its start: {process.log_tail}")
        if time.monotonic() > deadline:
            raise Problem(f"{process.name} does not answer after {timeout_s:g} s: {process.log_tail}")
        await asyncio.sleep(_POLL_S)


async def _wait_replicas(process: Process, admin: httpx.AsyncClient, count: int) -> None:
    deadline = time.monotonic() + _ROUTER_READY_S
    while True:
        listed = (await admin.get("/admin/replicas")).raise_for_status().json()
        if sum(replica["health"] == "ready" for replica in listed) == count:
            return
        if time.monotonic() > deadline:
            raise Problem(f"the router has not found its engines ready after {_ROUTER_READY_S:g} s: {process.log_tail}")
        await asyncio.sleep(_POLL_S)
