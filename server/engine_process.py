"""One engine process under its leash: started, listened to, ended. Nothing it starts outlives this object's process."""

import asyncio
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
from collections import deque
from pathlib import Path

import psutil

from server.presets import LaunchPlan

LEASH = Path(__file__).with_name("leash.py")
# What the engine gets after SIGTERM if this process is killed and can no longer ask it to stop in its own time.
LEASH_GRACE_S = 3.0
# Longer than the leash takes to kill what ignores signals.
LEASH_END_S = LEASH_GRACE_S + 8.0

LINE_CHARACTERS_MAX = 2000
LINES_KEPT = 200
LINES_WAITING_MAX = 2000

_READ_BYTES = 65536

logger = logging.getLogger(__name__)


class EngineProcess:
    """Made by `start`; `stop` must be called, also after the process ended by itself."""

    def __init__(self, process: asyncio.subprocess.Process, lifeline: int, log: "LogForwarder") -> None:
        self._process = process
        self._lifeline: int | None = lifeline
        self._log = log
        self._reader = asyncio.create_task(self._read_output(), name="engine output")

    @classmethod
    async def start(cls, plan: LaunchPlan) -> "EngineProcess":
        """Raises OSError if the leash cannot be started. A command that cannot be started exits with code 126 or 127."""
        stdin, lifeline = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(LEASH), "--grace-s", str(LEASH_GRACE_S), "--"),
                *plan.argv,
                stdin=stdin,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(plan.env),
            )
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(stdin)
        return cls(process, lifeline, LogForwarder())

    def pid(self) -> int | None:
        """Of the engine itself, below the leash's two processes; None if it is not (or no longer) there."""
        try:
            inner = min(psutil.Process(self._process.pid).children(), key=lambda child: child.create_time())
            return min(inner.children(), key=lambda child: child.create_time()).pid
        except (psutil.Error, ValueError):
            return None

    async def wait(self) -> int:
        """The exit code, 128 + n for signal n, once the engine and everything it started are gone."""
        code = await self._process.wait()
        # If the leash's outer half was killed, the inner one is still at work. All of them hold the output pipe open.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEASH_END_S):
                await asyncio.shield(self._reader)
        return code if code >= 0 else 128 - code

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, up to `timeout_s` to finish, then SIGKILL for all of it. Idempotent; safe to cancel and call again."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._process.wait()
        if self._lifeline is not None:
            lifeline, self._lifeline = self._lifeline, None
            os.close(lifeline)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEASH_END_S):
                await self._process.wait()
        if self._process.returncode is None:
            # The leash itself hangs; its inner half sees the outer one die and kills the rest.
            self._process.kill()
            await self._process.wait()
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        await asyncio.to_thread(self._log.close)

    def last_lines(self, count: int = LINES_KEPT) -> list[str]:
        return self._log.last_lines(count)

    async def _read_output(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        rest = b""
        while chunk := await stream.read(_READ_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._log.forward(line)
            if len(rest) > LINE_CHARACTERS_MAX * 4:  # at most four bytes a character: no need to see more of this line
                self._log.forward(rest)
                rest = b""
        if rest:
            self._log.forward(rest)


class LogForwarder:
    """Hands an engine's output to the log without ever waiting for it, and keeps the last lines for error reports.

    A log that nobody reads (a full pipe) blocks only the forwarder's own thread; lines beyond the queue are counted
    and dropped, so neither the agent nor, through a full pipe of its own, the engine stands still.
    """

    def __init__(self) -> None:
        self._kept: deque[str] = deque(maxlen=LINES_KEPT)
        self._waiting: queue.Queue[str | None] = queue.Queue(LINES_WAITING_MAX)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="engine log", daemon=True)
        self._thread.start()

    def forward(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        if len(text) > LINE_CHARACTERS_MAX:
            text = f"{text[:LINE_CHARACTERS_MAX]} ... ({len(text)} characters)"
        if not text:
            return
        self._kept.append(text)
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            self._dropped += 1

    def last_lines(self, count: int) -> list[str]:
        return list(self._kept)[-count:]

    def close(self) -> None:
        """Lets the thread finish what is queued, but does not wait long for a log that is stuck."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(timeout=1.0)

    def _write(self) -> None:
        while (text := self._waiting.get()) is not None:
            logger.info("engine: %s", text)
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                logger.warning("engine: %d lines dropped, the log is too slow", dropped)
