"""One JSON line for each request's ending, written in batches and off the path of requests."""

import asyncio
import fcntl
import logging
import os
import queue
import threading
from pathlib import Path

import msgspec

FLUSH_BYTES = 64 * 1024
FLUSH_S = 0.25
# Lines that a slow reader may leave waiting; beyond it they are dropped.
WAITING_BYTES_MAX = 8 * 1024 * 1024
CLOSE_S = 1.0

log = logging.getLogger(__name__)


class AccessRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sizes, ids and times only: no header, no key and nothing of a prompt or an answer."""

    time: float  # Unix seconds at the ending
    request_id: str
    route: str
    outcome: str
    status: int
    duration_ms: float
    model: str = ""
    replica: str = ""
    checkpoint: str = ""
    attempts: int = 0
    continuations: int = 0
    first_byte_ms: float | None = None
    request_bytes: int = 0
    response_bytes: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    error: str = ""  # what went wrong upstream


class AccessLog:
    """Collects lines and hands them to a thread four times a second.

    Whoever reads the stream can be slow, stuck or gone, and a disk can be full; none of this may hold up a request. Lines that
    cannot be written are dropped and counted. Call `close` before the process ends.
    """

    def __init__(self, descriptor: int, lock: Path | None = None, *, name: str = "access log") -> None:
        """`lock` is a file that all processes share which write to the same stream, so that none breaks another's lines."""
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._writer = _WriterThread(descriptor, lock, name)

    def write(self, record: msgspec.Struct) -> None:
        self._encoder.encode_into(record, self._buffer, -1)
        self._buffer += b"\n"
        if len(self._buffer) >= FLUSH_BYTES:
            self._hand_over()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._hand_over)

    def close(self) -> None:
        self._hand_over()
        self._writer.close()

    @property
    def dropped_bytes(self) -> int:
        return self._writer.dropped_bytes

    def _hand_over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._buffer:
            self._writer.take(bytes(self._buffer))
            self._buffer.clear()


class _WriterThread:
    def __init__(self, descriptor: int, lock: Path | None, name: str) -> None:
        self._name = name
        self._descriptor = descriptor
        self._lock = None if lock is None else lock.open("w")  # its own opening of the file: locks belong to openings
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._has_failed = False
        self.dropped_bytes = 0
        # A daemon: a reader that is stuck for good must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def take(self, lines: bytes) -> None:
        if self._waiting_bytes > WAITING_BYTES_MAX:
            self.dropped_bytes += len(lines)
            return
        self._waiting_bytes += len(lines)
        self._queue.put(lines)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (lines := self._queue.get()) is not None:
            try:
                self._write(lines)
                self._has_failed = False
            except OSError as error:
                self.dropped_bytes += len(lines)
                if not self._has_failed:
                    log.warning("the %s cannot be written, lines are dropped: %s", self._name, error.strerror)
                self._has_failed = True
            finally:
                self._waiting_bytes -= len(lines)
        if self._lock is not None:
            self._lock.close()

    def _write(self, lines: bytes) -> None:
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            left = memoryview(lines)
            while left:
                left = left[os.write(self._descriptor, left) :]
        finally:
            if self._lock is not None:
                fcntl.flock(self._lock, fcntl.LOCK_UN)


class NoAccessLog:
    """In place of an AccessLog where none is wanted."""

    def write(self, record: AccessRecord) -> None:
        pass

    def close(self) -> None:
        pass
