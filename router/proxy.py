"""One request from its head to its settlement: read, place, send, relay, settle.

Invariants. Each request ends in exactly one Outcome, which is counted and logged once, in `finally`. Each lease is settled
in `finally` too. A request is sent to another replica only while nothing of an answer has reached the client.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from protocol import headers as names
from protocol.errors import encode_error
from protocol.openai import InvalidRequestError, peek
from router.edge.access_log import AccessLog, AccessRecord, NoAccessLog
from router.edge.client import ClientWatch, client_of
from router.edge.fleet import Fleet
from router.edge.metrics import RouterMetrics
from router.edge.upstream import request_head
from router.errors import LocalLimitError, UnreachableError, UpstreamError, UpstreamTimeoutError
from router.exchange import (
    ClientGone,
    Exchange,
    Headers,
    Receive,
    Rejection,
    Scope,
    Send,
    client_request_id,
    no_replica,
    unreachable,
)
from router.model_alias import ModelAlias
from router.outcome import Outcome
from router.policy.choose import Policy
from router.relay import relay
from router.reply import ClientStalled, Reply
from router.request_body import BodyLimits, read_body
from router.state.replicas import Lease
from router.types import RequestInfo

log = logging.getLogger(__name__)

# Trace context is the only thing of a client's headers that an engine gets: everything else there could steer it.
FORWARDED = frozenset({b"traceparent", b"tracestate"})


class Proxy:
    def __init__(
        self,
        *,
        fleet: Fleet,
        policy: Policy,
        metrics: RouterMetrics,
        access_log: AccessLog | NoAccessLog,
        body_limits: BodyLimits,
        attempts_max: int,
        upstream_key: str | None,
        alias: str | None,
        show_replica: bool,
        new_id: Callable[[], str],
    ) -> None:
        self._fleet = fleet
        self._table = fleet.table
        self._policy = policy
        self._metrics = metrics
        self._access_log = access_log
        self._body_limits = body_limits
        self._attempts_max = attempts_max
        self._alias = alias
        self._show_replica = show_replica
        self._new_id = new_id
        self._engine_headers: Headers = [(b"content-type", b"application/json")]
        if upstream_key is not None:
            self._engine_headers.append((b"authorization", b"Bearer " + upstream_key.encode()))

    async def handle(self, scope: Scope, receive: Receive, send: Send, extra_headers: Headers) -> None:
        """Relays one generating request. `extra_headers` (CORS) go onto every answer."""
        engine_request_id = self._new_id()
        exchange = Exchange(
            route=scope["path"],
            request_id=client_request_id(scope["headers"]) or f"req_{engine_request_id}",
            engine_request_id=engine_request_id,
            started=time.perf_counter(),
        )
        reply = Reply(send, client_of(scope), exchange, extra_headers=extra_headers, show_replica=self._show_replica)
        outcome = Outcome.ROUTER_ERROR
        try:
            outcome = await self._run(scope, receive, reply, exchange)
        except Rejection as rejection:
            outcome = rejection.outcome
            await reply.error(rejection.status, rejection.body)
        except ClientGone:
            outcome = Outcome.CLIENT_GONE
        except ClientStalled:
            outcome = Outcome.CLIENT_GONE
            exchange.error = "the client did not read its answer"
            reply.break_off()
        except Exception:  # the one place where a fault of ours becomes an answer
            log.exception("request %s failed in the router", exchange.request_id)
            if reply.is_started:
                reply.break_off()
            else:
                message = "The router failed on this request; its log has the cause under this request id."
                await reply.error(500, encode_error(500, message))
        finally:
            self._settle(exchange, outcome)

    async def _run(self, scope: Scope, receive: Receive, reply: Reply, exchange: Exchange) -> Outcome:
        watch = ClientWatch(client_of(scope))
        try:
            body = await read_body(scope["headers"], receive, self._body_limits)
            exchange.request_bytes = len(body)
            watch.start()
            return await self._forward(scope, body, reply, exchange)
        except asyncio.CancelledError:
            if watch.is_client_gone:
                raise ClientGone from None
            # The router's drain time is over: this is the last word to the client.
            if reply.is_started:
                reply.break_off()
                return Outcome.SHUTDOWN
            raise Rejection(503, "The service is restarting; try again.", Outcome.SHUTDOWN) from None
        finally:
            watch.stop()

    async def _forward(self, scope: Scope, body: bytes, reply: Reply, exchange: Exchange) -> Outcome:
        model = self._engine_model(body)
        exchange.model = self._alias or model
        alias = None
        if self._alias is not None and self._alias != model:
            alias = ModelAlias(public=self._alias, engine=model)
            body = alias.request(body)
        request = RequestInfo(model=model, body_bytes=len(body))
        head = self._engine_head(scope, exchange, len(body))
        while True:
            lease = self._place(request, exchange)
            try:
                answer = await self._fleet.pool(lease.endpoint).send(head, body)
                try:
                    return await relay(answer, reply, exchange, alias=alias, checkpoint=lease.replica.checkpoint)
                finally:
                    answer.close()
            except UpstreamTimeoutError as error:
                exchange.error = str(error)
                raise Rejection(
                    504, "The model did not answer in time.", Outcome.UPSTREAM_TIMEOUT, code="upstream_timeout"
                ) from None
            except LocalLimitError as error:
                exchange.error = str(error)
                message = "The service is out of connections; try again."
                raise Rejection(503, message, Outcome.UPSTREAM_UNREACHABLE, code="overloaded") from None
            except UpstreamError as error:
                # The client has got nothing yet, so another replica can answer in this one's place.
                exchange.error = str(error)
                if isinstance(error, UnreachableError):
                    self._fleet.report_unreachable(lease.replica, str(error))
                if exchange.attempts >= self._attempts_max:
                    raise unreachable() from None
                self._metrics.retried(lease.replica.id)
            finally:
                lease.settle()

    def _engine_model(self, body: bytes) -> str:
        """The engine's name of the model that the request asks for. Raises Rejection."""
        try:
            model = peek(body).model
        except InvalidRequestError as error:
            raise Rejection(400, str(error), Outcome.REJECTED_INVALID, param=error.param) from None
        if model is None:
            raise Rejection(
                400,
                "You must provide a 'model'; GET /v1/models lists what is served.",
                Outcome.REJECTED_INVALID,
                param="model",
                code="missing_required_parameter",
            )
        served = self._table.served
        if not served:
            raise no_replica(
                f"No replica has answered yet, so it is not known whether '{model}' is served; GET /ready says why."
            )
        if self._alias is None and model in served:
            return model
        if self._alias is not None and model == self._alias:
            if len(served) > 1:
                raise no_replica(f"'{model}' stands for one model, but the replicas serve {', '.join(sorted(served))}.")
            return next(iter(served))
        raise Rejection(
            404,
            f"The model '{model}' does not exist; GET /v1/models lists what is served.",
            Outcome.REJECTED_INVALID,
            param="model",
            code="model_not_found",
        )

    def _engine_head(self, scope: Scope, exchange: Exchange, body_bytes: int) -> bytes:
        headers = [
            *self._engine_headers,
            (b"content-length", b"%d" % body_bytes),
            (names.REQUEST_ID, exchange.engine_request_id.encode()),
        ]
        headers += [(name, value) for name, value in scope["headers"] if name in FORWARDED]
        return request_head(b"POST", scope["path"].encode(), headers)

    def _place(self, request: RequestInfo, exchange: Exchange) -> Lease:
        candidates = self._table.candidates(request.model, exchange.tried)
        if not candidates:
            raise (
                unreachable()
                if exchange.tried
                else no_replica(f"No replica that serves '{exchange.model}' is ready; GET /ready says why.")
            )
        replica = self._policy.choose(request, candidates)
        exchange.tried.append(replica)
        exchange.attempts += 1
        exchange.replica = replica.id
        return self._table.lease(replica)

    def _settle(self, exchange: Exchange, outcome: Outcome) -> None:
        duration_s = exchange.elapsed_s
        self._metrics.request_ended(exchange.route, exchange.model, outcome, duration_s)
        if outcome is Outcome.COMPLETED and exchange.first_byte_s is not None:
            self._metrics.first_byte(exchange.route, exchange.model, exchange.first_byte_s)
        self._access_log.write(
            AccessRecord(
                time=time.time(),
                request_id=exchange.request_id,
                route=exchange.route,
                outcome=outcome,
                status=exchange.status,
                duration_ms=round(duration_s * 1000, 2),
                model=exchange.model,
                replica=exchange.replica,
                checkpoint=exchange.checkpoint,
                attempts=exchange.attempts,
                first_byte_ms=None if exchange.first_byte_s is None else round(exchange.first_byte_s * 1000, 2),
                request_bytes=exchange.request_bytes,
                response_bytes=exchange.response_bytes,
                error=exchange.error,
            )
        )
