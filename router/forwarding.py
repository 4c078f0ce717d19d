"""One request's way over the replicas: placed, sent, relayed, and where something fails placed again or continued."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from protocol import headers as names
from protocol.openai import InvalidRequestError, Surface
from protocol.usage import Usage
from router.admission.waiting import Waiting
from router.attempts import RETRIED_STATUSES, Retries, verdict_of
from router.continuing import CONTINUATIONS_MAX, NO_COUNTS, Counts, Resumption
from router.edge.client import ClientConnection, Request
from router.edge.fleet import Fleet
from router.edge.metrics import RouterMetrics
from router.edge.prompt_blocks import PromptBlocks
from router.edge.upstream import Patience, Timeouts
from router.errors import (
    LocalLimitError,
    OtherWeightsError,
    StalledError,
    UnreachableError,
    UpstreamError,
    UpstreamTimeoutError,
)
from router.exchange import Exchange, Rejection, no_replica, unreachable
from router.model_alias import ModelAlias
from router.outcome import ContinuationOutcome, Outcome
from router.placement_request import placement_request
from router.placing import Placing
from router.policy.interface import PlacementRequest, Ticket
from router.policy.prompt import Chains
from router.relay import Breakage, BrokenStream, EngineRefusal, EngineWord, Leg, relay, version_of
from router.reply import Reply
from router.request.fields import RequestFacts, engine_body, read_request
from router.request_body import plain_body
from router.state.replicas import Lease, Replica
from router.stored_responses import keeper_of, response_id
from router.stream.continuable import NotContinuable
from router.stream.editor import editor_for
from router.stream.memory import StreamMemory
from router.types import ReplicaId, Verdict

# Trace context is the only thing of a client's headers that an engine gets: everything else there could steer it.
FORWARDED = (b"traceparent", b"tracestate")
# How OpenAI's and Anthropic's clients say that they try again.
CLIENT_RETRY_COUNT = b"x-stainless-retry-count"

# Surfaces whose prompts an engine tokenizes for whoever asks.
TOKENIZED = (Surface.CHAT, Surface.COMPLETIONS)

# Above this a body is understood in a thread: the longest take a second.
LONG_BODY_BYTES = 256 * 1024

_KEY_MESSAGE = "The replica does not take this service's key; its operator must check --upstream-key."


@dataclass(frozen=True, slots=True)
class ForwardingSettings:
    body_bytes_max: int
    alias: str | None  # the one name by which clients know the model
    shows_replica: bool
    continues: bool  # broken streams, where it is safe
    keep_alive_s: float
    timeouts: Timeouts
    model_timeouts: Mapping[str, Timeouts]  # by the name that clients use


@dataclass(frozen=True, slots=True)
class ForwardingParts:
    """What all requests share."""

    fleet: Fleet
    placing: Placing
    chains: Chains
    retries: Retries
    metrics: RouterMetrics
    settings: ForwardingSettings
    engine_headers: bytes  # lines that every request to an engine carries
    prompt_blocks: PromptBlocks | None = None  # None: nobody looks at them


class Forwarding:
    """Lives as long as its request. `run` returns its outcome or raises Rejection."""

    __slots__ = (
        "_alias",
        "_body",
        "_broken",
        "_connection",
        "_digest",
        "_engine_model",
        "_exchange",
        "_facts",
        "_last_word",
        "_memory",
        "_parts",
        "_patience",
        "_placement",
        "_rank",
        "_reply",
        "_request",
        "_resumption",
        "_ticket",
    )

    def __init__(
        self, parts: ForwardingParts, request: Request, connection: ClientConnection, exchange: Exchange, reply: Reply
    ) -> None:
        self._parts = parts
        self._request = request
        self._connection = connection
        self._exchange = exchange
        self._reply = reply
        self._facts: RequestFacts
        self._engine_model = ""
        self._body = b""
        self._alias: ModelAlias | None = None
        self._patience: Patience
        self._placement: PlacementRequest
        self._digest: int | None = None  # of the body; None where the prompt's blocks are of no use
        self._ticket: Ticket | None = None  # of the attempt that runs
        self._rank: int | None = None  # of its replica's ranks, where it has several
        self._memory: StreamMemory | None = None
        # Values and no exceptions: through its traceback one would hold this object, and with it all of the answer's buffers.
        self._broken: Breakage | None = None  # why the answer must be continued
        self._resumption: Resumption | None = None
        self._last_word: EngineWord | None = None  # of an engine that refused

    async def run(self) -> Outcome:
        body, facts = await self._understand() if self._is_laborious() else self._read(self._request.body)
        self._prepare(body, facts)
        self._request.body = b""  # `_body` is kept while it may be sent again; one of both is enough
        retries, exchange = self._parts.retries, self._exchange
        while True:
            if self._resumption is not None and not self._has_replica() and self._ends(self._resumption, NO_COUNTS):
                return Outcome.COMPLETED
            lease = await self._place()
            verdict = Verdict.NEUTRAL
            try:
                await self._attempt(lease)
                verdict = Verdict.GOOD
                retries.success(time.monotonic())
                return Outcome.COMPLETED
            except EngineRefusal as refusal:
                word = self._last_word = refusal.word
                verdict = verdict_of(word.status)
                exchange.error = self._blame(lease, refusal)
                if not (word.status in RETRIED_STATUSES and self._may_retry(lease)):
                    raise self._failed() from refusal
            except BrokenStream as broken:
                verdict = Verdict.BAD
                exchange.error = self._blame(lease, broken)
                if not broken.is_stream:
                    self._reply.break_off()
                    return broken.breakage.outcome
                self._resume(broken.breakage)
            except NotContinuable as refusal:
                raise self._not_continued(refusal.reason) from refusal
            except StalledError as error:
                # The replica is out already, and what it had must not be lost for want of a retry budget.
                exchange.error = self._blame(lease, error)
                if not self._has_replica():
                    raise self._failed() from error
                self._parts.metrics.retried(lease.replica.id)
            except UpstreamTimeoutError as error:
                verdict = Verdict.BAD
                exchange.error = self._blame(lease, error)
                raise Rejection(504, self._too_slow(), Outcome.UPSTREAM_TIMEOUT, code="upstream_timeout") from error
            except LocalLimitError as error:
                exchange.error = str(error)
                message = "The service is out of connections; try again."
                raise Rejection(503, message, Outcome.UPSTREAM_UNREACHABLE, code="overloaded") from error
            except UpstreamError as error:
                # The client has got nothing yet, so another replica can answer in this one's place.
                verdict = Verdict.NEUTRAL if isinstance(error, OtherWeightsError) else Verdict.BAD
                exchange.error = self._blame(lease, error)
                if isinstance(error, UnreachableError):
                    self._parts.fleet.report_unreachable(lease.replica, str(error))
                if not self._may_retry(lease):
                    raise self._failed() from error
            finally:
                lease.settle(verdict, time.monotonic())
                self._end_ticket(exchange.usage if verdict is Verdict.GOOD else None)

    def _is_laborious(self) -> bool:
        """Whether to understand the request takes long enough for streams to stand still meanwhile."""
        return len(self._request.body) > LONG_BODY_BYTES or b"content-encoding" in self._request.headers

    async def _understand(self) -> tuple[bytes, RequestFacts]:
        request = self._request
        coding = request.headers.get(b"content-encoding")
        body = await asyncio.to_thread(plain_body, request.body, coding, self._parts.settings.body_bytes_max)
        return await asyncio.to_thread(self._read, body)

    def _read(self, body: bytes) -> tuple[bytes, RequestFacts]:
        """Raises Rejection."""
        try:
            return body, read_request(self._exchange.surface, body)
        except InvalidRequestError as error:
            raise Rejection(400, error.message, Outcome.REJECTED_INVALID, param=error.param, code=error.code) from None

    def _prepare(self, body: bytes, facts: RequestFacts) -> None:
        """Decides what is sent, and for how long its answer is waited for. Raises Rejection."""
        exchange, parts = self._exchange, self._parts
        settings = parts.settings
        exchange.request_bytes = len(body)
        if self._request.headers.get(CLIENT_RETRY_COUNT, b"0") != b"0":
            parts.retries.client_retry(time.monotonic())
        self._facts = facts
        self._engine_model = engine_model(parts.fleet.table.served, facts.model, settings.alias)
        exchange.model = facts.model
        if self._engine_model != facts.model:
            self._alias = ModelAlias(public=facts.model, engine=self._engine_model)
        understood = body
        if exchange.surface is not Surface.RESPONSES:  # there it depends on the replica
            body = engine_body(body, facts, surface=exchange.surface, model=self._engine_model)
        self._body = body
        timeouts = settings.model_timeouts.get(facts.model, settings.timeouts)
        self._patience = Patience(
            timeouts,
            asyncio.get_running_loop().time() + timeouts.total if timeouts.total else None,
            settings.keep_alive_s,
            self._reply.keep_alive if facts.stream else None,
        )
        self._placement = exchange.placement = placement_request(
            exchange,
            facts,
            self._request.headers,
            body,
            self._engine_model,
            parts.chains,
            is_changed=body is not understood,
        )
        blocks = parts.prompt_blocks
        if blocks is not None and blocks.is_useful and exchange.surface in TOKENIZED:
            self._digest = xxh3_64_intdigest(body)
            self._placement.blocks = blocks.of(self._digest, self._engine_model)
        has_others = len(parts.fleet.table.served[self._engine_model]) > 1
        if settings.continues and has_others and facts.never_continues is None:
            self._memory = StreamMemory()

    async def _attempt(self, lease: Lease) -> None:
        """Sends the request to one replica and relays what it answers. Raises what `relay` and the pool raise."""
        exchange, facts, parts = self._exchange, self._facts, self._parts
        pool = parts.fleet.pool(lease.endpoint)
        resumption, seam = self._resumption, None
        if resumption is not None:
            counts = await resumption.count(pool, self._head)
            if self._ends(resumption, counts):
                return
            body, seam = resumption.next_leg(counts)
        elif exchange.surface is Surface.RESPONSES:
            request_id = response_id(exchange.engine_request_id, lease.replica.id)
            body = engine_body(self._body, facts, surface=exchange.surface, model=self._engine_model, request_id=request_id)
        else:
            body = self._body
        blocks, digest = parts.prompt_blocks, self._digest
        if blocks is not None and digest is not None and not self._placement.blocks:
            # Once this request is on its way.
            asyncio.get_running_loop().call_soon(
                blocks.want, digest, exchange.surface, self._body, lease.replica, pool, self._head
            )
        answer = await pool.send(self._head(exchange.route.encode(), len(body)), body, self._patience)
        if seam is not None and answer.status < 400:
            parts.metrics.continuation(ContinuationOutcome.CONTINUED)
        leg = Leg(
            surface=exchange.surface,
            lease=lease,
            strips_usage=facts.strips_usage,
            choices=facts.choices,
            checkpoint=lease.replica.checkpoint,
            alias=self._alias,
            memory=self._memory,
            seam=seam,
            on_first_token=self._first_token,
        )
        try:
            await relay(answer, self._reply, self._connection, exchange, leg)
        finally:
            answer.close()

    def _first_token(self) -> None:
        if self._ticket is not None:
            self._parts.placing.first_token(self._ticket)

    def _head(self, target: bytes, body_bytes: int) -> bytes:
        headers = self._request.headers
        block = self._parts.engine_headers
        for name in FORWARDED:
            if name in headers:
                block += b"%b: %b\r\n" % (name, headers[name])
        if self._rank is not None:
            block += b"%b: %d\r\n" % (names.DATA_PARALLEL_RANK, self._rank)
        line = b"POST %b HTTP/1.1\r\n%bcontent-length: %d\r\n%b: %b\r\n"
        return line % (target, block, body_bytes, names.REQUEST_ID, self._exchange.engine_request_id.encode())

    async def _place(self) -> Lease:
        exchange, table, placing = self._exchange, self._parts.fleet.table, self._parts.placing
        while True:
            ids = self._kept_ids()
            if not ids:
                if exchange.tried:
                    raise self._failed()
                raise self._no_replica()
            if exchange.tried:
                ticket = placing.at_once(self._placement, ids)
            else:
                given = placing.submit(self._placement, self._kept_ids)
                ticket = await self._wait(given) if isinstance(given, Waiting) else given
            self._ticket = ticket
            replica = table.find(ticket.replica)
            if replica is not None and replica.endpoint is not None:
                break
            self._end_ticket(None)  # it was removed in this very moment
        try:
            lease = table.lease(replica)
        except BaseException:
            self._end_ticket(None)
            raise
        self._rank = ticket.rank if replica.facts.ranks > 1 else None
        exchange.tried.append(replica)
        exchange.attempts += 1
        exchange.replica = replica.id
        exchange.ticket = ticket
        exchange.placed_at = time.perf_counter()
        return lease

    async def _wait(self, waiting: Waiting) -> Ticket:
        patience, exchange = self._patience, self._exchange
        began_s = exchange.elapsed_s
        try:
            ticket = await self._parts.placing.wait(
                waiting, silence_s=patience.silence_s, on_silence=patience.on_silence, ends_at=patience.ends_at
            )
        finally:
            exchange.waited_s = exchange.elapsed_s - began_s
        if ticket is None:
            raise self._no_replica()
        return ticket

    def _end_ticket(self, usage: Usage | None) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            blocks = self._parts.prompt_blocks
            if blocks is not None and self._digest is not None and not self._placement.blocks:
                self._placement.blocks = blocks.of(self._digest, self._engine_model)
            self._parts.placing.ended(ticket, usage)

    def _no_replica(self) -> Rejection:
        return no_replica(f"No replica that serves '{self._exchange.model}' is ready; GET /ready says why.")

    def _kept_ids(self) -> Sequence[ReplicaId]:
        """The candidates; only one where it keeps the response which this one follows: no other could find it."""
        ids = self._candidate_ids()
        previous = self._facts.previous_response_id
        keeper = None if previous is None else keeper_of(previous, ids)
        return ids if keeper is None else (keeper,)

    def _candidate_ids(self) -> Sequence[ReplicaId]:
        table, tried = self._parts.fleet.table, self._exchange.tried
        if self._broken is None:
            return table.candidate_ids(self._engine_model, tried)
        version = version_of(self._exchange.checkpoint)
        # Without an agent a replica's version is not known before it answers; `relay` looks again.
        return [
            replica.id
            for replica in table.candidates(self._engine_model, tried)
            if replica.checkpoint is None or version_of(replica.checkpoint) == version
        ]

    def _may_retry(self, lease: Lease) -> bool:
        """Whether the request goes to another replica; if so, that is counted."""
        if not self._has_replica():
            return False
        if self._broken is None and not self._parts.retries.may_retry(self._exchange.attempts, time.monotonic()):
            return False
        self._parts.metrics.retried(lease.replica.id)
        return True

    def _has_replica(self) -> bool:
        return bool(self._candidate_ids())

    def _blame(self, lease: Lease, error: Exception) -> str:
        """For the log: the request may end on another replica than the one that failed."""
        return f"{lease.replica.id}: {error}"

    def _too_slow(self) -> str:
        timeouts = self._patience.timeouts
        if self._patience.ends_at is not None and asyncio.get_running_loop().time() > self._patience.ends_at:
            return f"The answer was not whole within {timeouts.total:g} s; ask for fewer tokens ('max_tokens')."
        if self._facts.stream:
            return f"The model sent nothing within {timeouts.first_byte:g} s; try again or send a shorter prompt."
        message = (
            f"The model did not answer within {timeouts.first_byte:g} s; ask for fewer tokens ('max_tokens') or for a stream"
        )
        return message + " ('stream': true), which may take longer."

    def _failed(self) -> Rejection:
        """No replica has answered: the last word of an engine, in OpenAI's shape, if one had a word."""
        word = self._last_word
        if self._broken is not None:
            reason = ContinuationOutcome.NO_REPLICA if word is None else ContinuationOutcome.ENGINE_REFUSED
            return self._not_continued(reason)
        if word is None:
            return unreachable()
        status, detail, retry_after = word
        if status in (401, 403):
            # The client's own key was checked long before: this is about the router's.
            self._exchange.error = f"the engine answered {status} to the router's key"
            return Rejection(502, _KEY_MESSAGE, Outcome.ENGINE_ERROR, code="upstream_error")
        outcome = Outcome.ENGINE_REFUSED if status < 500 else Outcome.ENGINE_ERROR
        return Rejection(status, detail.message, outcome, code=detail.code, param=detail.param, retry_after=retry_after)

    def _resume(self, broken: Breakage) -> None:
        """Prepares to go on with a broken answer. Raises Rejection if that is not possible."""
        self._broken, self._last_word = broken, None
        if self._memory is None:
            reason = self._facts.never_continues if self._parts.settings.continues else ContinuationOutcome.OFF
            raise self._not_continued(reason or ContinuationOutcome.NO_REPLICA)
        if self._exchange.continuations >= CONTINUATIONS_MAX:
            raise self._not_continued(ContinuationOutcome.TOO_OFTEN)
        seams = self._exchange.continuations = self._exchange.continuations + 1
        self._resumption = Resumption(self._exchange.surface, self._body, self._memory.sent(), seams)

    def _ends(self, resumption: Resumption, counts: Counts) -> bool:
        """Whether only the end of a broken answer was missing; then it is sent."""
        ending = resumption.ending(counts)
        if ending is None:
            return False
        editor = editor_for(self._exchange.surface, strips_usage=self._facts.strips_usage, choices=self._facts.choices)
        self._reply.end(editor.pass_on(ending))
        self._exchange.usage = editor.usage or self._exchange.usage
        self._parts.metrics.continuation(ContinuationOutcome.ONLY_THE_END)
        return True

    def _not_continued(self, reason: ContinuationOutcome) -> Rejection:
        """The broken answer ends here."""
        assert self._broken is not None
        self._parts.metrics.continuation(reason)
        detail = self._broken.detail
        return Rejection(502, detail.message, self._broken.outcome, code=detail.code, param=detail.param)


def engine_model(served: Mapping[str, Sequence[Replica]], model: str, alias: str | None) -> str:
    """The engine's name of the model that a request asks for. Raises Rejection."""
    if not served:
        raise no_replica(f"No replica has answered yet, so it is not known whether '{model}' is served; GET /ready says why.")
    if alias is None and model in served:
        return model
    if alias is not None and model == alias:
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
