"""The simulated engine's HTTP surface: vLLM's serving routes, and the dispatch to all routes, as one ASGI application."""

import asyncio
import hashlib
import hmac
import itertools
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from server.guard import Message, Receive, Send
from server.sim_answers import DONE, Answer, AnswerHead, event
from server.sim_asgi import ClientGone, Request, Routes, respond, respond_error, respond_json
from server.sim_chat_answer import ChatAnswer
from server.sim_completion_answer import CompletionAnswer
from server.sim_errors import ApiError, scripted_error
from server.sim_faults import (
    ConnectionBrokenByFault,
    FaultBook,
    FaultKind,
    FaultySend,
    GenerationFailedByFault,
    RequestPlan,
)
from server.sim_fields import Fields
from server.sim_generation import Generation
from server.sim_loop import SimulatedEngine, TokenStream
from server.sim_metrics import EngineMetrics
from server.sim_requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    chat_messages,
    chat_prompt,
    parse_chat,
    parse_completion,
)
from server.sim_scheduler import SequenceState
from server.sim_settings import VLLM_VERSION, EngineSettings
from server.sim_text import decode, encode, token_text
from server.sim_transport import connection_of

_KEYED_PREFIXES = ("/v1", "/v2", "/inference", "/cohere")  # vLLM asks for the API key only there
_SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]


