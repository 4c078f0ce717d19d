"""One soak: everything is started, loaded, hurt, left in peace, and judged."""

import asyncio
import contextlib
import json
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from intellect.problem import Problem
from loadtests.overhead.processes import free_ports
from loadtests.soak.answers import StreamReading, read_json
from loadtests.soak.client import Client, Target
from loadtests.soak.faults import FaultName
from loadtests.soak.injector import Injector
from loadtests.soak.judge import (
    Invariant,
    Logged,
    Remains,
    Sample,
    Violation,
    judge_accounts,
    judge_coverage,
    judge_remains,
    judge_views,
)
from loadtests.soak.replicas import HOST, Engine, Router, engine_arguments, sum_of
from loadtests.soak.requests import EMBEDDING_MODEL, Asked, catalogue
from loadtests.soak.views import View

# Beyond it an answer hangs: longer than the timeouts below and three replicas' worth of trying.
HANG_S = 60.0
# Timeouts so short that a soak meets them.
_ROUTER_SETTINGS = """[router]
first_byte_timeout_s = 12.0
idle_timeout_s = 6.0
keep_alive_s = 2.0
health_interval_s = 0.5
"""
_SAMPLE_S = 1.0
_SETTLE_S = 15.0
_POLL_S = 0.2
# Longer than the router keeps idle connections, to engines and for its probes.
_IDLE_S = 6.0
# The access log is written four times a second.
_LOG_S = 1.0
_COUNTED = re.compile(r'^intellect_router_requests_total\{.*outcome="([a-z_]+)".*\} (\S+)$', re.MULTILINE)
_CONTINUED = re.compile(r'^intellect_router_continuations_total\{outcome="([a-z_]+)"\} (\S+)$', re.MULTILINE)
_FAULT_OF_OURS = re.compile(r"^.*(?:Traceback|\bERROR\b|was never awaited|exception was never retrieved).*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    minutes: float
    faults_per_second: float
    replicas: int
    clients: int
    seed: int


@dataclass(frozen=True, slots=True)
class Results:
    plan: Plan
    seconds: float
    views: Sequence[View]
    outcomes: dict[str, int]
    continuations: dict[str, int]
    faults: Counter[FaultName]
    samples: Sequence[Sample]
    remains: Remains
    violations: Sequence[Violation]


async def soak(plan: Plan, folder: Path, tell: Callable[[str], None]) -> Results:
    """`folder` takes the logs. Raises Problem if something cannot be started."""
    asked = catalogue(random.Random(plan.seed))
    async with contextlib.AsyncExitStack() as stack:
        engines = [await _engine(stack, folder, f"engine-{number}", time_scale=1.0) for number in range(plan.replicas)]
        bystander = await _engine(stack, folder, "embedding-engine", time_scale=0.1, is_embedding=True)
        reference = await _engine(stack, folder, "reference", time_scale=0.0)
        expected = {one: await _expected(reference, bystander, one) for one in asked if one.is_valid}
        router = await Router.start(folder, [*engines, bystander], _ROUTER_SETTINGS)
        stack.push_async_callback(router.close)
        await asyncio.sleep(_IDLE_S)
        descriptors_before = router.held.num_fds()
        tell(f"{plan.replicas} replicas are ready; logs in {folder}")
        started = time.monotonic()
        views, injector, samples = await _load(plan, router, engines, asked, tell)
        seconds = time.monotonic() - started
        await _settle(router, engines)
        await asyncio.sleep(_IDLE_S)
        remains = await _remains(router, engines, descriptors_before)
        await asyncio.sleep(_LOG_S)
        exposition = await router.metrics()
        log = read_log(router.access_log)
        errors = router.error_log.read_text(errors="replace")
    counted = _sums(_COUNTED, exposition)
    violations = [
        *judge_views(views, expected, hang_s=HANG_S),
        *judge_accounts(views, log, counted),
        *judge_remains(remains, samples, replicas=plan.replicas),
        *judge_coverage(views, asked, [name for name in FaultName if not injector.done[name]]),
        *(Violation(Invariant.NO_FAULT_OF_OURS, line) for line in _FAULT_OF_OURS.findall(errors)[:20]),
        *(Violation(Invariant.REAL_SOAK, failure) for failure in injector.failures),
    ]
    continuations = _sums(_CONTINUED, exposition)
    return Results(plan, seconds, views, counted, continuations, injector.done, samples, remains, violations)


async def _engine(
    stack: contextlib.AsyncExitStack, folder: Path, name: str, *, time_scale: float, is_embedding: bool = False
) -> Engine:
    (port,) = free_ports(1)
    engine = Engine(name, port, folder, engine_arguments(time_scale=time_scale, is_embedding=is_embedding))
    stack.push_async_callback(engine.close)
    await engine.start()
    await engine.wait_ready()
    return engine


async def _expected(reference: Engine, bystander: Engine, asked: Asked) -> object:
    """What an engine says that nobody disturbs. None: only the status is known."""
    if not asked.is_counted:
        return None
    engine = bystander if EMBEDDING_MODEL.encode() in asked.body else reference
    response = await engine.ask(asked.path, asked.body, asked.method)
    if response.status_code != asked.status:
        raise Problem(f"'{asked.kind}' is answered {response.status_code} by an engine in peace: {response.text[:200]}")
    if not asked.is_stream:
        return read_json(response.content)
    # The router asks for usage itself and keeps it to itself.
    reading = StreamReading(asked.path, asks_usage=asked.asks_usage)
    reading.feed(response.content)
    return reading.said


async def _load(
    plan: Plan, router: Router, engines: Sequence[Engine], asked: Sequence[Asked], tell: Callable[[str], None]
) -> tuple[list[View], Injector, list[Sample]]:
    rng = random.Random(plan.seed)
    injector = Injector(router, engines, random.Random(rng.random()))
    views: list[View] = []
    samples: list[Sample] = []
    target = Target(HOST, router.port, HANG_S)
    clients = [Client(f"soak-{number}", target, asked, random.Random(rng.random()), views) for number in range(plan.clients)]
    stop_faults, stop_clients, stop_samples = asyncio.Event(), asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        sampling = tasks.create_task(_sample(router.held, samples, stop_samples))
        faulting = tasks.create_task(injector.run(plan.faults_per_second, stop_faults))
        asking = [tasks.create_task(client.run(stop_clients)) for client in clients]
        ends_at = time.monotonic() + 60 * plan.minutes
        while (left := ends_at - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 30.0))
            tell(f"{len(views)} requests, {injector.done.total()} faults, {samples[-1].rss_bytes >> 20} MiB")
            if not router.process.is_running:
                raise Problem(f"the router has ended: {router.process.log_tail}")
        stop_faults.set()
        await faulting
        stop_clients.set()
        await asyncio.gather(*asking)
        stop_samples.set()
        await sampling
    return views, injector, samples


