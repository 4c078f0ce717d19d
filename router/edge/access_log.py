"""One JSON line for each request's ending, written in batches: a system call per request would cost more than the line."""

import asyncio
from typing import BinaryIO

import msgspec

FLUSH_BYTES = 64 * 1024
FLUSH_S = 0.25


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
    first_byte_ms: float | None = None
    request_bytes: int = 0
    response_bytes: int = 0
    error: str = ""  # what went wrong upstream


class AccessLog:
    """Buffers lines and writes them to `stream` four times a second. Call `flush` before the process ends."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def write(self, record: AccessRecord) -> None:
        self._encoder.encode_into(record, self._buffer, -1)
        self._buffer += b"\n"
        if len(self._buffer) >= FLUSH_BYTES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._buffer:
            self._stream.write(self._buffer)
            self._stream.flush()
            self._buffer.clear()


class NoAccessLog:
    """In place of an AccessLog where none is wanted."""

    def write(self, record: AccessRecord) -> None:
        pass

    def flush(self) -> None:
        pass
