"""Composition root of the router: builds the parts, joins them, and runs both ports until told to stop."""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import random
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry

from router.admin import build_admin
from router.admission.dispatcher import Dispatcher
from router.admission.retry_budget import RetryBudget
from router.admission.token_cost import charge_of
from router.api import Api
from router.attempts import Retries
from router.auth import StaticKeys
from router.config import ConfigError, ContinuationMode, ModelSettings, RouterSettings
from router.cors import Cors
from router.edge.access_log import AccessLog, NoAccessLog
from router.edge.agent_client import ControlClient
from router.edge.crew import Crew, Seat
from router.edge.decision_log import DecisionLog
from router.edge.discovery import follow_file
from router.edge.fleet import Fleet, replica_id_of
from router.edge.kv_events import KvEvents
from router.edge.kv_following import KvFollowing
from router.edge.kv_metrics import KvCollector
from router.edge.listener import SWEEP_S, Listener
from router.edge.metrics import RouterMetrics
from router.edge.placement_metrics import PlacementMetrics
from router.edge.prompt_blocks import PromptBlocks
from router.edge.prompt_tokens import PromptTokens
from router.edge.sharing import Sharing
from router.edge.sharing_metrics import SharingCollector
from router.edge.upstream import Timeouts
from router.forwarding import ForwardingParts, ForwardingSettings
from router.ids import Ids
from router.journal import Journal
from router.openapi import document
from router.placing import Placing
from router.policy.catalogue import make_policy
from router.policy.interface import Policy
from router.policy.prompt import Chains
from router.proxy import Proxy
from router.rollout_runner import RolloutRunner
from router.state.decisions import Decisions
from router.state.explained import Explained
from router.state.kv_sink import PolicySink
from router.state.replicas import ReplicaTable
from router.state.rollouts import Rollouts

log = logging.getLogger(__name__)

# New containers between two looks for cycles. Requests leave none behind, so Python's 700 is only work.
GC_THRESHOLD = 20_000


class _Server(uvicorn.Server):
    """Signals are handled once for both servers, below."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(settings: RouterSettings) -> int:
    """Runs the router in this process until it is told to stop. Returns the process's exit status."""
    configure_logging()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_router(settings))


def serve_worker(settings: RouterSettings, seat: Seat, admin: socket.socket | None, parent: int) -> int:
    """The same for one of several processes. `parent` is a descriptor that ends with the process that started this one."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run_worker(settings, seat, admin, parent))


def configure_logging() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line for each probe otherwise
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


async def run_router(settings: RouterSettings) -> int:
    """Serves until SIGTERM or SIGINT, then drains. Returns the process's exit status."""
    try:
        public = bind("port", settings.host, settings.port)
        admin = bind("admin_port", settings.admin_host, settings.admin_port)
        decision_log = _decision_log(settings, None)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the operator's one line
        return 1
    _raise_descriptor_limit()
    access_log = AccessLog(sys.stdout.fileno()) if settings.access_log else NoAccessLog()
    try:
        await _run(settings, public, admin, access_log, decision_log, _stop_event())
    finally:
        access_log.close()
        if decision_log is not None:
            decision_log.close()
    return 0


async def _run_worker(settings: RouterSettings, seat: Seat, admin: socket.socket | None, parent: int) -> int:
    stop = _stop_event()
    loop = asyncio.get_running_loop()
    is_orphan = False

    def orphaned() -> None:
        nonlocal is_orphan
        is_orphan = True
        loop.remove_reader(parent)
        stop.set()

    loop.add_reader(parent, orphaned)
    public = bind("port", settings.host, settings.port, is_shared=True)
    _raise_descriptor_limit()
    decision_log = _decision_log(settings, seat)
    access_log = AccessLog(sys.stdout.fileno(), seat.folder / "log.lock") if settings.access_log else NoAccessLog()
    try:
        await _run(settings, public, admin, access_log, decision_log, stop, seat)
    finally:
        access_log.close()
        if decision_log is not None:
            decision_log.close()
        if is_orphan:
            shutil.rmtree(seat.folder, ignore_errors=True)  # nobody else is left to do it
    return 0