class SimulatedApp:
    """Plain ASGI. `admin_routes` are the development routes; who may call them is the guard's matter."""

    def __init__(
        self,
        *,
        settings: EngineSettings,
        engine: SimulatedEngine,
        metrics: EngineMetrics,
        faults: FaultBook,
        admin_routes: Routes,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._metrics = metrics
        self._faults = faults
        self._started_at = int(time.time())
        self._serial = itertools.count()
        self._generating = 0
        self._key_digests = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]
        digest = hashlib.sha256(repr((settings.scheduler, settings.served_model_names)).encode()).hexdigest()
        self._fingerprint = f"vllm-{VLLM_VERSION}-{digest[:8]}"
        self._routes: Routes = {
            "/v1/chat/completions": {"POST": self._generate},
            "/v1/completions": {"POST": self._generate},
            "/v1/models": {"GET": self._models},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health, "POST": self._health},
            "/version": {"GET": self._version},
            "/load": {"GET": self._load},
            "/metrics": {"GET": self._expose_metrics},
            **admin_routes,
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"the simulated engine serves HTTP only, not {scope['type']}")
        request = Request(scope, receive, self._with_request_id(scope, send))
        methods = self._routes.get(request.path)
        try:
            if not self._is_authorised(request):
                await respond_json(request.send, {"error": "Unauthorized"}, status=401)
            elif methods is None:
                await respond_json(request.send, {"detail": "Not Found"}, status=404)
            elif (handler := methods.get(request.method)) is None:
                allow = ", ".join(methods).encode()
                body = msgspec.json.encode({"detail": "Method Not Allowed"})
                await respond(request.send, body, status=405, headers=((b"allow", allow),))
            else:
                await handler(request)
        except ApiError as error:
            await respond_error(request.send, error)
        except ClientGone:
            pass
        except ConnectionBrokenByFault:
            await request.until_gone()

    async def _generate(self, request: Request) -> None:
        """Chat and completions. A client that leaves ends the request's work in the engine at once."""
        body = await request.read_model_body()
        plan = self._faults.plan_request()
        work = asyncio.create_task(self._answer(request, body, plan))
        gone = asyncio.create_task(request.until_gone())
        self._generating += 1
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            self._generating -= 1
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _answer(self, request: Request, body: Mapping[str, Any], plan: RequestPlan) -> None:
        if plan.delay_s:
            await asyncio.sleep(plan.delay_s)
        if plan.status is not None:
            raise scripted_error(plan.status.status, plan.status.message)
        params: ChatRequest | CompletionRequest
        is_chat = request.path == "/v1/chat/completions"
        params = parse_chat(body, self._settings) if is_chat else parse_completion(body, self._settings)
        self._check_model(Fields(body).text("model"))
        given_id = request.header(b"x-request-id") or params.generate.request_id or uuid.uuid4().hex
        answer_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{given_id}"
        sequences = self._sequences(answer_id, params.generate)
        head = AnswerHead(
            id=answer_id,
            created=int(time.time()),
            model=self._settings.served_model_names[0],
            fingerprint=self._fingerprint,
            prompt_tokens_details=self._settings.prompt_tokens_details,
            reasoning_details=self._settings.reasoning_parser and is_chat,
        )
        answer: Answer
        if isinstance(params, ChatRequest):
            answer = ChatAnswer(params, head, sequences)
        else:
            answer = CompletionAnswer(params, head, sequences)
        send = request.send
        if plan.breakage is not None:
            send = FaultySend(
                send,
                plan.breakage,
                connection_of(request.scope),
                hang=self._hang,
                is_armed=lambda: self._faults.still_holds(plan),
            )
        stream = self._engine.submit(sequences)
        try:
            if params.generate.stream:
                await _send_stream(send, stream, answer)
                return
            while emissions := await stream.take():
                for emission in emissions:
                    answer.add(emission)
            if plan.breakage is not None and plan.breakage.kind is FaultKind.ERROR_FRAME and self._faults.still_holds(plan):
                raise ApiError.internal("Internal server error")
            await respond(send, answer.whole())
        finally:
            self._engine.abort(sequence.id for sequence in sequences)

    def _sequences(self, answer_id: str, request: GenerateRequest) -> list[SequenceState]:
        """The sequences to run; ids are unique even where clients repeat theirs."""
        serial = next(self._serial)
        now = self._engine.now()
        sequences = []
        for plan in request.sequences:
            sequence_id = f"{answer_id}/{serial}/{plan.index}"
            prompt = plan.prompt
            generation = Generation(
                sequence_id, prompt.tokens, answered=prompt.answered, sampling=plan.sampling, script=plan.script
            )
            sequences.append(
                SequenceState(
                    sequence_id,
                    prompt.tokens,
                    generation,
                    arrived_at=now,
                    max_tokens=plan.sampling.max_tokens,
                    salt=request.salt,
                )
            )
        return sequences

    async def _hang(self) -> None:
        self._engine.hang()
        await self._engine.until_not_hung()

    async def _models(self, request: Request) -> None:
        settings = self._settings
        root = settings.served_model_names[0] if settings.model is None else str(settings.model)
        permission = {
            "id": f"modelperm-{uuid.uuid4().hex}",
            "object": "model_permission",
            "created": self._started_at,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        cards = [
            {
                "id": name,
                "object": "model",
                "created": self._started_at,
                "owned_by": "vllm",
                "root": root,
                "parent": None,
                "max_model_len": settings.scheduler.max_model_len,
                "permission": [permission],
            }
            for name in settings.served_model_names
        ]
        await respond_json(request.send, {"object": "list", "data": cards})

    async def _tokenize(self, request: Request) -> None:
        fields = Fields(await request.read_model_body())
        if fields.raw("messages") is not None:
            prompt, _ = chat_prompt(fields, chat_messages(fields), fields.items("tools"))
            tokens = prompt.tokens
        else:
            text = fields.text("prompt")
            if text is None:
                raise fields.invalid("prompt", "missing", "Field required")
            tokens = encode(text)
        self._check_model(fields.text("model"))
        answer = {
            "count": len(tokens),
            "max_model_len": self._settings.scheduler.max_model_len,
            "tokens": tokens,
            "token_strs": [token_text(token) for token in tokens] if fields.flag("return_token_strs") else None,
        }
        await respond_json(request.send, answer)

    async def _detokenize(self, request: Request) -> None:
        fields = Fields(await request.read_model_body())
        if fields.raw("tokens") is None:
            raise fields.invalid("tokens", "missing", "Field required")
        tokens = fields.items("tokens")
        if not all(type(token) is int and 0 <= token < 2**63 for token in tokens):
            raise fields.invalid("tokens", "int_type", "Input should be a valid integer")
        self._check_model(fields.text("model"))
        await respond_json(request.send, {"prompt": decode(tokens)})

    async def _health(self, request: Request) -> None:
        await respond(request.send, b"", content_type=None)

    async def _version(self, request: Request) -> None:
        await respond_json(request.send, {"version": VLLM_VERSION})

    async def _load(self, request: Request) -> None:
        load = self._generating if self._settings.server_load_tracking else 0
        await respond_json(request.send, {"server_load": load})

    async def _expose_metrics(self, request: Request) -> None:
        body, content_type = self._metrics.render(request.header(b"accept") or "")
        await respond(request.send, body, content_type=content_type.encode())

    def _check_model(self, model: str | None) -> None:
        """An absent model is the served one, as in vLLM."""
        served = self._settings.served_model_names
        if model and model not in served:
            raise ApiError.unknown_model(model, served)

    def _is_authorised(self, request: Request) -> bool:
        if not self._key_digests or request.method == "OPTIONS" or not request.path.startswith(_KEYED_PREFIXES):
            return True
        scheme, _, key = (request.header(b"authorization") or "").partition(" ")
        digest = hashlib.sha256(key.encode()).digest()
        return scheme.lower() == "bearer" and any(hmac.compare_digest(digest, known) for known in self._key_digests)

    def _with_request_id(self, scope: Message, send: Send) -> Send:
        """Echoes X-Request-Id, or makes one, where --enable-request-id-headers is on."""
        if not self._settings.request_id_headers:
            return send
        given = dict(scope["headers"]).get(b"x-request-id", uuid.uuid4().hex.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", given)]}
            await send(message)

        return send_with_id


async def _send_stream(send: Send, stream: TokenStream, answer: Answer) -> None:
    """Server-sent events, one body message each. The role comes with the first token, as from vLLM."""
    try:
        await send({"type": "http.response.start", "status": 200, "headers": list(_SSE_HEADERS)})
        is_open = False
        while emissions := await stream.take():
            if not is_open:
                is_open = True
                await _send_events(send, answer.opening())
            for emission in emissions:
                await _send_events(send, answer.add(emission))
        await _send_events(send, answer.closing())
    except GenerationFailedByFault as error:
        await _send_events(send, [event(ApiError.internal(str(error)).as_dict()), DONE])
    await send({"type": "http.response.body", "body": b""})


async def _send_events(send: Send, events: Sequence[bytes]) -> None:
    for data in events:
        await send({"type": "http.response.body", "body": data, "more_body": True})
