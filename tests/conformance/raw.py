"""An HTTP client that sends the bytes it is given, for what no HTTP library would send."""

import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tests.conformance import strict

TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    is_chunked: bool

    def header(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key == name]
        assert len(values) <= 1, f"{name} comes {len(values)} times"
        return values[0] if values else None

    @property
    def error(self) -> dict[str, str | None]:
        assert self.header("content-type") == "application/json", self
        return strict.check_error(self.body)


class ClosedWithoutAnswer(Exception):
    """The connection ended, or was reset, before an answer began."""


class Wire:
    """One connection. Use it as a context manager."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self.socket = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout_s)
        self._file = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read_line(self) -> bytes:
        return self._file.readline()

    def read_answer(self, method: str = "GET") -> Answer:
        """The next answer, interim ones passed over.

        Raises:
            ClosedWithoutAnswer, ValueError: an answer that breaks off.
        """
        status, headers = self._read_head()
        while status == 100:
            status, headers = self._read_head()
        by_name = dict(headers)
        is_chunked = by_name.get("transfer-encoding") == "chunked"
        if method == "HEAD" or status in (204, 304):
            body = b""
        elif is_chunked:
            body = self._read_chunks()
        elif "content-length" in by_name:
            length = int(by_name["content-length"])
            body = self._file.read(length)
            if len(body) < length:
                raise ValueError(f"the answer ends after {len(body)} of {length} bytes")
        else:
            body = self._file.read()
        return Answer(status, headers, body, is_chunked)

    def read_until(self, mark: bytes) -> bytes:
        """What comes until `mark` has come."""
        data = b""
        while mark not in data:
            part = self._file.read1(65536)
            if not part:
                raise ClosedWithoutAnswer(f"{data!r} and then the end")
            data += part
        return data

    def read_to_end(self) -> bytes:
        """Everything until the router closes the connection. A reset counts as an end."""
        data = b""
        try:
            while part := self._file.read1(65536):
                data += part
        except ConnectionResetError:
            pass
        return data

    def is_ended(self) -> bool:
        """Whether the router has closed its side; waits for it as long as the connection's timeout."""
        return self.read_to_end() == b""

    def half_close(self) -> None:
        with suppress(OSError):  # the router may have closed the connection already
            self.socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Ends the connection with RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _read_head(self) -> tuple[int, tuple[tuple[str, str], ...]]:
        try:
            line = self._file.readline().decode("latin-1")
        except ConnectionResetError as error:
            raise ClosedWithoutAnswer from error
        if not line:
            raise ClosedWithoutAnswer
        version, _, rest = line.partition(" ")
        assert version in ("HTTP/1.1", "HTTP/1.0"), line
        headers = []
        while text := self._file.readline().decode("latin-1").rstrip("\r\n"):
            name, _, value = text.partition(":")
            headers.append((name.lower(), value.strip()))
        return int(rest[:3]), tuple(headers)

    def _read_chunks(self) -> bytes:
        body = b""
        while True:
            size = int(self._file.readline() or b"x", 16)
            part = self._file.read(size + 2)
            if len(part) < size + 2:
                raise ValueError("the answer ends inside a chunk")
            if size == 0:
                return body
            body += part[:-2]


def request(
    method: str, target: str, headers: Mapping[str, str] | None = None, body: bytes = b"", *, version: str = "1.1"
) -> bytes:
    """The bytes of a request. `host` and, with a body, `content-length` are added where `headers` has none."""
    fields = {"host": "router", **({"content-length": str(len(body))} if body else {}), **(headers or {})}
    if "transfer-encoding" in fields:
        fields.pop("content-length", None)
    lines = [f"{method} {target} HTTP/{version}", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def exchange(url: str, data: bytes, method: str = "GET") -> Answer:
    """One request on a connection of its own."""
    with Wire(url) as wire:
        wire.send(data)
        return wire.read_answer(method)
