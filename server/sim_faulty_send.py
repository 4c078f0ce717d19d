"""Breaks one answer of the simulated engine, between the application and the server, as a scripted fault says."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from server.guard import Message, Send
from server.sim_faults import Fault, FaultKind

# What ends a complete stream, per route.
_LAST_EVENTS = (b"data: [DONE]\n", b"event: message_stop\n", b"event: response.completed\n")
_NOT_HTTP = b"\x16\x03\x01\x00\xa5 this is not HTTP \xff\xfe\r\n\r\n"
_FILLER = b"x" * 65536


class ConnectionBrokenByFault(Exception):
    """The fault has ended the answer, mostly with its connection; nothing more can be sent."""


class GenerationFailedByFault(Exception):
    """The fault makes generation fail; the answer ends with an error in vLLM's shape."""


class Connection(Protocol):
    """What a fault may do to the client's connection: provided by the server's protocol."""

    def reset(self) -> None:
        """Ends it with RST; unsent bytes are lost."""

    def close(self) -> None:
        """Ends it with FIN after what was written."""

    def write(self, data: bytes) -> None:
        """Sends bytes past HTTP."""


class FaultySend:
    """An ASGI `send` that passes `after_chunks` body chunks and then does its fault once.

    An answer in one piece counts as broken in its middle: half of the body passes where `after_chunks` is 1 or more.

    Raises (from the call that meets the fault):
        ConnectionBrokenByFault, GenerationFailedByFault.
    """

    def __init__(
        self,
        send: Send,
        fault: Fault,
        connection: Connection,
        *,
        hang: Callable[[], Awaitable[None]],
        is_armed: Callable[[], bool] = lambda: True,
    ) -> None:
        """`hang` hangs the engine and returns when it has recovered; `is_armed` is asked before the fault strikes."""
        self._send = send
        self._fault = fault
        self._connection = connection
        self._hang = hang
        self._is_armed = is_armed
        self._left = fault.after_chunks
        self._is_spent = False

    async def __call__(self, message: Message) -> None:
        if self._is_spent:
            await self._send(message)
            return
        if message["type"] == "http.response.start":
            await self._start(message)
            return
        kind = self._fault.kind
        is_last = not message.get("more_body", False)
        is_whole = is_last and self._left == self._fault.after_chunks  # the first and last: an answer in one piece
        if kind is FaultKind.NO_DONE:
            if not is_whole and self._ends_before(message["body"]):
                await self._strike()
            self._left -= 1
            await self._send(message)
            return
        if is_whole and (self._left > 0 or kind is FaultKind.HALF_EVENT):
            half = message["body"][: len(message["body"]) // 2]
            await self._send({"type": "http.response.body", "body": half, "more_body": True})
            await self._strike()
            await self._send({"type": "http.response.body", "body": message["body"][len(half) :]})
            return
        # After [DONE] it is too late for an error, but not for a connection that breaks.
        if self._left == 0 and not (is_last and kind is FaultKind.ERROR_FRAME):
            if kind is FaultKind.HALF_EVENT and self._is_armed():
                body = message["body"]
                await self._send({"type": "http.response.body", "body": body[: len(body) // 2], "more_body": True})
            await self._strike()
        self._left -= 1
        await self._send(message)

    async def _start(self, message: Message) -> None:
        """The head of the answer, which most faults may take the place of."""
        kind = self._fault.kind
        if self._left == 0 and kind in (FaultKind.STALL, FaultKind.RESET, FaultKind.TRUNCATE, FaultKind.GARBAGE):
            await self._strike()
        if kind is FaultKind.ENDLESS:
            headers = [(name, value) for name, value in message["headers"] if name != b"content-length"]
            message = {**message, "headers": headers}
        await self._send(message)

    def _ends_before(self, body: bytes) -> bool:
        """Whether NO_DONE leaves out this event and what follows."""
        if self._fault.after_chunks:
            return self._left == 0
        return body.startswith(_LAST_EVENTS)

    async def _strike(self) -> None:
        self._is_spent = True
        if not self._is_armed():
            return
        match self._fault.kind:
            case FaultKind.STALL:
                await self._hang()
            case FaultKind.ERROR_FRAME:
                raise GenerationFailedByFault("Internal server error")
            case FaultKind.RESET:
                self._connection.reset()
                raise ConnectionBrokenByFault
            case FaultKind.NO_DONE:
                await self._send({"type": "http.response.body", "body": b""})
                raise ConnectionBrokenByFault
            case FaultKind.ENDLESS:
                await self._send({"type": "http.response.body", "body": b"data: ", "more_body": True})
                while True:  # until the client leaves, which cancels this
                    await self._send({"type": "http.response.body", "body": _FILLER, "more_body": True})
                    await asyncio.sleep(0)
            case FaultKind.GARBAGE:
                self._connection.write(_NOT_HTTP)
                self._connection.close()
                raise ConnectionBrokenByFault
            case _:
                self._connection.close()
                raise ConnectionBrokenByFault
