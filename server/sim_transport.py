"""uvicorn for the simulated engine: applications can end a connection as a network would, and the port can go away.

uvicorn keeps its transport to itself; this subclass of its httptools protocol hands a `Connection` to the application in
scope["extensions"]["sim.connection"].
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Generator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.guard import Message
from server.sim_faulty_send import Connection

CONNECTION_EXTENSION = "sim.connection"
_LINGER_0 = struct.pack("ii", 1, 0)  # on, zero seconds: close() sends RST


class TransportConnection:
    """A `Connection` over an asyncio transport."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def reset(self) -> None:
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()

    def write(self, data: bytes) -> None:
        self._transport.write(data)


def connection_of(scope: Message) -> Connection:
    """The client's connection of an ASGI scope that `ExposingProtocol` made."""
    connection: Connection = scope["extensions"][CONNECTION_EXTENSION]
    return connection


class ExposingProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with the connection in the scope's extensions."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connection = TransportConnection(transport)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION_EXTENSION: self._connection}  # type: ignore[dict-item]


class PortServer(uvicorn.Server):
    """A uvicorn server that leaves signals to its caller and can stop listening for a while."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def refuse(self, seconds: float) -> None:
        """Nothing listens for `seconds`; idle connections close, busy ones after their answer. Then listens again."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(seconds)
        if not self.should_exit:
            self.servers = [await self._listen()]

    async def _listen(self) -> asyncio.Server:
        loop = asyncio.get_running_loop()

        def make_protocol() -> asyncio.Protocol:
            return ExposingProtocol(self.config, self.server_state, self.lifespan.state, _loop=loop)

        return await loop.create_server(
            make_protocol, host=self.config.host, port=self.config.port, backlog=self.config.backlog
        )
