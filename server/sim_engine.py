"""The simulated engine's process: `python -m server.sim_engine --port 8200 --model DIR`.

It listens only once it has started up, like vLLM, and wraps its application in the same guard. SIGTERM and SIGINT end it:
what is in flight gets --shutdown-timeout seconds (default none) and is then aborted.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

import uvicorn
import uvloop

from server.guard import EngineGuard
from server.sim_admin import AdminRoutes
from server.sim_arguments import Launch, parse_arguments
from server.sim_faults import FaultBook
from server.sim_http import SimulatedApp
from server.sim_loop import CacheEventSink, NoCacheEvents, SimulatedEngine
from server.sim_metrics import EngineMetrics
from server.sim_scheduler import Scheduler
from server.sim_transport import ExposingProtocol, PortServer
from server.sim_weights import BUILT_IN_WEIGHTS, WeightsError, load_weights

_LOG = logging.getLogger("server.sim_engine")
_GRACE_S = 5  # for clients that do not read the end of their answers


async def serve(launch: Launch) -> None:
    """Runs one engine until SIGTERM or SIGINT.

    Raises:
        WeightsError: --model cannot be loaded.
    """
    settings = launch.settings
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    _LOG.info("simulated engine starting, model %s", settings.model or "built in")
    weights = BUILT_IN_WEIGHTS if settings.model is None else await asyncio.to_thread(load_weights, settings.model)
    if await _is_set_within(stop, settings.startup_s):
        return
    async with asyncio.TaskGroup() as tasks:
        background: list[asyncio.Task[None]] = []

        def in_background(task: asyncio.Task[None]) -> None:
            background.append(task)

        cache_events: CacheEventSink = NoCacheEvents()
        if settings.kv_events is not None:
            from server.sim_kv_events import ZmqCacheEvents

            publisher = ZmqCacheEvents(settings.kv_events, block_size=settings.scheduler.block_size)
            in_background(tasks.create_task(publisher.serve_replays()))
            cache_events = publisher
        scheduler = Scheduler(settings.scheduler, settings.timing, weights.fingerprint)
        metrics = EngineMetrics(model_name=settings.served_model_names[0], settings=settings.scheduler)
        faults = FaultBook(launch.faults)
        engine = SimulatedEngine(
            scheduler=scheduler,
            weights=weights,
            metrics=metrics,
            cache_events=cache_events,
            clock=loop.time,
            weights_load_s=settings.weights_load_s,
            slow_step_s=faults.slow_step_s,
        )
        metrics.watch(scheduler, lambda: engine.ending)
        admin = AdminRoutes(
            settings=settings,
            engine=engine,
            faults=faults,
            refuse=lambda seconds: in_background(tasks.create_task(server.refuse(seconds))),
        )
        app = SimulatedApp(settings=settings, engine=engine, metrics=metrics, faults=faults, admin_routes=admin.table())
        server = PortServer(
            uvicorn.Config(
                EngineGuard(app),
                host=settings.host,
                port=settings.port,
                http=ExposingProtocol,
                ws="none",
                lifespan="off",
                access_log=False,
                proxy_headers=False,
                log_level="warning",
                timeout_keep_alive=settings.timeout_keep_alive_s,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        in_background(tasks.create_task(engine.run()))
        serving = tasks.create_task(server.serve())
        _LOG.info("simulated engine on http://%s:%d, weights %s", settings.host, settings.port, weights.fingerprint.hex()[:12])
        await stop.wait()
        _LOG.info("shutting down, %d sequences in flight", engine.in_flight)
        await engine.close(settings.shutdown_timeout_s)
        server.should_exit = True
        await serving
        for task in background:
            task.cancel()


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Whether `event` is set before `seconds` have passed."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 after a signal, 1 where the weights cannot be loaded, 3 where the port is taken."""
    launch = parse_arguments(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        uvloop.run(serve(launch))
    except WeightsError as error:
        _LOG.error("cannot load --model: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