async def _run(
    settings: RouterSettings,
    public: socket.socket,
    admin: socket.socket | None,
    access_log: AccessLog | NoAccessLog,
    decision_log: DecisionLog | None,
    stop: asyncio.Event,
    seat: Seat | None = None,
) -> None:
    """`admin` is None in all workers but one; `seat` is None where this is the only process."""
    chosen = policy = make_policy(settings.policy, random.Random())
    sharing = _sharing(settings, policy, seat)
    if sharing is not None:
        policy = sharing.policy
    table = ReplicaTable(policy)
    explained = Explained(policy, always=settings.debug_headers)
    placing = Placing(Dispatcher(explained, charge_of=charge_of), explained)
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry, table)
    placement_metrics = PlacementMetrics(placing, chosen)
    registry.register(placement_metrics)
    decisions = Decisions()
    sink = PolicySink(policy)
    new_id = Ids()
    async with httpx.AsyncClient(trust_env=False) as http, asyncio.TaskGroup() as tasks:
        control = ControlClient(http, agent_token=settings.agent_token, upstream_key=settings.upstream_key)
        follows_kv = settings.kv_events and policy.uses_prompt
        kv = KvFollowing(KvEvents(sink, tasks=tasks), _engine_key(settings)) if follows_kv else None
        prompts = PromptBlocks(PromptTokens(tasks=tasks), sink, table) if follows_kv else None
        registry.register(KvCollector(table, None if kv is None else kv.events, None if prompts is None else prompts.tokens))
        fleet = Fleet(
            table,
            control,
            interval_s=settings.health_interval_s,
            stall_after_s=settings.stall_after_s,
            connect_timeout_s=settings.connect_timeout_s,
            sweep_s=min(SWEEP_S, settings.keep_alive_s / 2),
            tasks=tasks,
            kv=kv,
        )
        rollouts = Rollouts()
        runner = RolloutRunner(
            rollouts=rollouts,
            table=table,
            control=control,
            metrics=metrics,
            tasks=tasks,
            clock=time.monotonic,
            new_id=new_id,
        )
        api = Api(
            proxy=Proxy(
                _forwarding_parts(
                    settings,
                    fleet,
                    placing,
                    metrics,
                    prompt_blocks=prompts,
                ),
                journal=Journal(decisions, placement_metrics, decision_log),
                access_log=access_log,
                new_id=new_id,
            ),
            table=table,
            keys=StaticKeys(settings.api_key),
            cors=Cors(settings.cors_origin),
            alias=settings.served_model_name,
            started_unix=int(time.time()),
            document=document(version("intellect-serve")),
            new_id=new_id,
        )
        crew = None if seat is None else Crew(seat, fleet, registry, decisions)
        admin_app = build_admin(
            fleet=fleet,
            crew=crew,
            runner=runner,
            rollouts=rollouts,
            decisions=decisions,
            registry=registry,
            token=settings.admin_token,
            now=time.monotonic,
        )
        inherited = None if crew is None else await crew.former_fleet()
        if crew is not None and inherited is not None:
            crew.apply(inherited)
        else:
            for url in {replica_id_of(url): url for url in settings.replica}.values():
                fleet.add(url)
        if not settings.replica and settings.replica_file is None and admin is not None:
            log.warning("no replicas yet: give --replica or --replica-file, or add one with POST /admin/replicas")
        listener = Listener(api, body_bytes_max=settings.max_body_bytes, body_timeout_s=settings.body_timeout_s)
        background = [
            tasks.create_task(fleet.run(), name="sweep of the engines"),
            tasks.create_task(listener.run(), name="sweep of the clients"),
        ]
        if crew is not None:
            background.append(tasks.create_task(crew.run(), name="other workers"))
        if sharing is not None:
            registry.register(SharingCollector(sharing.report))
            background.append(tasks.create_task(sharing.run(placing.changed), name="placements of other routers"))
        if settings.replica_file is not None and admin is not None:
            following = follow_file(fleet, Path(settings.replica_file), settings.health_interval_s)
            background.append(tasks.create_task(following, name="replica file"))
        admin_server = _Server(_admin_config(admin_app))
        administering: asyncio.Task[None] | None = None
        await listener.open(public)
        if admin is not None:
            administering = tasks.create_task(admin_server.serve([admin]), name="admin port")
            log.info("serving on http://%s:%d, admin on http://%s:%d", *public.getsockname()[:2], *admin.getsockname()[:2])

        # What exists now lives as long as the process: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)

        await stop.wait()
        log.info("draining: requests in flight have %g s to finish", settings.drain_timeout_s)
        api.is_draining = True
        await listener.drain(settings.drain_timeout_s)
        admin_server.should_exit = True
        if administering is not None:
            await administering
        for task in background:
            task.cancel()
        placing.close()
        runner.close()
        if prompts is not None:
            prompts.close()
        fleet.close()
        if kv is not None:
            await kv.close()


