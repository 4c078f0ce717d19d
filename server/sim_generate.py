"""The generating routes of the simulated engine: one request each, from its body to the last byte of its answer."""

import asyncio
import functools
import hashlib
import itertools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from server.guard import Send
from server.sim_answers import Answer, AnswerHead
from server.sim_asgi import SSE_HEADERS, Request, Routes, respond, respond_json
from server.sim_chat_answer import ChatAnswer
from server.sim_completion_answer import CompletionAnswer
from server.sim_embeddings import Embedding, EmbeddingsAnswer, EmbeddingsRequest, parse_embeddings
from server.sim_errors import ApiError, scripted_error
from server.sim_faults import FaultBook, FaultKind, RequestPlan
from server.sim_faulty_send import Connection, ConnectionBrokenByFault, FaultySend, GenerationFailedByFault
from server.sim_fields import Fields
from server.sim_generation import Generation
from server.sim_loop import SimulatedEngine, TokenStream
from server.sim_messages_answer import MessagesAnswer
from server.sim_messages_request import MessagesRequest, parse_messages
from server.sim_requests import ChatRequest, CompletionRequest, check_model, parse_chat, parse_completion
from server.sim_responses_answer import ResponsesAnswer
from server.sim_responses_request import ResponsesRequest, parse_responses
from server.sim_responses_store import EventLog, ResponseStore, follow
from server.sim_scheduler import Output, SequenceState
from server.sim_settings import VLLM_VERSION, EngineSettings
from server.sim_transport import connection_of

_CHAT, _COMPLETIONS, _MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
_RESPONSES, _EMBEDDINGS = "/v1/responses", "/v1/embeddings"
_ID_PREFIXES = {_CHAT: "chatcmpl", _COMPLETIONS: "cmpl", _MESSAGES: "chatcmpl", _EMBEDDINGS: "embd"}

_Parsed = ChatRequest | CompletionRequest | MessagesRequest | ResponsesRequest | EmbeddingsRequest


