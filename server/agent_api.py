"""The agent's HTTP surface on the admin port. Reads are open; what changes the replica needs the agent's token."""

import hmac
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException

from protocol.errors import ErrorBody, encode_error
from protocol.manifest import Fault
from protocol.status import ReplicaState, ReplicaStatus, SwapOutcome, SwapReport
from server.metrics import AgentMetrics
from server.replica import NotNow, Replica
from server.settings import AgentSettings, is_wildcard

BODY_BYTES_MAX = 65536

_T = TypeVar("_T", bound=msgspec.Struct)
# A swapping replica answers, only later: taking it out of rotation would move its load for nothing.
_READY_STATES = frozenset({ReplicaState.READY, ReplicaState.SWAPPING})


class CheckpointRequest(msgspec.Struct, forbid_unknown_fields=True):
    version: str


class DrainRequest(msgspec.Struct, forbid_unknown_fields=True):
    draining: bool


class _ApiError(Exception):
    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def build_api(replica: Replica, settings: AgentSettings, registry: CollectorRegistry, metrics: AgentMetrics) -> FastAPI:
    api = FastAPI(openapi_url=None)

    @api.exception_handler(_ApiError)
    async def on_api_error(_request: Request, error: _ApiError) -> Response:
        return _json(encode_error(error.status, str(error), code=error.code, param=error.param), error.status)

    @api.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.scope['path']}: {error.detail}"
        return _json(encode_error(error.status_code, message), error.status_code, error.headers)

    @api.get("/status")
    async def status(request: Request) -> Response:
        return _json(msgspec.json.encode(_status(replica, settings, request)))

    @api.get("/health")
    async def health() -> Response:
        return Response(status_code=200)

    @api.get("/ready")
    async def ready(request: Request) -> Response:
        status = _status(replica, settings, request)
        if status.state in _READY_STATES:
            return Response(status_code=200)
        raise _ApiError(503, f"The replica is {status.state}: {status.reason}", code=f"replica_{status.state}")

    @api.get("/metrics")
    async def exposition(request: Request) -> Response:
        metrics.show(_status(replica, settings, request), engine_up=replica.engine_up)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @api.post("/checkpoint")
    async def checkpoint(request: Request) -> Response:
        _authorise(request, settings.token)
        wanted = await _read(request, CheckpointRequest)
        try:
            report = await replica.swap(wanted.version)
        except NotNow as error:
            raise _ApiError(409, str(error), code="not_now") from error
        status = swap_status(report)
        return _json(msgspec.json.encode(report) if status == 200 else _failed_swap(report, status), status)

    @api.post("/drain")
    async def drain(request: Request) -> Response:
        _authorise(request, settings.token)
        replica.drain((await _read(request, DrainRequest)).draining)
        return _json(msgspec.json.encode(_status(replica, settings, request)))

    return api


def swap_status(report: SwapReport) -> int:
    """The HTTP status of a swap's answer."""
    match report.outcome:
        case SwapOutcome.SWAPPED:
            return 200
        case SwapOutcome.REFUSED:
            return 404 if report.code == Fault.NOT_FOUND else 422
        case SwapOutcome.RESTORED | SwapOutcome.FAILED:
            return 500


def _failed_swap(report: SwapReport, status: int) -> bytes:
    """The report's fields beside OpenAI's `error`, so that readers of either find what they expect."""
    error = encode_error(status, report.reason or report.outcome, code=report.code, param="version")
    return msgspec.json.encode(
        {"error": msgspec.to_builtins(msgspec.json.decode(error, type=ErrorBody).error), **msgspec.to_builtins(report)}
    )


def _status(replica: Replica, settings: AgentSettings, request: Request) -> ReplicaStatus:
    """A replica that listens everywhere is named by the address at which this reader reached it."""
    return replica.status(request.scope["server"][0] if is_wildcard(settings.host) else settings.host)


def _authorise(request: Request, token: str | None) -> None:
    if token is None:
        return  # the settings have made sure that only this machine can connect
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise _ApiError(401, "This needs the agent's token: Authorization: Bearer TOKEN.", code="invalid_token")


async def _read(request: Request, kind: type[_T]) -> _T:
    # A page in a browser can send any other type to a local port without asking first.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise _ApiError(415, f"The content type is {media_type or 'absent'!r}; send the header content-type: application/json.")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise _ApiError(413, f"The body is longer than {BODY_BYTES_MAX} bytes.")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fields = ", ".join(f'"{name}": ...' for name in kind.__struct_fields__)
        raise _ApiError(400, f"The body must be {{{fields}}}: {error}", param=kind.__struct_fields__[0]) from error


def _json(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status_code=status, headers=headers, media_type="application/json")
