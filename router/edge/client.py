"""The client's connection: uvicorn's protocol, limits on the head of a request, and two things that ASGI cannot say.

ASGI tells of a lost client only to a task that waits for it, which would cost a second task per request, and it has no way
to break off an answer: ending it always ends it cleanly, which a client would take for the whole answer.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from protocol.errors import encode_error

_EXTENSION = "intellect.client"


# Beyond any client's headers; llhttp itself has no limit.
HEAD_BYTES_MAX = 64 * 1024
# From a connection's, or a request's, first byte to the end of its head.
HEAD_TIMEOUT_S = 30.0

# Java's and curl's clients offer HTTP/2 with each first request. Left in, the offer makes the parser take the body for
# bytes of that other protocol; taken out, it is declined, as RFC 9110 section 7.8 lets a server do.
_UPGRADE_OFFER = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)


class ClientConnection(HttpToolsProtocol):
    on_lost: Callable[[], object] | None = None  # called once if the client goes while a request of its is running
    is_lost = False
    _is_in_head = True
    _heads = 0  # requests whose head is complete
    _head_bytes = 0  # of a head that is not
    _head_timer: asyncio.TimerHandle | None = None

    @property
    def is_clogged(self) -> bool:
        """Whether the client reads more slowly than it is written to."""
        return self.flow.write_paused

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._await_head()

    def data_received(self, data: bytes) -> None:
        was_in_head, heads = self._is_in_head, self._heads
        if was_in_head and data.find(b"h2c", 0, HEAD_BYTES_MAX) >= 0:
            head, end, body = data.partition(b"\r\n\r\n")
            data = _UPGRADE_OFFER.sub(b"", head + b"\r\n").removesuffix(b"\r\n") + end + body if end else data
        super().data_received(data)
        if was_in_head and self._is_in_head and self._heads == heads:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
                self._refuse(431, f"The headers of the request are longer than {HEAD_BYTES_MAX} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {_EXTENSION: {"connection": self}}
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._heads += 1
        self._head_bytes = 0
        self._stop_head_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head = True
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._stop_head_timer()
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "The request is not valid HTTP.")

    def break_off(self) -> None:
        """Sends what is written and closes without ending the answer, so that no client takes it for complete."""
        self.cycle.disconnected = True  # uvicorn then expects nothing more of the application
        self.transport.close()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up_head(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answers what never became a request."""
        body = encode_error(status, message)
        head = b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (STATUS_LINE[status], len(body)) + body)
        self.transport.close()


def client_of(scope: dict[str, Any]) -> ClientConnection:
    connection = scope["extensions"][_EXTENSION]["connection"]
    assert isinstance(connection, ClientConnection)
    return connection


class ClientWatch:
    """Cancels the task that runs a request when its client goes. One for each request."""

    __slots__ = ("_connection", "_task")

    def __init__(self, connection: ClientConnection) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connection = connection
        self._task = task

    @property
    def is_client_gone(self) -> bool:
        return self._connection.is_lost

    def start(self) -> None:
        if self._connection.is_lost:
            self._task.cancel()
        else:
            self._connection.on_lost = self._task.cancel

    def stop(self) -> None:
        self._connection.on_lost = None
