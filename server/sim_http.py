"""The simulated engine's HTTP surface as one ASGI application: the dispatch to all routes, and those that generate nothing."""

import hashlib
import hmac
import time
import uuid

import msgspec

from server.guard import Message, Receive, Send
from server.sim_asgi import ClientGone, Request, Routes, respond, respond_error, respond_json
from server.sim_errors import ApiError
from server.sim_faults import FaultBook
from server.sim_faulty_send import ConnectionBrokenByFault
from server.sim_fields import Fields
from server.sim_generate import GenerateRoutes
from server.sim_loop import SimulatedEngine
from server.sim_messages_request import count_message_tokens
from server.sim_metrics import EngineMetrics
from server.sim_requests import chat_messages, chat_prompt, check_model
from server.sim_responses_store import ResponseStore
from server.sim_settings import VLLM_VERSION, EngineSettings
from server.sim_text import decode, encode, token_text

_KEYED_PREFIXES = ("/v1", "/v2", "/inference", "/cohere")  # vLLM asks for the API key only there


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
        self._metrics = metrics
        self._started_at = int(time.time())
        self._stored = ResponseStore()
        self._generate = GenerateRoutes(settings=settings, engine=engine, faults=faults, store=self._stored)
        self._key_digests = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]
        self._routes: Routes = {
            **self._generate.table(),
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
        if not settings.pools:
            self._routes["/v1/messages/count_tokens"] = {"POST": self._count_tokens}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"the simulated engine serves HTTP only, not {scope['type']}")
        request = Request(scope, receive, self._with_request_id(scope, send))
        methods = self._routes.get(request.path)
        if methods is None and not self._settings.pools:
            methods = self._stored.handlers(request.path)
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
        check_model(fields, self._settings)
        answer = {
            "count": len(tokens),
            "max_model_len": self._settings.scheduler.max_model_len,
            "tokens": tokens,
            "token_strs": [token_text(token) for token in tokens] if fields.flag("return_token_strs") else None,
        }
        await respond_json(request.send, answer)

    async def _count_tokens(self, request: Request) -> None:
        """Anthropic's way to ask how long a prompt is."""
        body = await request.read_model_body()
        try:
            count = count_message_tokens(body)
            check_model(Fields(body), self._settings)
        except ApiError as error:
            if error.is_frameworks:
                raise
            await respond(request.send, error.as_anthropic(), status=error.status)
            return
        await respond_json(request.send, {"input_tokens": count, "context_management": {"original_input_tokens": count}})

    async def _detokenize(self, request: Request) -> None:
        fields = Fields(await request.read_model_body())
        if fields.raw("tokens") is None:
            raise fields.invalid("tokens", "missing", "Field required")
        tokens = fields.items("tokens")
        if not all(type(token) is int and 0 <= token < 2**63 for token in tokens):
            raise fields.invalid("tokens", "int_type", "Input should be a valid integer")
        check_model(fields, self._settings)
        await respond_json(request.send, {"prompt": decode(tokens)})

    async def _health(self, request: Request) -> None:
        await respond(request.send, b"", content_type=None)

    async def _version(self, request: Request) -> None:
        await respond_json(request.send, {"version": VLLM_VERSION})

    async def _load(self, request: Request) -> None:
        load = self._generate.in_progress if self._settings.server_load_tracking else 0
        await respond_json(request.send, {"server_load": load})

    async def _expose_metrics(self, request: Request) -> None:
        body, content_type = self._metrics.render(request.header(b"accept") or "")
        await respond(request.send, body, content_type=content_type.encode())

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
