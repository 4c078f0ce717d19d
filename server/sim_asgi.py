"""The little of ASGI that the simulated engine needs: one request, JSON answers, a route table."""

import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from server.guard import Message, Receive, Send
from server.sim_errors import ApiError

JSON = b"application/json"
SSE_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"),)


class ClientGone(Exception):
    """The client closed its connection before its request was complete."""


class Request:
    """One HTTP request of an ASGI server."""

    __slots__ = ("_receive", "headers", "method", "path", "scope", "send")

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.send = send
        self._receive = receive

    @property
    def query(self) -> dict[str, str]:
        return dict(urllib.parse.parse_qsl(self.scope.get("query_string", b"").decode("latin-1")))

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            ClientGone: the client left first.
        """
        chunks: list[bytes] = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunks.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def read_model_body(self) -> Mapping[str, Any]:
        """A JSON object as vLLM's OpenAI routes take it.

        Raises:
            ApiError: another content type, no JSON, or no object.
            ClientGone: the client left first.
        """
        raw = await self.read()
        media_type = (self.header(b"content-type") or "").partition(";")[0].lower()
        if media_type != "application/json":
            message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
            raise ApiError(400, "Bad Request", message)
        try:
            body = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError.invalid_body("json_invalid", "body", f"JSON decode error: {error}", {}) from error
        if not isinstance(body, dict):
            message = "Input should be a valid dictionary or object to extract fields from"
            raise ApiError.invalid_body("model_attributes_type", "body", message, body)
        return body

    async def read_admin_body(self) -> Mapping[str, Any]:
        """A JSON object as vLLM's development routes take it; an absent body is an empty object.

        Raises:
            ApiError: no JSON, or no object.
            ClientGone: the client left first.
        """
        raw = await self.read()
        try:
            body = msgspec.json.decode(raw) if raw else {}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError.http(400, f"JSON decode error: {error}") from error
        if not isinstance(body, dict):
            raise ApiError.http(400, "Request body must be a JSON object")
        return body

    async def until_gone(self) -> None:
        """Returns when the client has closed its connection (or its answer is complete). Call it after `read`."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


Handler = Callable[[Request], Awaitable[None]]
Routes = dict[str, dict[str, Handler]]  # path -> method -> handler


async def respond(
    send: Send,
    body: bytes,
    *,
    status: int = 200,
    content_type: bytes | None = JSON,
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    """One complete answer."""
    all_headers = [(b"content-length", str(len(body)).encode()), *headers]
    if content_type is not None:
        all_headers.append((b"content-type", content_type))
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


async def respond_json(send: Send, value: object, *, status: int = 200) -> None:
    await respond(send, msgspec.json.encode(value), status=status)


async def respond_error(send: Send, error: ApiError) -> None:
    await respond(send, error.body(), status=error.status)
