"""One request from its head to its settlement.

Invariants. Each request ends in exactly one Outcome, which is counted and logged once, in `finally`. What a client gets is
either whole or can be told from the whole.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from protocol.errors import ErrorDetail, error_type
from protocol.openai import Surface
from router.auth import Tenants
from router.edge.access_log import AccessLog, AccessRecord, NoAccessLog
from router.edge.client import ClientConnection, Refusal, Request
from router.exchange import Exchange, Rejection, client_request_id
from router.forwarding import Forwarding, ForwardingParts
from router.journal import Journal
from router.outcome import Outcome
from router.reply import Reply
from router.stored_forwarding import StoredForwarding
from router.stored_responses import CANCEL_ROUTE, ROUTE

log = logging.getLogger(__name__)

# For the log only: a client that left gets none (nginx's number).
CLIENT_GONE_STATUS = 499


class Proxy:
    def __init__(
        self, parts: ForwardingParts, *, journal: Journal, access_log: AccessLog | NoAccessLog, new_id: Callable[[], str]
    ) -> None:
        self._parts = parts
        self._journal = journal
        self._tenants = Tenants()
        self._metrics = parts.metrics
        self._shows_replica = parts.settings.shows_replica
        self._access_log = access_log
        self._new_id = new_id

    def handle(
        self, surface: Surface, request: Request, connection: ClientConnection, extra: bytes
    ) -> Coroutine[Any, Any, None]:
        """Relays one request. `extra` are header lines (CORS) for every answer."""
        exchange = self._exchange(surface, surface.value, request)
        reply = Reply(connection, exchange, extra=extra, shows_replica=self._shows_replica)
        return self._run(exchange, reply, connection, Forwarding(self._parts, request, connection, exchange, reply).run)

    def handle_stored(
        self, stored_id: str, request: Request, connection: ClientConnection, extra: bytes, *, cancels: bool
    ) -> Coroutine[Any, Any, None]:
        """Reads or cancels a stored response on the engine that keeps it."""
        exchange = self._exchange(Surface.RESPONSES, CANCEL_ROUTE if cancels else ROUTE, request)
        reply = Reply(connection, exchange, extra=extra, shows_replica=self._shows_replica)
        forwarding = StoredForwarding(self._parts, request, connection, exchange, reply, stored_id=stored_id, cancels=cancels)
        return self._run(exchange, reply, connection, forwarding.run)

    def refuse(
        self, surface: Surface, route: str, request: Request, connection: ClientConnection, refusal: Refusal, extra: bytes
    ) -> None:
        """Answers a request that is not taken."""
        exchange = self._exchange(surface, route, request)
        reply = Reply(connection, exchange, extra=extra, shows_replica=False)
        detail = ErrorDetail(message=refusal.message, type=error_type(refusal.status), param=refusal.param, code=refusal.code)
        try:
            reply.error(refusal.status, detail)
        finally:
            self._settle(exchange, refusal.outcome)

    def _exchange(self, surface: Surface, route: str, request: Request) -> Exchange:
        engine_request_id = self._new_id()
        return Exchange(
            surface=surface,
            route=route,
            request_id=client_request_id(request.headers) or "req_" + engine_request_id,
            engine_request_id=engine_request_id,
            started=request.started,
            tenant=self._tenants.of(request.headers),
        )

    async def _run(
        self, exchange: Exchange, reply: Reply, connection: ClientConnection, run: Callable[[], Awaitable[Outcome]]
    ) -> None:
        outcome = Outcome.ROUTER_ERROR
        try:
            outcome = await run()
        except Rejection as rejection:
            outcome = rejection.outcome
            reply.error(rejection.status, rejection.detail, rejection.retry_after)
        except asyncio.CancelledError:
            if connection.is_lost or connection.is_stalled:
                outcome = Outcome.CLIENT_GONE
                exchange.status = exchange.status or CLIENT_GONE_STATUS
                exchange.error = "the client did not read its answer" if connection.is_stalled else ""
                reply.break_off()
            else:  # the time for draining is over: this is the last word to the client
                outcome = Outcome.SHUTDOWN
                reply.error(503, ErrorDetail(message="The service is restarting; try again.", type=error_type(503)))
        except Exception as error:  # the one place where a fault of ours becomes an answer
            log.exception("request %s failed in the router", exchange.request_id)
            exchange.error = f"a fault of the router: {type(error).__name__}"
            message = "The router failed on this request; its log has the cause under this request id."
            reply.error(500, ErrorDetail(message=message, type=error_type(500)))
        finally:
            self._settle(exchange, outcome)

    def _settle(self, exchange: Exchange, outcome: Outcome) -> None:
        duration_s = exchange.elapsed_s
        usage = exchange.usage
        self._metrics.request_ended(exchange.route, exchange.model, outcome, duration_s)
        if outcome is Outcome.COMPLETED and exchange.first_byte_s is not None:
            self._metrics.first_byte(exchange.route, exchange.model, exchange.first_byte_s)
        if usage is not None:
            self._metrics.tokens(exchange.model, usage)
        now = time.time()
        self._journal.ended(exchange, outcome, now, duration_s)
        self._access_log.write(
            AccessRecord(
                time=now,
                request_id=exchange.request_id,
                route=exchange.route,
                outcome=outcome.value,
                status=exchange.status,
                duration_ms=round(duration_s * 1000, 2),
                model=exchange.model,
                replica=exchange.replica,
                checkpoint=exchange.checkpoint,
                attempts=exchange.attempts,
                continuations=exchange.continuations,
                first_byte_ms=None if exchange.first_byte_s is None else round(exchange.first_byte_s * 1000, 2),
                request_bytes=exchange.request_bytes,
                response_bytes=exchange.response_bytes,
                prompt_tokens=None if usage is None else usage.prompt,
                cached_tokens=None if usage is None else usage.cached,
                completion_tokens=None if usage is None else usage.completion,
                error=exchange.error,
            )
        )
