"""The public port's routes.

Default-deny: a path that is not listed here is answered 404 and never reaches an engine. Decisions are made on the decoded
path, by exact match.
"""

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from protocol import headers as names
from protocol.openai import Surface
from router.auth import UNAUTHORIZED_MESSAGE, StaticKeys
from router.cors import Cors
from router.edge.client import ClientConnection, Refusal, Request
from router.exchange import client_request_id
from router.outcome import Outcome
from router.proxy import Proxy
from router.reply import ANTHROPIC
from router.request_body import GZIP
from router.state.replicas import ReplicaTable
from router.stored_responses import parse_path

PROXIED = {surface.value: surface for surface in Surface}
MODELS = "/v1/models"
_MODEL_PREFIX = MODELS + "/"
_CODINGS = GZIP | {b"identity"}
_OPEN = frozenset({"/health", "/ready"})
_PLAIN = frozenset({"/health", "/ready", "/openapi.json", MODELS})


class Api:
    """The service behind the public port (`edge.client.Service`)."""

    def __init__(
        self,
        *,
        proxy: Proxy,
        table: ReplicaTable,
        keys: StaticKeys,
        cors: Cors,
        alias: str | None,
        started_unix: int,
        document: bytes,
        new_id: Callable[[], str],
    ) -> None:
        self._proxy = proxy
        self._table = table
        self._keys = keys
        self._cors = cors
        self._alias = alias
        self._started_unix = started_unix
        self._document = document  # OpenAPI's
        self._new_id = new_id
        self.is_draining = False

    def admit(self, request: Request) -> Refusal | None:
        path, method, headers = request.path, request.method, request.headers
        surface = PROXIED.get(path)
        if surface is None or method != "POST":
            return self._admit_rest(request)
        if not self._keys.allows(headers, takes_x_api_key=surface in ANTHROPIC):
            return _UNAUTHORIZED
        kind = headers.get(b"content-type")
        if kind is not None and kind.partition(b";")[0].strip().lower() != b"application/json":
            return Refusal(415, "The body must be JSON; send it with 'Content-Type: application/json'.")
        coding = headers.get(b"content-encoding")
        if coding is not None and coding.strip().lower() not in _CODINGS:
            message = f"Content-Encoding '{coding.decode('latin-1')[:40]}' is not accepted; send the JSON as it is, or gzip it."
            return Refusal(415, message)
        return None

    def _admit_rest(self, request: Request) -> Refusal | None:
        path, method = request.path, request.method
        allowed = _allowed_methods(path)
        if allowed is None:
            hint = f"did you mean /v1{path}?" if _allowed_methods(f"/v1{path}") else "this service has no such path."
            return Refusal(404, f"Invalid URL ({method} {path[:200]}); {hint}", code="unknown_url")
        if method == "OPTIONS" and self._cors.preflight(request.headers, allowed) is not None:
            return None
        if method not in allowed.split(", "):
            message = f"{path[:200]} does not take {method}; it takes {allowed}."
            return Refusal(405, message, code="method_not_allowed", allow=allowed)
        if path not in _OPEN and not self._keys.allows(request.headers):
            return _UNAUTHORIZED
        return None

    def refuse(self, request: Request, connection: ClientConnection, refusal: Refusal) -> None:
        extra = self._cors.lines(request.headers)
        if refusal.allow is not None:
            extra += b"allow: %b\r\n" % refusal.allow.encode()
        if refusal.status == 401:
            extra += b"www-authenticate: Bearer\r\n"
        if refusal.status == 415:
            extra += b"accept-encoding: gzip\r\n"
        surface = PROXIED.get(request.path)
        route = "other" if surface is None else surface.value
        self._proxy.refuse(surface or Surface.CHAT, route, request, connection, refusal, extra)

    def serve(self, request: Request, connection: ClientConnection) -> Coroutine[Any, Any, None] | None:
        path = request.path
        extra = self._cors.lines(request.headers)
        surface = PROXIED.get(path)
        if surface is not None and request.method == "POST":
            return self._proxy.handle(surface, request, connection, extra)
        if request.method == "OPTIONS":
            connection.respond(204, self._cors.preflight(request.headers, _allowed_methods(path) or "") or b"", b"")
            return None
        if (stored := parse_path(path)) is not None:
            return self._proxy.handle_stored(stored[0], request, connection, extra, cancels=stored[1])
        self._serve_own(request, connection, extra)
        return None

    def _serve_own(self, request: Request, connection: ClientConnection, extra: bytes) -> None:
        status = 200
        value: object
        match request.path:
            case "/health":
                value = {"status": "ok"}
            case "/ready":
                status, value = self._readiness()
            case "/openapi.json":
                self._send(request, connection, extra, 200, self._document)
                return
            case "/v1/models":
                value = {"object": "list", "data": [self._model_card(name) for name in self._model_names()]}
            case path:
                name = path.removeprefix(_MODEL_PREFIX)
                if name not in self._model_names():
                    message = f"The model '{name[:200]}' does not exist; GET {MODELS} lists what is served."
                    self.refuse(request, connection, Refusal(404, message, code="model_not_found", param="model"))
                    return
                value = self._model_card(name)
        self._send(request, connection, extra, status, msgspec.json.encode(value))

    def _readiness(self) -> tuple[int, dict[str, Any]]:
        if self.is_draining:
            return 503, {"status": "draining"}
        if self._table.is_ready:
            return 200, {"status": "ready"}
        problems = {replica.id: _first_line(replica.observed.problem or replica.health) for replica in self._table.all()}
        return 503, {"status": "no replica is ready", "replicas": problems}

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

    def _send(self, request: Request, connection: ClientConnection, extra: bytes, status: int, body: bytes) -> None:
        request_id = client_request_id(request.headers) or "req_" + self._new_id()
        block = b"content-type: application/json\r\n%b: %b\r\n%b" % (names.REQUEST_ID, request_id.encode(), extra)
        connection.respond(status, block, body)


_UNAUTHORIZED = Refusal(401, UNAUTHORIZED_MESSAGE, Outcome.REJECTED_UNAUTHORIZED, code="invalid_api_key")


def _allowed_methods(path: str) -> str | None:
    """For the `Allow` header; None for a path that does not exist."""
    if path in PROXIED:
        return "POST"
    if path in _PLAIN or (path.startswith(_MODEL_PREFIX) and path != _MODEL_PREFIX):
        return "GET, HEAD"
    stored = parse_path(path)
    if stored is not None:
        return "POST" if stored[1] else "GET, HEAD"
    return None


def _first_line(problem: str) -> str:
    """Without what follows: an engine's own log lines are for operators, and this route needs no key."""
    return problem.partition("\n")[0][:200]