async def _sample(process: psutil.Process, samples: list[Sample], stop: asyncio.Event) -> None:
    started = time.monotonic()
    while not stop.is_set():
        with process.oneshot():
            at = time.monotonic() - started
            samples.append(Sample(at, process.memory_info().rss, process.num_fds(), process.num_threads()))
        await asyncio.sleep(_SAMPLE_S)


async def _settle(router: Router, engines: Sequence[Engine]) -> None:
    """Returns when nothing runs, or after the time in which it should have ended."""
    deadline = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            busy = [await engine.busy() for engine in engines]
            exposition = await router.metrics()
            if not sum(busy) + sum_of(exposition, *_GAUGES):
                return
        await asyncio.sleep(_POLL_S)


_GAUGES = ("intellect_router_in_flight_requests", "intellect_router_departing_requests")


async def _remains(router: Router, engines: Sequence[Engine], descriptors_before: int) -> Remains:
    exposition = await router.metrics()
    in_flight, departing = (sum_of(exposition, name) for name in _GAUGES)
    busy = {engine.name: await engine.busy() for engine in engines}
    return Remains(in_flight, departing, busy, descriptors_before, router.held.num_fds())


def read_log(path: Path) -> dict[str, list[Logged]]:
    """The access log, by request id."""
    found: defaultdict[str, list[Logged]] = defaultdict(list)
    with path.open("rb") as lines:
        for line in lines:
            record = json.loads(line)
            found[record["request_id"]].append(Logged(record["outcome"], record["status"], record.get("error", "")))
    return dict(found)


def _sums(pattern: re.Pattern[str], exposition: str) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for label, value in pattern.findall(exposition):
        counts[label] += int(float(value))
    return dict(counts)
