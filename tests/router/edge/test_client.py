"""A client's connection that ends at the worst moment: between a request's arrival and its first step."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from router.edge.client import ClientConnection, Refusal, Request, ServerState

REQUEST = b"POST /%b HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


class Transport(asyncio.Transport):
    """Of a client that takes everything."""

    def writelines(self, list_of_data: Any) -> None:
        pass

    def write(self, data: Any) -> None:
        pass


class Service:
    """Answers `/waits` when `may_answer` is set, and nothing else. `endings`: what became of its requests."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.endings: dict[str, str] = {}

    def admit(self, request: Request) -> Refusal | None:
        return None

    def refuse(self, request: Request, connection: ClientConnection, refusal: Refusal) -> None:
        raise AssertionError("nothing is refused here")

    def serve(self, request: Request, connection: ClientConnection) -> Coroutine[Any, Any, None]:
        self.endings[request.path] = "begun"
        return self._answer(request.path, connection)

    async def _answer(self, path: str, connection: ClientConnection) -> None:
        try:
            await (self.may_answer if path == "/waits" else asyncio.Event()).wait()
            connection.respond(200, b"", b"")
        finally:
            self.endings[path] = "ended"


def connected() -> tuple[Service, ClientConnection]:
    service = Service()
    connection = ClientConnection(ServerState(service, 1000, 60.0), asyncio.get_running_loop())
    connection.connection_made(Transport())
    return service, connection


async def some_steps() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_request_whose_client_leaves_at_once_still_ends() -> None:
    """It is counted and logged like every other that was taken."""
    service, connection = connected()
    connection.data_received(REQUEST % b"slow")
    connection.connection_lost(None)
    await some_steps()
    assert service.endings == {"/slow": "ended"}


async def test_a_pipelined_request_of_a_client_that_has_left_is_not_begun() -> None:
    """No engine works for nobody."""
    service, connection = connected()
    connection.data_received(REQUEST % b"waits" + REQUEST % b"slow")
    await some_steps()
    service.may_answer.set()
    asyncio.get_running_loop().call_soon(connection.connection_lost, None)  # right behind the first answer
    await some_steps()
    assert service.endings == {"/waits": "ended"}
