"""Processes that the benchmark starts: held by the leash, watched as whole trees, ended whatever happens."""

import http.client
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from intellect.problem import Problem
from intellect.stack.process import last_lines
from loadtests.overhead.engine_answers import CHAT_PATH, chat_body
from loadtests.overhead.routers import HOST
from server import leash

_GRACE_S = 2.0
# Longer than the leash takes to kill what ignores SIGTERM.
_STOP_S = 15.0
_READY_S = 60.0
_POLL_S = 0.1
_LOG_LINES = 5
# A router holds two connections for each stream.
_DESCRIPTORS_MIN = 4096


class ProcessTree:
    """A command and everything below it."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    @property
    def log_tail(self) -> str:
        return " | ".join(last_lines(self._log, _LOG_LINES)) or "nothing in its log"

    def cpu_s(self) -> float:
        """User and system time that the processes alive now have used."""
        total = 0.0
        for process in self._members():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    def rss_bytes(self) -> int:
        """Resident memory of the processes alive now; pages that they share count once for each."""
        total = 0
        for process in self._members():
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total

    def _members(self) -> list[psutil.Process]:
        try:
            top = psutil.Process(self._process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            raise Problem(f"{self.name} ended while it was measured: {self.log_tail}") from None

    def wait_ready(self, port: int) -> None:
        """Returns when it answers a chat request on `port`.

        Raises:
            Problem: it ended, or does not answer in time.
        """
        deadline = time.monotonic() + _READY_S
        while not _answers(port):
            if (status := self._process.poll()) is not None:
                raise Problem(f"{self.name} ended with status {status}: {self.log_tail}")
            if time.monotonic() > deadline:
                raise Problem(f"{self.name} answered no chat request within {_READY_S:g} s: {self.log_tail}")
            time.sleep(_POLL_S)


@contextmanager
def running(name: str, command: Sequence[str], *, log: Path, folder: Path) -> Iterator[ProcessTree]:
    """Runs `command` in `folder`, its output in `log`, for the length of the block."""
    holder = [sys.executable, "-I", "-S", leash.__file__, "--grace-s", str(_GRACE_S), "--"]
    with log.open("wb") as output:
        process = subprocess.Popen([*holder, *command], stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=folder)
    try:
        yield ProcessTree(name, process, log)
    finally:
        assert process.stdin is not None
        process.stdin.close()  # the leash ends the command, and by force what does not end
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    """Different ports on which nobody listens now."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((HOST, 0))
        return [probe.getsockname()[1] for probe in probes]


def raise_descriptor_limit() -> None:
    """For this process and those it starts.

    Raises:
        Problem: the system does not allow enough for a thousand streams.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else max(soft, 65536)
    if most < _DESCRIPTORS_MIN:
        raise Problem(f"open files: the limit is {most}, {_DESCRIPTORS_MIN} are needed; raise it (`ulimit -Hn`)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("POST", CHAT_PATH, chat_body(400, stream=False), {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
