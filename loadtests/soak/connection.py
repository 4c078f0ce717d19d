"""One client's connection: bytes out, HTTP answers in, and every way of leaving."""

import asyncio
import socket
import struct
from collections import deque
from dataclasses import dataclass, field

import httptools

_RST_ON_CLOSE = struct.pack("ii", 1, 0)  # linger on, for no time
_READ_BYTES = 65536
_CONNECT_S = 10.0


class ConnectionEnded(Exception):
    """There is no connection, or the other side has ended it."""


@dataclass(slots=True)
class _Message:
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    is_complete: bool = False
    keeps_alive: bool = True
    ends_with_connection: bool = False


class Connection:
    """Answers come in the order of their requests: `read_status`, then `read_body` until it gives b"", then the next one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._parser = httptools.HttpResponseParser(self)
        self._messages: deque[_Message] = deque()
        self.keeps_alive = True  # after the answers that were read to their ends

    @classmethod
    async def open(cls, host: str, port: int, *, receive_bytes: int | None = None) -> "Connection":
        """`receive_bytes`: a receive buffer so small that a slow reader is felt on the other side. Raises ConnectionEnded."""
        client = socket.socket()
        client.setblocking(False)
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await asyncio.get_running_loop().sock_connect(client, (host, port))
                reader, writer = await asyncio.open_connection(sock=client, limit=receive_bytes or _READ_BYTES)
        except BaseException as error:
            client.close()
            if isinstance(error, OSError):
                raise ConnectionEnded(f"no connection: {error}") from error
            raise
        return cls(reader, writer)

    async def send(self, data: bytes) -> None:
        """Raises ConnectionEnded."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise ConnectionEnded(str(error)) from error

    async def read_status(self) -> int:
        """The status of the next answer, once its head is here. Raises ConnectionEnded."""
        while not (self._messages and self._messages[0].status):
            await self._read_more(_READ_BYTES)
        return self._messages[0].status

    async def read_body(self, size: int = _READ_BYTES) -> bytes:
        """The next bytes of the body; b"" at its end. Raises ConnectionEnded if that comes too early."""
        message = self._messages[0]
        while not message.chunks and not message.is_complete:
            await self._read_more(size)
        data = b"".join(message.chunks)
        message.chunks.clear()
        if not data:
            self.keeps_alive = self._messages.popleft().keeps_alive
        return data

    def half_close(self) -> None:
        self._writer.write_eof()

    async def close(self) -> None:
        self._writer.close()
        await self._closed()

    async def reset(self) -> None:
        """Leaves with RST, which also takes back what the other side has not read yet."""
        found = self._writer.get_extra_info("socket")
        if found is not None and not self._writer.is_closing():
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST_ON_CLOSE)
        self._writer.transport.abort()
        await self._closed()

    async def _closed(self) -> None:
        try:
            await self._writer.wait_closed()
        except OSError:
            return

    async def _read_more(self, size: int) -> None:
        try:
            data = await self._reader.read(size)
            if data:
                self._parser.feed_data(data)
                return
        except (OSError, httptools.HttpParserError) as error:
            raise ConnectionEnded(str(error)) from error
        last = self._messages[-1] if self._messages else None
        if last is None or last.is_complete or not last.ends_with_connection:
            raise ConnectionEnded("the connection was closed")
        last.is_complete = True
        last.keeps_alive = False

    # httptools

    def on_message_begin(self) -> None:
        self._messages.append(_Message())

    def on_header(self, name: bytes, value: bytes) -> None:
        self._messages[-1].headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        message, status = self._messages[-1], self._parser.get_status_code()
        if status >= 200:
            message.status = status
            message.ends_with_connection = not message.headers.keys() & {b"content-length", b"transfer-encoding"}
            message.keeps_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._messages[-1].chunks.append(body)

    def on_message_complete(self) -> None:
        if self._messages[-1].status:
            self._messages[-1].is_complete = True
        else:
            self._messages.pop()  # 1xx: the answer is still to come
