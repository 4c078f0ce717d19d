"""The answer to one client: its head, its parts, its error, or its breaking off."""

import asyncio

from protocol import headers as names
from router.edge.client import ClientConnection
from router.exchange import Exchange, Headers, Send

# Seconds a client is told to wait before it tries again when nothing can serve it.
RETRY_AFTER_S = 2
# OpenAI's clients do not retry at all, or at once, when told to wait longer.
RETRY_AFTER_S_MAX = 60
# Seconds that a client may leave its answer unread once its buffers are full.
CLIENT_STALL_S = 120.0


class ClientStalled(Exception):
    """The client has not read for CLIENT_STALL_S, while its engine, and its place on a replica, waited for it."""


class Reply:
    """Keeps the exchange's status and bytes true to what was sent."""

    def __init__(
        self, send: Send, connection: ClientConnection, exchange: Exchange, *, extra_headers: Headers, show_replica: bool
    ) -> None:
        self._send = send
        self._connection = connection
        self._exchange = exchange
        self._extra_headers = extra_headers
        self._show_replica = show_replica
        self.is_started = False

    async def head(self, status: int, headers: Headers) -> None:
        self._exchange.status = status
        headers = [*headers, *self._own_headers(), *self._extra_headers]
        self.is_started = True
        await self._send_on({"type": "http.response.start", "status": status, "headers": headers})

    async def part(self, data: bytes) -> None:
        self._exchange.response_bytes += len(data)
        await self._send_on({"type": "http.response.body", "body": data, "more_body": True})

    async def last_part(self, data: bytes) -> None:
        self._exchange.response_bytes += len(data)
        await self._send_on({"type": "http.response.body", "body": data, "more_body": False})

    async def _send_on(self, message: dict[str, object]) -> None:
        if not self._connection.is_clogged:
            await self._send(message)
            return
        try:
            async with asyncio.timeout(CLIENT_STALL_S):
                await self._send(message)
        except TimeoutError:
            raise ClientStalled from None

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        await self.head(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.last_part(body)

    async def error(self, status: int, body: bytes, retry_after: bytes | None = None) -> None:
        """`body` is an error object; `retry_after` is the engine's word, if it had one."""
        headers: Headers = [(b"content-type", b"application/json")]
        if retry_after is not None and retry_after.isdigit():
            headers.append((names.RETRY_AFTER, b"%d" % min(RETRY_AFTER_S_MAX, max(1, int(retry_after)))))
        elif status in (429, 503):
            headers.append((names.RETRY_AFTER, b"%d" % RETRY_AFTER_S))
        if status in (408, 413):
            headers.append((b"connection", b"close"))  # the rest of the request's body is not read
        await self.whole(status, headers, body)

    def break_off(self) -> None:
        """Ends a started answer so that nobody takes it for complete."""
        self._connection.break_off()

    def _own_headers(self) -> Headers:
        exchange = self._exchange
        headers: Headers = [
            (names.REQUEST_ID, exchange.request_id.encode()),
            (names.PROCESSING_MS, b"%d" % (exchange.elapsed_s * 1000)),
        ]
        if exchange.checkpoint:
            headers.append((names.CHECKPOINT, exchange.checkpoint.encode("latin-1")))
        if self._show_replica and exchange.replica:
            headers.append((names.REPLICA, exchange.replica.encode()))
        return headers
