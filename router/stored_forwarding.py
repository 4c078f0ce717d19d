"""Reads or cancels a stored response on the engine that keeps it, and nowhere else."""

import re
import time

from protocol import headers as names
from router.attempts import verdict_of
from router.edge.client import ClientConnection, Request
from router.edge.upstream import Patience
from router.errors import LocalLimitError, UpstreamError, UpstreamTimeoutError
from router.exchange import Exchange, Rejection, unreachable
from router.forwarding import ForwardingParts
from router.model_alias import ModelAlias
from router.outcome import Outcome
from router.relay import BrokenStream, EngineRefusal, Leg, relay
from router.reply import Reply
from router.state.replicas import Replica
from router.stored_responses import keeper_of
from router.types import Verdict

# What the engine understands of a query: `stream`, `starting_after`.
_QUERY = re.compile(rb"[A-Za-z0-9_=&.-]{1,256}")


class StoredForwarding:
    def __init__(
        self,
        parts: ForwardingParts,
        request: Request,
        connection: ClientConnection,
        exchange: Exchange,
        reply: Reply,
        *,
        stored_id: str,
        cancels: bool,
    ) -> None:
        self._parts = parts
        self._request = request
        self._connection = connection
        self._exchange = exchange
        self._reply = reply
        self._id = stored_id
        self._cancels = cancels

    async def run(self) -> Outcome:
        """Raises Rejection."""
        exchange, table = self._exchange, self._parts.fleet.table
        keeper = keeper_of(self._id, [replica.id for replica in table.all()])
        replica = None if keeper is None else table.get(keeper)
        if replica is None or replica.endpoint is None or replica.removed:
            message = f"Response with id '{self._id}' not found: no replica of this service keeps it."
            raise Rejection(404, message, Outcome.REJECTED_INVALID, param="response_id", code="not_found")
        exchange.attempts = 1
        exchange.replica = replica.id
        lease = table.lease(replica)
        verdict = Verdict.NEUTRAL
        leg = Leg(
            surface=exchange.surface,
            lease=lease,
            strips_usage=False,
            choices=1,
            checkpoint=replica.checkpoint,
            alias=self._alias_of(replica),
        )
        try:
            answer = await self._parts.fleet.pool(lease.endpoint).send(self._head(), b"", self._patience())
            try:
                await relay(answer, self._reply, self._connection, exchange, leg)
            finally:
                answer.close()
            verdict = Verdict.GOOD
            return Outcome.COMPLETED
        except EngineRefusal as refusal:
            status, detail, _ = refusal.word
            verdict = verdict_of(status)
            exchange.error = str(refusal)
            outcome = Outcome.ENGINE_REFUSED if status < 500 else Outcome.ENGINE_ERROR
            code = detail.code or ("not_found" if status == 404 else None)
            raise Rejection(status, detail.message, outcome, code=code, param=detail.param) from refusal
        except BrokenStream as broken:
            verdict = Verdict.BAD
            exchange.error = str(broken)
            outcome, detail = broken.breakage
            raise Rejection(502, detail.message, outcome, code=detail.code) from broken
        except UpstreamError as error:
            exchange.error = str(error)
            if isinstance(error, UpstreamTimeoutError):
                message = "The replica that keeps this response did not answer in time."
                raise Rejection(504, message, Outcome.UPSTREAM_TIMEOUT, code="upstream_timeout") from error
            if not isinstance(error, LocalLimitError):
                verdict = Verdict.BAD
            raise unreachable() from error
        finally:
            lease.settle(verdict, time.monotonic())

    def _alias_of(self, replica: Replica) -> ModelAlias | None:
        alias = self._parts.settings.alias
        return None if alias is None or not replica.models else ModelAlias(public=alias, engine=replica.models[0])

    def _head(self) -> bytes:
        target = b"/v1/responses/" + self._id.encode()
        if self._cancels:
            target += b"/cancel"
        elif self._request.method == "GET" and _QUERY.fullmatch(self._request.query):
            target += b"?" + self._request.query
        line = b"%b %b HTTP/1.1\r\n%bcontent-length: 0\r\n%b: %b\r\n"
        method = b"POST" if self._cancels else b"GET"
        request_id = self._exchange.engine_request_id.encode()
        return line % (method, target, self._parts.engine_headers, names.REQUEST_ID, request_id)

    def _patience(self) -> Patience:
        return Patience(timeouts=self._parts.settings.timeouts)