def _decision_log(settings: RouterSettings, seat: Seat | None) -> DecisionLog | None:
    """Raises ConfigError if it cannot be written."""
    if settings.decision_log is None:
        return None
    return DecisionLog(Path(settings.decision_log), None if seat is None else seat.folder / "decisions.lock")


def _sharing(settings: RouterSettings, policy: Policy, seat: Seat | None) -> Sharing | None:
    if settings.redis is None:
        return None
    return Sharing(
        settings.redis,
        policy,
        router=f"{socket.gethostname()}:{settings.port}/{0 if seat is None else seat.index}/{os.getpid()}",
        incarnation=time.time_ns(),
        rng=random.Random(),
        channel=settings.redis_channel,
    )


def _forwarding_parts(
    settings: RouterSettings,
    fleet: Fleet,
    placing: Placing,
    metrics: RouterMetrics,
    *,
    prompt_blocks: PromptBlocks | None,
) -> ForwardingParts:
    engine_headers = b"content-type: application/json\r\n"
    if settings.upstream_key is not None:
        engine_headers += b"authorization: Bearer %b\r\n" % settings.upstream_key.encode()
    return ForwardingParts(
        fleet=fleet,
        placing=placing,
        chains=Chains(),
        retries=Retries(RetryBudget(), attempts_max=settings.max_attempts),
        metrics=metrics,
        settings=ForwardingSettings(
            body_bytes_max=settings.max_body_bytes,
            alias=settings.served_model_name,
            shows_replica=settings.debug_headers,
            continues=settings.continuation is ContinuationMode.SAFE,
            keep_alive_s=settings.keep_alive_s,
            timeouts=_timeouts(settings, ModelSettings()),
            model_timeouts={model: _timeouts(settings, special) for model, special in settings.model.items()},
        ),
        engine_headers=engine_headers,
        prompt_blocks=prompt_blocks,
    )


def _engine_key(settings: RouterSettings) -> list[tuple[bytes, bytes]]:
    return [] if settings.upstream_key is None else [(b"authorization", b"Bearer " + settings.upstream_key.encode())]


def _timeouts(settings: RouterSettings, special: ModelSettings) -> Timeouts:
    def either(own: float | None, everyones: float) -> float:
        return everyones if own is None else own

    return Timeouts(
        first_byte=either(special.first_byte_timeout_s, settings.first_byte_timeout_s),
        idle=either(special.idle_timeout_s, settings.idle_timeout_s),
        total=either(special.total_timeout_s, settings.total_timeout_s),
    )


def _admin_config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=2
    )


def bind(name: str, host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A bound socket; `is_shared`: other processes of this user may bind the port too, and the system spreads the clients.

    Raises ConfigError if the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        remedy = f"stop what listens there or choose another {name}"
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = "that host is not this machine's; give one of its addresses, or 0.0.0.0 for all"
        raise ConfigError(f"{name} {port} on {host} cannot be used: {error.strerror}; {remedy}") from error
    return listener


def _raise_descriptor_limit() -> None:
    """Each request holds two connections, and the usual soft limit of 1024 is meant for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _stop_event() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    return stop
