"""Several worker processes on one public port: starts them, starts those again that die, and stops them all together."""

import errno
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType

import msgspec

from router import app
from router.config import ConfigError, RouterSettings
from router.edge.crew import Seat

log = logging.getLogger(__name__)

RESTART_FIRST_S = 0.25
RESTART_MAX_S = 30.0
# One that ran this long before it died starts again soon.
HEALTHY_S = 60.0
# Seconds beyond the drain's own until a worker is ended by force.
GRACE_S = 10.0
_STOPPING = (signal.SIGTERM, signal.SIGINT)


def serve(settings: RouterSettings) -> int:
    """Runs the router, in as many processes as its settings say, until told to stop. Returns the exit status."""
    if settings.workers == 1:
        return app.serve(settings)
    app.configure_logging()
    if settings.redis is None:
        log.warning(
            "%d workers without redis: each places as if its own requests were all; give --redis for better placement",
            settings.workers,
        )
    try:
        public, admin = _reserve(settings)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the operator's one line
        return 1
    with tempfile.TemporaryDirectory(prefix="intellect-router-") as folder, public, admin:
        return Supervisor(msgspec.structs.replace(settings, port=public.getsockname()[1]), admin, Path(folder)).run()


def _reserve(settings: RouterSettings) -> tuple[socket.socket, socket.socket]:
    """The public port, held but not listened to, and the admin port. Raises ConfigError."""
    # A shared port could be bound beside another router's: first see that nobody has it.
    with app.bind("port", settings.host, settings.port) as probe:
        port: int = probe.getsockname()[1]
    public = app.bind("port", settings.host, port, is_shared=True)
    try:
        admin = app.bind("admin_port", settings.admin_host, settings.admin_port)
    except ConfigError:
        public.close()
        raise
    admin.listen()  # who connects while worker 0 starts is answered when it has
    return public, admin


class _Worker:
    """One place among the workers, and the process that holds it now."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.process: ForkProcess | None = None
        self.started = 0.0
        self.start_at = 0.0
        self.failures = 0  # in a row


class Supervisor:
    def __init__(self, settings: RouterSettings, admin: socket.socket, folder: Path) -> None:
        self._settings = settings
        self._admin = admin
        self._folder = folder
        self._context = multiprocessing.get_context("fork")
        self._workers = [_Worker(index) for index in range(settings.workers)]
        self._is_stopping = False
        # Ends in every worker when this process does, however that happens.
        self._alive_here, self._alive_there = os.pipe()
        self._woken, self._wake = socket.socketpair()

    def run(self) -> int:
        """Returns 0 when all workers have ended by themselves after SIGTERM or SIGINT, else 1."""
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        previous = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, self._stop) for number in _STOPPING}
        try:
            while not self._is_stopping:
                self._start_due()
                self._wait(self._patience_s())
                self._reap()
            return self._drain()
        finally:
            for process in self._running():
                process.kill()
                process.join()
            signal.set_wakeup_fd(previous)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(self._alive_here)
            os.close(self._alive_there)
            self._woken.close()
            self._wake.close()

    def _drain(self) -> int:
        for process in self._running():
            process.terminate()
        deadline = time.monotonic() + self._settings.drain_timeout_s + GRACE_S
        status = 0
        while (running := self._running()) and (left := deadline - time.monotonic()) > 0:
            wait([process.sentinel for process in running], left)
        for worker in self._workers:
            # One that was told to stop before it was up has done so.
            if worker.process is not None and worker.process.exitcode not in (0, -signal.SIGTERM):
                log.error("worker %d %s", worker.index, _end_of(worker.process))
                status = 1
        return status

    def _start_due(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.process is None and worker.start_at <= now and not self._is_stopping:
                worker.started = now
                worker.process = self._context.Process(target=self._work, args=(worker.index,), name=f"worker {worker.index}")
                # A signal that comes right now must reach the child as a signal, not the handler that it has from us.
                signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
                worker.process.start()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)

    def _work(self, index: int) -> None:
        """In the child."""
        signal.set_wakeup_fd(-1)
        for number in _STOPPING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
        os.close(self._alive_there)
        if index != 0:
            self._admin.close()
        seat = Seat(index, len(self._workers), time.time_ns(), self._folder)
        sys.exit(app.serve_worker(self._settings, seat, self._admin if index == 0 else None, self._alive_here))

    def _patience_s(self) -> float | None:
        """Until the next start; None where none is due."""
        due = [worker.start_at for worker in self._workers if worker.process is None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _wait(self, timeout_s: float | None) -> None:
        """Until a signal comes, a worker ends, or so many seconds have passed."""
        # Also of one that has just ended: it is `_reap` that must see it next.
        sentinels = [worker.process.sentinel for worker in self._workers if worker.process is not None]
        wait([self._woken, *sentinels], timeout_s)
        try:
            self._woken.recv(4096)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK):
                raise

    def _reap(self) -> None:
        for worker in self._workers:
            process = worker.process
            if process is None or process.exitcode is None:
                continue
            worker.process = None
            now = time.monotonic()
            worker.failures = 1 if now - worker.started > HEALTHY_S else worker.failures + 1
            delay_s = min(RESTART_MAX_S, RESTART_FIRST_S * 2.0 ** (worker.failures - 1))
            worker.start_at = now + delay_s
            if not self._is_stopping:
                log.error("worker %d %s; it is started again in %g s", worker.index, _end_of(process), delay_s)

    def _running(self) -> list[ForkProcess]:
        return [worker.process for worker in self._workers if worker.process is not None and worker.process.exitcode is None]

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._is_stopping = True


def _end_of(process: ForkProcess) -> str:
    status = process.exitcode
    if status is not None and status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return "did not end in time" if status is None else f"ended with status {status}"
