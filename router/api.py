"""The public port: a plain ASGI application, so that the hot routes cost nothing but themselves.

Default-deny: a path that is not listed here is answered 404 and never reaches an engine. Decisions are made on the decoded
path (`scope["path"]`), by exact match.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from protocol import headers as names
from protocol.errors import encode_error
from router.auth import UNAUTHORIZED_MESSAGE, StaticKeys
from router.cors import Cors
from router.edge.access_log import AccessLog, AccessRecord, NoAccessLog
from router.edge.metrics import RouterMetrics
from router.exchange import Headers, Receive, Scope, Send, client_request_id
from router.outcome import Outcome
from router.proxy import Proxy
from router.state.replicas import ReplicaTable

PROXIED = frozenset({"/v1/chat/completions", "/v1/completions"})
MODELS = "/v1/models"
_MODEL_PREFIX = MODELS + "/"


class Api:
    def __init__(
        self,
        *,
        proxy: Proxy,
        table: ReplicaTable,
        metrics: RouterMetrics,
        access_log: AccessLog | NoAccessLog,
        keys: StaticKeys,
        cors: Cors,
        alias: str | None,
        started_unix: int,
        new_id: Callable[[], str],
    ) -> None:
        self._proxy = proxy
        self._table = table
        self._metrics = metrics
        self._access_log = access_log
        self._keys = keys
        self._cors = cors
        self._alias = alias
        self._started_unix = started_unix
        self._new_id = new_id
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        path: str = scope["path"]
        method: str = scope["method"]
        extra = self._cors.headers(scope["headers"])
        if path in PROXIED and method == "POST":
            if self._keys.allows(scope["headers"]):
                await self._proxy.handle(scope, receive, send, extra)
            else:
                await self._refuse(scope, send, extra, 401, UNAUTHORIZED_MESSAGE, Outcome.REJECTED_UNAUTHORIZED)
            return
        await self._serve_rest(scope, send, path, method, extra)

    async def _serve_rest(self, scope: Scope, send: Send, path: str, method: str, extra: Headers) -> None:
        allowed = _allowed_methods(path)
        if allowed is None:
            hint = f"did you mean /v1{path}?" if _allowed_methods(f"/v1{path}") else "this service has no such path."
            message = f"Invalid URL ({method} {path}); {hint}"
            await self._refuse(scope, send, extra, 404, message, Outcome.REJECTED_INVALID, code="unknown_url")
        elif method == "OPTIONS" and (preflight := self._cors.preflight(scope["headers"], allowed)) is not None:
            await _send(send, 204, preflight, b"", method)
        elif method not in allowed.split(", "):
            extra = [*extra, (b"allow", allowed.encode())]
            message = f"{path} does not take {method}; it takes {allowed}."
            await self._refuse(scope, send, extra, 405, message, Outcome.REJECTED_INVALID, code="method_not_allowed")
        elif path == "/health":
            await self._send_json(scope, send, extra, 200, {"status": "ok"})
        elif path == "/ready":
            await self._serve_ready(scope, send, extra)
        elif not self._keys.allows(scope["headers"]):
            await self._refuse(scope, send, extra, 401, UNAUTHORIZED_MESSAGE, Outcome.REJECTED_UNAUTHORIZED)
        elif path == MODELS:
            cards = [self._model_card(name) for name in self._model_names()]
            await self._send_json(scope, send, extra, 200, {"object": "list", "data": cards})
        else:
            await self._serve_model(scope, send, path.removeprefix(_MODEL_PREFIX), extra)

    async def _serve_ready(self, scope: Scope, send: Send, extra: Headers) -> None:
        if self.is_draining:
            await self._send_json(scope, send, extra, 503, {"status": "draining"})
        elif self._table.is_ready:
            await self._send_json(scope, send, extra, 200, {"status": "ready"})
        else:
            problems = {replica.id: _first_line(replica.observed.problem or replica.health) for replica in self._table.all()}
            await self._send_json(scope, send, extra, 503, {"status": "no replica is ready", "replicas": problems})

    async def _serve_model(self, scope: Scope, send: Send, name: str, extra: Headers) -> None:
        if name in self._model_names():
            await self._send_json(scope, send, extra, 200, self._model_card(name))
            return
        message = f"The model '{name}' does not exist; GET {MODELS} lists what is served."
        await self._refuse(scope, send, extra, 404, message, Outcome.REJECTED_INVALID, code="model_not_found", param="model")

    def _model_names(self) -> list[str]:
        """From the last good word of each replica, so that one that restarts takes no model off the list."""
        if self._alias is not None:
            return [self._alias] if self._table.served else []
        return sorted(self._table.served)

    def _model_card(self, name: str) -> dict[str, Any]:
        card: dict[str, Any] = {"id": name, "object": "model", "created": self._started_unix, "owned_by": "intellect-serve"}
        replicas = self._table.served.get(name) or next(iter(self._table.served.values()), ())
        lengths = [r.status.max_model_len for r in replicas if r.status is not None and r.status.max_model_len is not None]
        if lengths:
            card["max_model_len"] = min(lengths)
        return card

    async def _send_json(self, scope: Scope, send: Send, extra: Headers, status: int, value: object) -> None:
        headers = [(b"content-type", b"application/json"), (names.REQUEST_ID, self._request_id(scope)), *extra]
        await _send(send, status, headers, msgspec.json.encode(value), scope["method"])

    async def _refuse(
        self,
        scope: Scope,
        send: Send,
        extra: Headers,
        status: int,
        message: str,
        outcome: Outcome,
        *,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        request_id = self._request_id(scope)
        route = scope["path"] if scope["path"] in PROXIED else "other"
        self._metrics.request_ended(route, "", outcome, 0.0)
        self._access_log.write(
            AccessRecord(
                time=time.time(),
                request_id=request_id.decode(),
                route=route,
                outcome=outcome,
                status=status,
                duration_ms=0.0,
            )
        )
        if status == 401:
            extra = [*extra, (b"www-authenticate", b"Bearer")]
            code = "invalid_api_key"
        headers = [(b"content-type", b"application/json"), (names.REQUEST_ID, request_id), *extra]
        await _send(send, status, headers, encode_error(status, message, code=code, param=param), scope["method"])

    def _request_id(self, scope: Scope) -> bytes:
        return (client_request_id(scope["headers"]) or f"req_{self._new_id()}").encode()


def _allowed_methods(path: str) -> str | None:
    """For the `Allow` header; None for a path that does not exist."""
    if path in PROXIED:
        return "POST"
    if path in ("/health", "/ready", MODELS) or (path.startswith(_MODEL_PREFIX) and path != _MODEL_PREFIX):
        return "GET, HEAD"
    return None


def _first_line(problem: str) -> str:
    """Without what follows: an engine's own log lines are for operators, and this route needs no key."""
    return problem.partition("\n")[0][:200]


async def _send(send: Send, status: int, headers: Headers, body: bytes, method: str) -> None:
    if status != 204:
        headers = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if method == "HEAD" else body, "more_body": False})
