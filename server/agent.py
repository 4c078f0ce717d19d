"""The replica agent: puts the parts together and runs them until a signal.

Start-up: check the settings, take the admin port, start the engine. Shutdown on SIGTERM or SIGINT: say `draining`, end the
engine (which finishes what it can), close the port.
"""

import asyncio
import contextlib
import errno
import logging
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from importlib.metadata import version

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from server.agent_api import build_api
from server.engine_process import LEASH_END_S
from server.metrics import AgentMetrics
from server.presets import EngineStart, plan_launch
from server.replica import Replica
from server.settings import AgentSettings

# After the engine is gone nobody has a reason to hold a connection to its agent.
_CLOSE_S = 1
_BACKLOG = 128
PORT_WAIT_S = LEASH_END_S
_PORT_POLL_S = 0.2

logger = logging.getLogger(__name__)


async def run_agent(settings: AgentSettings, *, port_wait_s: float = PORT_WAIT_S) -> int:
    """Runs one replica; returns the exit code after SIGTERM or SIGINT.

    Raises ValueError, with a message for people, for settings that do not go together and for a port that is taken (and
    is so for `port_wait_s`). An engine that cannot be kept running is no reason to return: the agent stays and says
    `failed`, and why.
    """
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every probe of a starting engine
    cores = available_cores()
    plan_launch(settings, EngineStart(model=settings.model, token="unused"), environ=os.environ, cores=cores)
    with await _listen(settings.host, settings.admin_port, "admin_port", port_wait_s) as listener:
        # The engine binds its port itself, once it has loaded; find out now whether it will be able to.
        (await _listen(settings.host, settings.port, "port", port_wait_s)).close()
        registry = CollectorRegistry()
        metrics = AgentMetrics(registry, version=version("intellect-serve"), preset=settings.preset)
        replica = Replica(settings, metrics=metrics, environ=os.environ, cores=cores, clock=time.monotonic, rng=random.Random())
        await _serve(replica, build_api(replica, settings, registry, metrics), listener)
    return 0


async def _serve(replica: Replica, api: FastAPI, listener: socket.socket) -> None:
    server = _Server(
        uvicorn.Config(api, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=_CLOSE_S)
    )
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    logger.info("the agent listens on %s:%d", *listener.getsockname()[:2])
    async with asyncio.TaskGroup() as group:
        life = group.create_task(replica.run(), name="replica")
        group.create_task(server.serve(sockets=[listener]), name="agent api")
        await stopping.wait()
        logger.info("stopping the engine")
        replica.stop()
        await life
        server.should_exit = True


class _Server(uvicorn.Server):
    """Leaves the process's signals to `run_agent`, which has an order to keep."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def available_cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


async def _listen(host: str, port: int, name: str, wait_s: float) -> socket.socket:
    """Waits a little: the leash of an agent that was killed needs a moment to end its engine. Raises ValueError."""
    give_up_at = time.monotonic() + wait_s
    while True:
        try:
            return _bind(host, port)
        except OSError as error:
            if time.monotonic() >= give_up_at or error.errno != errno.EADDRINUSE:
                raise ValueError(
                    f"{name} is {port}, which cannot be used on {host}: {error.strerror}; choose another"
                ) from error
        await asyncio.sleep(_PORT_POLL_S)


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
