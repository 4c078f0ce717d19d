"""The client's connection: uvicorn's protocol, plus the two things that ASGI cannot say cheaply or at all.

ASGI tells of a lost client only to a task that waits for it, which would cost a second task per request, and it has no way
to break off an answer: ending it always ends it cleanly, which a client would take for the whole answer.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_EXTENSION = "intellect.client"


class ClientConnection(HttpToolsProtocol):
    on_lost: Callable[[], object] | None = None  # called once if the client goes while a request of its is running
    is_lost = False

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {_EXTENSION: {"connection": self}}

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def break_off(self) -> None:
        """Sends what is written and closes without ending the answer, so that no client takes it for complete."""
        self.cycle.disconnected = True  # uvicorn then expects nothing more of the application
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
