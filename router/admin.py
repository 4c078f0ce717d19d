"""The admin port: replicas, models, rollouts and metrics, for operators and the command line."""

import hashlib
import hmac
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException as StarletteHTTPException

from protocol.errors import encode_error
from router.config import ConfigError
from router.edge.crew import Crew
from router.edge.fleet import Fleet
from router.rollout_runner import RolloutRunner
from router.state.decisions import KEPT, Decisions, described
from router.state.replicas import Replica
from router.state.rollouts import Rollout, RolloutRefused, Rollouts, RolloutState, Strategy
from router.types import ReplicaId


class AddReplica(BaseModel):
    model_config = ConfigDict(extra="forbid")
    url: str


class DrainReplica(BaseModel):
    model_config = ConfigDict(extra="forbid")
    draining: bool = True


class StartRollout(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: str
    version: str
    strategy: Strategy = Strategy.IN_PLACE


def build_admin(
    *,
    fleet: Fleet,
    crew: Crew | None,
    runner: RolloutRunner,
    rollouts: Rollouts,
    decisions: Decisions,
    registry: CollectorRegistry,
    token: str | None,
    now: Callable[[], float],
) -> FastAPI:
    """`crew`: the router's other worker processes, which hear of every change before it is answered."""
    app = FastAPI(title="intellect-serve router admin", openapi_url=None)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(StarletteHTTPException, _refused)
    guarded = [Depends(_token_check(token))]

    async def tell_others() -> None:
        if crew is not None:
            await crew.push()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        text = generate_latest(registry) if crew is None else await crew.metrics()
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @app.get("/admin/replicas", dependencies=guarded)
    async def list_replicas() -> list[dict[str, Any]]:
        elsewhere = Counter() if crew is None else await crew.in_flight_elsewhere()
        replicas = [*fleet.table.all(), *fleet.table.departing()]
        return [
            describe(replica) | {"in_flight": replica.in_flight + (0 if replica.removed else elsewhere[replica.id])}
            for replica in replicas
        ]

    @app.post("/admin/replicas", dependencies=guarded, status_code=201)
    async def add_replica(body: AddReplica) -> dict[str, Any]:
        try:
            added = fleet.add(body.url)
        except ConfigError as error:
            raise HTTPException(400, str(error)) from error
        except KeyError as error:
            raise HTTPException(409, f"replica {error.args[0]} is already there; remove it first to add it anew") from error
        await tell_others()
        return describe(added)

    @app.delete("/admin/replicas/{replica_id}", dependencies=guarded)
    async def remove_replica(replica_id: str) -> dict[str, Any]:
        try:
            removed = fleet.remove(ReplicaId(replica_id))
        except KeyError as error:
            raise unknown_replica(replica_id) from error
        await tell_others()
        return describe(removed)

    @app.post("/admin/replicas/{replica_id}/drain", dependencies=guarded)
    async def drain_replica(replica_id: str, body: DrainReplica) -> dict[str, Any]:
        try:
            replica = fleet.table.drain(ReplicaId(replica_id), body.draining)
        except KeyError as error:
            raise unknown_replica(replica_id) from error
        await tell_others()
        return describe(replica)

    @app.get("/admin/models", dependencies=guarded)
    async def list_models() -> list[dict[str, Any]]:
        return [
            {"model": model, "replicas": [{"replica": r.id, "health": r.health, "checkpoint": r.checkpoint} for r in replicas]}
            for model, replicas in sorted(fleet.table.served.items())
        ]

    @app.get("/admin/decisions", dependencies=guarded)
    async def list_decisions(
        limit: Annotated[int, Query(ge=1, le=KEPT)] = 100, replica: str | None = None, request_id: str | None = None
    ) -> dict[str, Any]:
        if crew is None:
            return described(decisions.kept(limit=limit, replica=replica, request_id=request_id))
        return described(await crew.decisions(limit=limit, replica=replica, request_id=request_id))

    @app.get("/admin/rollouts", dependencies=guarded)
    async def list_rollouts() -> list[dict[str, Any]]:
        return [describe_rollout(rollout, now()) for rollout in rollouts.all()]

    @app.post("/admin/rollouts", dependencies=guarded, status_code=202)
    async def start_rollout(body: StartRollout) -> dict[str, Any]:
        try:
            return describe_rollout(runner.start(body.model, body.version, body.strategy), now())
        except RolloutRefused as error:
            raise HTTPException(409, str(error)) from error

    @app.get("/admin/rollouts/{rollout_id}", dependencies=guarded)
    async def get_rollout(rollout_id: str) -> dict[str, Any]:
        try:
            return describe_rollout(rollouts.get(rollout_id), now())
        except KeyError as error:
            raise HTTPException(404, f"there is no rollout {rollout_id!r}") from error

    return app


def describe(replica: Replica) -> dict[str, Any]:
    return {
        "id": replica.id,
        "url": replica.url,
        "engine": None if replica.endpoint is None else f"http://{replica.endpoint}",
        "health": replica.health,
        "problem": replica.observed.problem,
        "in_flight": replica.in_flight,
        "models": list(replica.models),
        "checkpoint": replica.checkpoint,
        "status": None if replica.status is None else msgspec.to_builtins(replica.status),
    }


def describe_rollout(rollout: Rollout, now: float) -> dict[str, Any]:
    return {
        "id": rollout.id,
        "model": rollout.model,
        "version": rollout.version,
        "strategy": rollout.strategy,
        "state": rollout.state,
        "reason": rollout.reason,
        "seconds": now - rollout.started if rollout.state is RolloutState.RUNNING else rollout.seconds,
        "replicas": [{"replica": replica_id, **msgspec.to_builtins(report)} for replica_id, report in rollout.reports],
    }


def unknown_replica(replica_id: str) -> HTTPException:
    return HTTPException(404, f"there is no replica {replica_id!r}; GET /admin/replicas lists them")


def _token_check(token: str | None) -> Callable[[Request], Awaitable[None]]:
    expected = None if token is None else hashlib.sha256(token.encode()).digest()

    async def check(request: Request) -> None:
        if expected is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(given.strip().encode()).digest()
        if scheme.lower() != "bearer" or not hmac.compare_digest(digest, expected):
            raise HTTPException(401, "the admin API needs its token: Authorization: Bearer TOKEN")

    return check


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    detail = str(error.detail)
    if detail in ("Not Found", "Method Not Allowed"):
        detail = f"{request.method} {request.url.path}: {detail.lower()} on the admin port; docs/admin.md lists its routes"
    return _error(error.status_code, detail)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place, *path = first["loc"]
    if place == "body" and request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        # Browsers send other types to other sites without asking, so only this one is read.
        return _error(415, "send the body as JSON, with the header content-type: application/json")
    field = ".".join(map(str, path)) or place
    return _error(422, f"{field}: {first['msg']}", param=field)


def _error(status: int, message: str, param: str | None = None) -> Response:
    return Response(encode_error(status, message, param=param), status, media_type="application/json")
