"""ASGI middleware inside the engine: development routes need a token, generated answers name their weights.

vLLM takes it with `--middleware server.guard.EngineGuard` and constructs it with the application alone, so its two
settings come from the environment: INTELLECT_ENGINE_TOKEN and INTELLECT_CHECKPOINT.

The guard fails closed. A path is open only if it is spelled exactly as in the list below: `//pause`, `/pause/`,
`/v1/../pause` and everything a later vLLM may add need the token. Without a token in the environment nothing else than
the open paths is served at all.
"""

import hmac
import os
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from protocol.errors import encode_error
from protocol.headers import CHECKPOINT, ENGINE_TOKEN
from protocol.status import BASE_VERSION

TOKEN_VARIABLE = "INTELLECT_ENGINE_TOKEN"
CHECKPOINT_VARIABLE = "INTELLECT_CHECKPOINT"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

# Answers of these paths depend on the weights, so they carry the checkpoint's label.
GENERATING_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/responses",
    }
)
OTHER_OPEN_PATHS = frozenset(
    {
        "/detokenize",
        "/health",
        "/is_paused",
        "/kv_event_sources",
        "/load",
        "/metrics",
        "/ping",
        "/tokenize",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/version",
    }
)
# A stored response and its cancellation; an id never holds a slash or a dot.
_RESPONSE_PATH = re.compile(r"/v1/responses/[A-Za-z0-9_-]{1,128}(/cancel)?")

RELABEL_PATH = "/update_weight_version"
# What `protocol.status.checkpoint_label` can make, and what is safe as a header value.
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(\+[0-9]{1,18})?")
_RELABEL_BODY_BYTES_MAX = 4096


class _Relabel(msgspec.Struct, frozen=True):
    new_version: str


class EngineGuard:
    """See the module's docstring. `environ` is an argument for tests; the engine passes the application alone."""

    def __init__(self, app: ASGIApp, environ: Mapping[str, str] = os.environ) -> None:
        self._app = app
        self._token = environ.get(TOKEN_VARIABLE, "").encode()
        self._label_header = (CHECKPOINT, _checked_label(environ.get(CHECKPOINT_VARIABLE) or BASE_VERSION).encode())

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            # No open path speaks WebSocket. Closing before accepting makes the server answer 403.
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "WebSockets are not served here"})
            return
        path = scope["path"]
        if path in GENERATING_PATHS or _RESPONSE_PATH.fullmatch(path):
            await self._app(scope, receive, _LabelledSend(self, send))
        elif path in OTHER_OPEN_PATHS:
            await self._app(scope, receive, send)
        elif not self._is_authorised(scope["headers"]):
            await _refuse(send, 403, f"This path needs the engine's token in the header {ENGINE_TOKEN.decode()}.")
        elif path == RELABEL_PATH and scope["method"] == "POST":
            await self._relabel(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    @property
    def label_header(self) -> tuple[bytes, bytes]:
        return self._label_header

    def _is_authorised(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name == ENGINE_TOKEN]
        # A repeated header is ambiguous, and an absent token in the environment must not match an empty header.
        return bool(self._token) and len(given) == 1 and hmac.compare_digest(given[0], self._token)

    async def _relabel(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Lets the engine take its new weight version and, once it has accepted, labels answers with it."""
        body = await _read_body(receive, _RELABEL_BODY_BYTES_MAX)
        if body is None:
            await _refuse(send, 400, f"The body must arrive whole and be at most {_RELABEL_BODY_BYTES_MAX} bytes long.")
            return
        try:
            label = _checked_label(msgspec.json.decode(body, type=_Relabel).new_version)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            await _refuse(send, 400, f'The body must be {{"new_version": LABEL}}: {error}', param="new_version")
            return
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def follow(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self._label_header = (CHECKPOINT, label.encode())
            await send(message)

        await self._app(scope, replay, follow)


class _LabelledSend:
    """Adds the checkpoint's label to one response.

    The start is held back until the first body message, because an engine sends it before it has a token: a request
    that waited through a swap is labelled with the weights that produced its first token, not with those that were
    loaded when it arrived.
    """

    __slots__ = ("_guard", "_held", "_send")

    def __init__(self, guard: EngineGuard, send: Send) -> None:
        self._guard = guard
        self._send = send
        self._held: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._held = message
            return
        if self._held is not None:
            start, self._held = self._held, None
            start["headers"] = [*start.get("headers", ()), self._guard.label_header]
            await self._send(start)
        await self._send(message)


def _checked_label(label: str) -> str:
    """Raises ValueError for a label that could not be sent as a header or that no agent would send."""
    if not _LABEL.fullmatch(label):
        raise ValueError(f"{label!r} is not a checkpoint label; expected VERSION or VERSION+EPOCH")
    return label


async def _read_body(receive: Receive, size_max: int) -> bytes | None:
    """The whole request body, or None if it is too long or the client left."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        chunk: bytes = message.get("body", b"")
        body += chunk
        if len(body) > size_max:
            return None
        if not message.get("more_body", False):
            return body


async def _refuse(send: Send, status: int, text: str, *, param: str | None = None) -> None:
    body = encode_error(status, text, param=param)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
