"""One request from its head to its settlement: admit, place, send, relay, settle.

Invariants. Each request ends in exactly one Outcome, which is counted and logged once, in `finally`. Each lease is settled
in `finally` too. A failure before the first byte of an answer is an HTTP status; after it, a stream ends with an error
event and a connection that is broken off, never with a clean end.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from protocol import headers as names
from protocol.errors import encode_error, normalise_error
from protocol.openai import InvalidRequestError, peek
from protocol.sse import DoneDetector, event
from router.edge.access_log import AccessLog, AccessRecord, NoAccessLog
from router.edge.client import ClientConnection, ClientWatch, client_of
from router.edge.fleet import Fleet
from router.edge.metrics import RouterMetrics
from router.edge.upstream import Answer, request_head
from router.errors import BrokenAnswerError, UnreachableError, UpstreamError, UpstreamTimeoutError
from router.model_alias import EventAssembler, ModelAlias
from router.outcome import Outcome
from router.policy.choose import Policy
from router.state.replicas import Lease, Replica
from router.types import RequestInfo

log = logging.getLogger(__name__)

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

# An engine's error answer is read whole, to be put into OpenAI's shape; none is longer than this.
ERROR_BODY_BYTES_MAX = 1024 * 1024
# An answer that is renamed is read whole too.
ALIASED_BODY_BYTES_MAX = 64 * 1024 * 1024
# Seconds a client is told to wait before it tries again when nothing can serve it. OpenAI's clients ignore more than 60.
RETRY_AFTER_S = 2
# Trace context is the only thing of a client's headers that an engine gets: everything else there could steer it.
FORWARDED = frozenset({b"traceparent", b"tracestate"})
_REQUEST_ID_CHARACTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


class Rejection(Exception):
    """The request ends here with an error answer."""

    def __init__(
        self, status: int, message: str, outcome: Outcome, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.outcome = outcome
        self.body = encode_error(status, message, code=code, param=param)


class ClientGone(Exception):
    """The client closed its connection; nobody is there to answer."""


@dataclass(slots=True)
class Exchange:
    """What is known of one request while it runs. Owned by `Proxy.handle`."""

    route: str
    request_id: str  # as the client sees it
    engine_request_id: str  # never the client's own: engines key requests by it
    started: float
    model: str = ""
    replica: str = ""
    checkpoint: str = ""
    status: int = 0
    attempts: int = 0
    first_byte_s: float | None = None
    request_bytes: int = 0
    response_bytes: int = 0
    error: str = ""
    head_sent: bool = False
    tried: list[Replica] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    body_bytes_max: int
    body_timeout_s: float
    attempts_max: int


class Proxy:
    def __init__(
        self,
        *,
        fleet: Fleet,
        policy: Policy,
        metrics: RouterMetrics,
        access_log: AccessLog | NoAccessLog,
        limits: ProxyLimits,
        upstream_key: str | None,
        alias: str | None,
        debug_headers: bool,
        new_id: Callable[[], str],
    ) -> None:
        self._fleet = fleet
        self._table = fleet.table
        self._policy = policy
        self._metrics = metrics
        self._access_log = access_log
        self._limits = limits
        self._alias = alias
        self._debug_headers = debug_headers
        self._new_id = new_id
        self._engine_headers: Headers = [(b"content-type", b"application/json")]
        if upstream_key is not None:
            self._engine_headers.append((b"authorization", b"Bearer " + upstream_key.encode()))

    async def handle(self, scope: Scope, receive: Receive, send: Send, extra_headers: Headers) -> None:
        """Relays one generating request. `extra_headers` (CORS) go onto every answer."""
        connection = client_of(scope)
        engine_request_id = self._new_id()
        exchange = Exchange(
            route=scope["path"],
            request_id=client_request_id(scope["headers"]) or f"req_{engine_request_id}",
            engine_request_id=engine_request_id,
            started=time.perf_counter(),
        )
        outcome = Outcome.ROUTER_ERROR
        try:
            outcome = await self._run(scope, receive, send, connection, exchange, extra_headers)
        except ClientGone:
            outcome = Outcome.CLIENT_GONE
        except Exception:  # the one place where a fault of ours becomes an answer
            log.exception("request %s failed in the router", exchange.request_id)
            await self._answer_fault(send, exchange, connection, extra_headers)
        finally:
            self._settle(exchange, outcome)

    async def _answer_fault(self, send: Send, exchange: Exchange, connection: ClientConnection, extra_headers: Headers) -> None:
        if exchange.head_sent:
            connection.break_off()
            return
        exchange.status = 500
        body = encode_error(500, "The router failed on this request; its log has the cause under this request id.")
        await self._send_error(send, exchange, body, extra_headers)

    async def _run(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        connection: ClientConnection,
        exchange: Exchange,
        extra_headers: Headers,
    ) -> Outcome:
        try:
            body = await self._read_body(scope, receive)
            exchange.request_bytes = len(body)
            watch = ClientWatch(connection)
            watch.start()
            try:
                return await self._relay(scope, send, exchange, body, extra_headers, connection)
            except asyncio.CancelledError:
                if watch.is_client_gone:
                    raise ClientGone from None
                # The drain time is over: this is the last word to the client.
                if exchange.head_sent:
                    connection.break_off()
                    return Outcome.SHUTDOWN
                raise Rejection(503, "The service is restarting; try again.", Outcome.SHUTDOWN) from None
            finally:
                watch.stop()
        except Rejection as rejection:
            exchange.status = rejection.status
            await self._send_error(send, exchange, rejection.body, extra_headers)
            return rejection.outcome

    # Before the engine

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        limit = self._limits.body_bytes_max
        for name, value in scope["headers"]:
            if name == b"content-length" and int(value) > limit:
                raise self._too_large()
            if name == b"content-encoding" and value.lower() != b"identity":
                raise Rejection(
                    415, "Compressed request bodies are not accepted; send the JSON as it is.", Outcome.REJECTED_INVALID
                )
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            whole: bytes = message["body"]
            if len(whole) > limit:
                raise self._too_large()
            return whole
        parts = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                while message["type"] == "http.request":
                    parts += message["body"]
                    if len(parts) > limit:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return bytes(parts)
                    message = await receive()
        except TimeoutError:
            raise Rejection(
                408,
                f"The body of the request did not arrive within {self._limits.body_timeout_s:g} s.",
                Outcome.REJECTED_INVALID,
            ) from None
        raise ClientGone

    def _too_large(self) -> Rejection:
        return Rejection(
            413,
            f"The body of the request is longer than {self._limits.body_bytes_max} bytes, the most that is accepted here.",
            Outcome.REJECTED_INVALID,
            code="request_too_large",
        )

    def _read_model(self, body: bytes) -> str:
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
            raise no_replica(f"No replica has answered yet, so it is not known whether '{model}' is served.")
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

    # The engine

    async def _relay(
        self,
        scope: Scope,
        send: Send,
        exchange: Exchange,
        body: bytes,
        extra_headers: Headers,
        connection: ClientConnection,
    ) -> Outcome:
        model = self._read_model(body)
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
                    return await self._relay_answer(answer, lease, send, exchange, extra_headers, connection, alias)
                finally:
                    answer.close()
            except UpstreamTimeoutError as error:
                exchange.error = str(error)
                raise Rejection(
                    504, "The model did not answer in time.", Outcome.UPSTREAM_TIMEOUT, code="upstream_timeout"
                ) from None
            except UpstreamError as error:
                # The client has got nothing yet, so another replica can answer in this one's place.
                exchange.error = str(error)
                if isinstance(error, UnreachableError):
                    self._fleet.report_unreachable(lease.replica, str(error))
                if exchange.attempts >= self._limits.attempts_max:
                    raise unreachable() from None
                self._metrics.retried(lease.replica.id)
            finally:
                lease.settle()

    def _place(self, request: RequestInfo, exchange: Exchange) -> Lease:
        candidates = self._table.candidates(request.model, exchange.tried)
        if not candidates:
            if exchange.tried:
                raise unreachable()
            raise no_replica(f"No replica that serves '{exchange.model}' is ready.")
        replica = self._policy.choose(request, candidates)
        exchange.tried.append(replica)
        exchange.attempts += 1
        exchange.replica = replica.id
        return self._table.lease(replica)

    def _engine_head(self, scope: Scope, exchange: Exchange, body_bytes: int) -> bytes:
        headers = [
            *self._engine_headers,
            (b"content-length", b"%d" % body_bytes),
            (names.REQUEST_ID, exchange.engine_request_id.encode()),
        ]
        headers += [(name, value) for name, value in scope["headers"] if name in FORWARDED]
        return request_head(b"POST", scope["path"].encode(), headers)

    # The answer

    async def _relay_answer(
        self,
        answer: Answer,
        lease: Lease,
        send: Send,
        exchange: Exchange,
        extra_headers: Headers,
        connection: ClientConnection,
        alias: ModelAlias | None,
    ) -> Outcome:
        """Raises UpstreamError only while nothing has been sent to the client."""
        # The first part is read before the head is sent: if the engine dies before it, another replica can still answer.
        part = await answer.read()
        exchange.first_byte_s = time.perf_counter() - exchange.started
        checkpoint = answer.header(names.CHECKPOINT)
        exchange.checkpoint = lease.replica.checkpoint or "" if checkpoint is None else checkpoint.decode("latin-1")
        if answer.status >= 400:
            return await self._relay_error(answer, part, send, exchange, extra_headers)
        exchange.status = answer.status
        content_type = answer.header(b"content-type") or b"application/json"
        head: Headers = [(b"content-type", content_type), *self._answer_headers(exchange), *extra_headers]
        if content_type.startswith(b"text/event-stream"):
            head += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
            return await self._relay_stream(answer, part, head, send, exchange, connection, alias)
        if alias is not None:
            body = alias.answer(await _read_all(answer, part, ALIASED_BODY_BYTES_MAX))
            await self._send_head(send, exchange, [*head, (b"content-length", b"%d" % len(body))])
            await self._send_part(send, exchange, body, more=False)
            return Outcome.COMPLETED
        return await self._relay_body(answer, part, head, send, exchange, connection)

    async def _relay_error(
        self, answer: Answer, part: bytes, send: Send, exchange: Exchange, extra_headers: Headers
    ) -> Outcome:
        body = await _read_all(answer, part, ERROR_BODY_BYTES_MAX)
        exchange.status = answer.status
        headers = list(extra_headers)
        retry_after = answer.header(names.RETRY_AFTER)
        if retry_after is not None and retry_after.isdigit():
            headers.append((names.RETRY_AFTER, b"%d" % min(60, max(1, int(retry_after)))))
        await self._send_error(send, exchange, normalise_error(answer.status, body), headers)
        return Outcome.ENGINE_REFUSED if answer.status < 500 else Outcome.ENGINE_ERROR

    async def _relay_body(
        self, answer: Answer, part: bytes, head: Headers, send: Send, exchange: Exchange, connection: ClientConnection
    ) -> Outcome:
        """An answer that is not a stream of events, in parts as it comes; its framing tells a part from the whole."""
        length = answer.header(b"content-length")
        if length is not None:
            head.append((b"content-length", length))
        await self._send_head(send, exchange, head)
        try:
            while part and not answer.is_complete:
                await self._send_part(send, exchange, part, more=True)
                part = await answer.read()
        except UpstreamError as error:
            return self._broken(exchange, connection, error)
        await self._send_part(send, exchange, part, more=False)
        return Outcome.COMPLETED

    async def _relay_stream(
        self,
        answer: Answer,
        part: bytes,
        head: Headers,
        send: Send,
        exchange: Exchange,
        connection: ClientConnection,
        alias: ModelAlias | None,
    ) -> Outcome:
        await self._send_head(send, exchange, head)
        done = DoneDetector()
        events = None if alias is None else EventAssembler()
        try:
            while part:
                done.feed(part)
                if alias is not None and events is not None:
                    part = alias.answer(events.feed(part))
                if part:
                    await self._send_part(send, exchange, part, more=True)
                part = await answer.read()
        except UpstreamError as error:
            await self._send_part(send, exchange, event(_broken_error()), more=True)
            return self._broken(exchange, connection, error)
        if not done.is_done:
            await self._send_part(send, exchange, event(_broken_error()), more=True)
            return self._broken(exchange, connection, BrokenAnswerError("the engine ended its stream without [DONE]"))
        await self._send_part(send, exchange, b"" if events is None else events.finish(), more=False)
        return Outcome.COMPLETED

    def _broken(self, exchange: Exchange, connection: ClientConnection, error: UpstreamError) -> Outcome:
        exchange.error = str(error)
        connection.break_off()
        return Outcome.UPSTREAM_TIMEOUT if isinstance(error, UpstreamTimeoutError) else Outcome.UPSTREAM_BROKEN

    # To the client

    def _answer_headers(self, exchange: Exchange) -> Headers:
        elapsed_ms = (time.perf_counter() - exchange.started) * 1000
        headers = [
            (names.REQUEST_ID, exchange.request_id.encode()),
            (names.PROCESSING_MS, b"%d" % elapsed_ms),
        ]
        if exchange.checkpoint:
            headers.append((names.CHECKPOINT, exchange.checkpoint.encode("latin-1")))
        if self._debug_headers and exchange.replica:
            headers.append((names.REPLICA, exchange.replica.encode()))
        return headers

    async def _send_head(self, send: Send, exchange: Exchange, headers: Headers) -> None:
        exchange.head_sent = True
        await send({"type": "http.response.start", "status": exchange.status, "headers": headers})

    async def _send_part(self, send: Send, exchange: Exchange, part: bytes, *, more: bool) -> None:
        exchange.response_bytes += len(part)
        await send({"type": "http.response.body", "body": part, "more_body": more})

    async def _send_error(self, send: Send, exchange: Exchange, body: bytes, extra_headers: Headers) -> None:
        status = exchange.status
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *self._answer_headers(exchange),
            *extra_headers,
        ]
        if status in (429, 503) and not any(name == names.RETRY_AFTER for name, _ in headers):
            headers.append((names.RETRY_AFTER, b"%d" % RETRY_AFTER_S))
        if status in (408, 413):
            headers.append((b"connection", b"close"))  # the rest of the body is not read
        await self._send_head(send, exchange, headers)
        await self._send_part(send, exchange, body, more=False)

    # The ending

    def _settle(self, exchange: Exchange, outcome: Outcome) -> None:
        duration_s = time.perf_counter() - exchange.started
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


def no_replica(message: str) -> Rejection:
    return Rejection(503, message, Outcome.REJECTED_NO_REPLICA, code="no_replica")


def unreachable() -> Rejection:
    return Rejection(502, "No replica could answer; try again.", Outcome.UPSTREAM_UNREACHABLE, code="upstream_error")


def client_request_id(headers: Headers) -> str | None:
    """The client's own x-request-id, to be echoed, if it is one that can be: short and of harmless characters."""
    for name, value in headers:
        if name == names.REQUEST_ID:
            if 0 < len(value) <= 128 and _REQUEST_ID_CHARACTERS.issuperset(value):
                return value.decode()
            return None
    return None


async def _read_all(answer: Answer, first: bytes, limit: int) -> bytes:
    """The whole body, of which `first` has been read. Raises BrokenAnswerError above `limit` bytes."""
    parts = bytearray(first)
    while part := await answer.read():
        parts += part
        if len(parts) > limit:
            raise BrokenAnswerError(f"the engine's answer is longer than {limit} bytes")
    return bytes(parts)


def _broken_error() -> bytes:
    return encode_error(502, "The replica that was answering failed; this answer is incomplete.", code="upstream_error")