class GenerateRoutes:
    """`store` holds what was asked to be stored."""

    def __init__(self, *, settings: EngineSettings, engine: SimulatedEngine, faults: FaultBook, store: ResponseStore) -> None:
        self._settings = settings
        self._engine = engine
        self._faults = faults
        self._store = store
        self._serial = itertools.count()
        self._parsers: dict[str, Callable[[Mapping[str, Any], EngineSettings], _Parsed]] = {
            _CHAT: parse_chat,
            _COMPLETIONS: parse_completion,
            _MESSAGES: parse_messages,
            _RESPONSES: functools.partial(parse_responses, recall=store.recall),
            _EMBEDDINGS: parse_embeddings,
        }
        digest = hashlib.sha256(repr((settings.scheduler, settings.served_model_names)).encode()).hexdigest()
        self._fingerprint = f"vllm-{VLLM_VERSION}-{digest[:8]}"
        self.in_progress = 0  # requests, from their body to the last byte of their answer

    def table(self) -> Routes:
        """An embedding model has other routes than one that generates text, as in vLLM."""
        paths = (_EMBEDDINGS,) if self._settings.pools else (_CHAT, _COMPLETIONS, _MESSAGES, _RESPONSES)
        return {path: {"POST": self._post} for path in paths}

    async def _post(self, request: Request) -> None:
        """A client that leaves ends the request's work in the engine at once."""
        body = await request.read_model_body()
        plan = self._faults.plan_request()
        work = asyncio.create_task(self._answer(request, body, plan))
        gone = asyncio.create_task(request.until_gone())
        self.in_progress += 1
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        except ApiError as error:
            if request.path != _MESSAGES or error.is_frameworks:
                raise
            await respond(request.send, error.as_anthropic(), status=error.status)
        finally:
            self.in_progress -= 1
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _answer(self, request: Request, body: Mapping[str, Any], plan: RequestPlan) -> None:
        if plan.delay_s:
            await asyncio.sleep(plan.delay_s)
        if plan.status is not None:
            raise scripted_error(plan.status.status, plan.status.message)
        params = self._parsers[request.path](body, self._settings)
        check_model(Fields(body), self._settings)
        answer_id = self._answer_id(request, params)
        sequences = self._sequences(answer_id, params)
        head = AnswerHead(
            id=answer_id,
            created=int(time.time()),
            model=self._settings.served_model_names[0],
            fingerprint=self._fingerprint,
            prompt_tokens_details=self._settings.prompt_tokens_details,
            reasoning_details=self._settings.reasoning_parser and not isinstance(params, CompletionRequest),
        )
        answer = _answer_for(params, head, sequences)
        send, connection = request.send, connection_of(request.scope)
        fails = plan.breakage is not None and plan.breakage.kind is FaultKind.ERROR_FRAME
        if plan.breakage is not None and (params.generate.stream or not fails):
            send = FaultySend(
                send,
                plan.breakage,
                connection,
                hang=self._hang,
                is_armed=lambda: self._faults.still_holds(plan),
            )
        if isinstance(params, ResponsesRequest) and params.stores:
            assert isinstance(answer, ResponsesAnswer)
            self._store.keep_messages(answer_id, params.messages)
            if params.in_background:
                await self._answer_later(send, connection, params, answer, sequences)
                return
        stream = self._engine.submit(sequences)
        try:
            if params.generate.stream:
                await _send_stream(send, connection, stream, answer, lambda: self._keep(params, answer))
                return
            await _collect(stream, answer)
            if fails and self._faults.still_holds(plan):
                raise ApiError.internal("Internal server error")
            self._keep(params, answer)
            await respond(send, answer.whole())
        finally:
            self._engine.abort(sequence.id for sequence in sequences)

    async def _answer_later(
        self,
        send: Send,
        connection: Connection,
        params: ResponsesRequest,
        answer: ResponsesAnswer,
        sequences: Sequence[SequenceState],
    ) -> None:
        """Answers at once and lets the work go on, whether the client stays or not."""
        self._store.keep(answer.as_dict("queued"))
        log = EventLog() if params.generate.stream else None
        work = asyncio.create_task(self._work_in_background(params, answer, sequences, log))
        self._store.run(params.id, work, log)
        if log is None:
            await respond_json(send, answer.as_dict("queued"))
        else:
            try:
                await follow(send, log)
            except GenerationFailedByFault as error:
                connection.close()
                raise ConnectionBrokenByFault from error

    async def _work_in_background(
        self, params: ResponsesRequest, answer: ResponsesAnswer, sequences: Sequence[SequenceState], log: EventLog | None
    ) -> None:
        stream = self._engine.submit(sequences)
        try:
            if log is not None:
                await log.append(answer.opening())
            while emissions := await stream.take():
                events = [event for emission in emissions for event in answer.add(emission)]
                if log is not None:
                    await log.append(events)
            last = answer.closing()
            self._keep(params, answer)
            if log is not None:
                await log.append(last)
        finally:
            self._engine.abort(sequence.id for sequence in sequences)

    def _keep(self, params: _Parsed, answer: Answer) -> None:
        if isinstance(params, ResponsesRequest) and params.stores:
            assert isinstance(answer, ResponsesAnswer)
            self._store.keep(answer.result())

    def _answer_id(self, request: Request, params: _Parsed) -> str:
        """A response is named by its body alone, every other answer by X-Request-Id first."""
        if isinstance(params, ResponsesRequest):
            return params.id
        given_id = request.header(b"x-request-id") or params.generate.request_id or uuid.uuid4().hex
        return f"{_ID_PREFIXES[request.path]}-{given_id}"

    def _sequences(self, answer_id: str, params: _Parsed) -> list[SequenceState]:
        """The sequences to run; ids are unique even where clients repeat theirs."""
        serial = next(self._serial)
        now = self._engine.now()
        sequences = []
        for plan in params.generate.sequences:
            sequence_id = f"{answer_id}/{serial}/{plan.index}"
            prompt = plan.prompt
            output: Output
            if isinstance(params, EmbeddingsRequest):
                output = Embedding(sequence_id, prompt.tokens)
            else:
                output = Generation(
                    sequence_id, prompt.tokens, answered=prompt.answered, sampling=plan.sampling, script=plan.script
                )
            sequences.append(
                SequenceState(
                    sequence_id,
                    prompt.tokens,
                    output,
                    arrived_at=now,
                    max_tokens=plan.sampling.max_tokens,
                    salt=params.generate.salt,
                )
            )
        return sequences

    async def _hang(self) -> None:
        self._engine.hang()
        await self._engine.until_not_hung()


def _answer_for(params: _Parsed, head: AnswerHead, sequences: Sequence[SequenceState]) -> Answer:
    match params:
        case ChatRequest():
            return ChatAnswer(params, head, sequences)
        case CompletionRequest():
            return CompletionAnswer(params, head, sequences)
        case MessagesRequest():
            return MessagesAnswer(params, head, sequences)
        case ResponsesRequest():
            return ResponsesAnswer(params, head, sequences)
        case EmbeddingsRequest():
            return EmbeddingsAnswer(params, head, sequences)


async def _collect(stream: TokenStream, answer: Answer) -> None:
    while emissions := await stream.take():
        for emission in emissions:
            answer.add(emission)


async def _send_stream(
    send: Send, connection: Connection, stream: TokenStream, answer: Answer, on_complete: Callable[[], None]
) -> None:
    """Server-sent events, one body message each; `on_complete` is called before the client can know of the end.

    The head of a chat answer comes with the first token, as from vLLM.
    """
    try:
        await send({"type": "http.response.start", "status": 200, "headers": list(SSE_HEADERS)})
        is_open = answer.opens_at_once
        if is_open:
            await _send_events(send, answer.opening())
        while emissions := await stream.take():
            if not is_open:
                is_open = True
                await _send_events(send, answer.opening())
            for emission in emissions:
                await _send_events(send, answer.add(emission))
        last = answer.closing()
        on_complete()
        await _send_events(send, last)
    except GenerationFailedByFault as error:
        events = answer.failed(ApiError.internal(str(error)))
        if events is None:
            connection.close()
            raise ConnectionBrokenByFault from error
        await _send_events(send, events)
    await send({"type": "http.response.body", "body": b""})


async def _send_events(send: Send, events: Sequence[bytes]) -> None:
    for data in events:
        await send({"type": "http.response.body", "body": data, "more_body": True})
