"""A client that is nothing but a socket: it leaves in every way in which a client can, and reads without keeping."""

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

_LINGER_0 = struct.pack("ii", 1, 0)  # on, zero seconds: close() sends RST
_PART_BYTES = 1024 * 1024
_LAST_CHUNK = b"0\r\n\r\n"


class RawClient:
    """A socket with one request on it."""

    def __init__(self, port: int, body: Mapping[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.socket.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(content), content)
        )
        self.socket.setblocking(False)
        self.received = b""

    async def receive(self, mark: bytes) -> None:
        """Reads until `mark` has come."""
        async with asyncio.timeout(10):
            while mark not in self.received:
                data = await asyncio.get_running_loop().sock_recv(self.socket, 65536)
                assert data, "the router closed the connection"
                self.received += data

    async def discard(self) -> tuple[int, bool]:
        """Reads to the end of a chunked answer or of the connection: bytes, and whether the answer was whole."""
        buffer, count, tail = bytearray(_PART_BYTES), 0, b""
        while not tail.endswith(_LAST_CHUNK):
            try:
                size = await asyncio.get_running_loop().sock_recv_into(self.socket, buffer)
            except ConnectionResetError:
                return count, False
            if not size:
                return count, False
            count += size
            tail = (tail + buffer[max(0, size - len(_LAST_CHUNK)) : size])[-len(_LAST_CHUNK) :]
        return count, True

    def leave(self, how: str) -> None:
        if how == "RST":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
        if how == "half-close":
            self.socket.shutdown(socket.SHUT_WR)
        else:
            self.socket.close()
