"""The public port: accepts clients, sweeps their deadlines, and drains when told to stop."""

import asyncio
import socket
import time
from contextlib import suppress
from email.utils import formatdate

from router.edge.client import ClientConnection, ServerState, Service

LISTEN_BACKLOG = 2048
SWEEP_S = 1.0
# Seconds for what requests that are cancelled at the end of draining have to say.
LAST_WORDS_S = 1.0


class Listener:
    def __init__(self, service: Service, *, body_bytes_max: int, body_timeout_s: float) -> None:
        self._state = ServerState(service=service, body_bytes_max=body_bytes_max, body_timeout_s=body_timeout_s)
        self._server: asyncio.Server | None = None

    async def open(self, listening: socket.socket) -> None:
        """Accepts clients from now on."""
        loop = asyncio.get_running_loop()
        self._set_date()
        self._server = await loop.create_server(
            lambda: ClientConnection(self._state, loop), sock=listening, backlog=LISTEN_BACKLOG
        )

    async def run(self) -> None:
        """Sweeps about once a second, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._set_date()
            now = time.monotonic()
            for connection in tuple(self._state.connections):
                connection.sweep(now)

    async def drain(self, timeout_s: float) -> None:
        """Takes no new connection or request, and returns when the last answer is given, at the latest after `timeout_s`."""
        self._state.is_draining = True
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._state.connections):
            connection.drain()
        if await self._is_empty_within(timeout_s):
            return
        for connection in tuple(self._state.connections):
            connection.cancel()
        await self._is_empty_within(LAST_WORDS_S)

    async def _is_empty_within(self, timeout_s: float) -> bool:
        if not self._state.connections:
            return True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._state.is_empty.wait(), timeout_s)
        return not self._state.connections

    def _set_date(self) -> None:
        self._state.date_line = b"date: %b\r\n" % formatdate(usegmt=True).encode()
