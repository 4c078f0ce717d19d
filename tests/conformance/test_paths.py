"""Which paths exist, under every spelling, and whom the Host header can fool: nobody."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from openai.types import Model
from openai.types.chat import ChatCompletion

from tests.conformance import raw, strict
from tests.conformance.replies import CHAT, PLAIN, check_failure
from tests.conformance.service import AUTHORIZED, JSON_HEADERS, KEY, MODEL, MODEL_LEN, ORIGIN, THINKER, Service
from tests.router.process import RouterProcess
from tests.scripted_engine import ScriptedEngine

# The engine's own routes (vLLM 0.32): development, administration, other surfaces and its own probes.
ENGINE_ROUTES = """
/pause /resume /is_paused /abort_requests /collective_rpc /reset_prefix_cache /reset_mm_cache /reset_encoder_cache /sleep
/wake_up /is_sleeping /init_weight_transfer_engine /start_weight_update /update_weights /finish_weight_update
/update_weight_version /weight_info /weight_checker /get_world_size /server_info /kv_event_sources /release_kv_cache_memory
/scale_elastic_ep /is_scaling_elastic_ep /fault_tolerance/apply /fault_tolerance/status /v1/load_lora_adapter
/v1/unload_lora_adapter /invocations /inference/v1/generate /v1/chat/completions/render /v1/chat/completions/derender
/v1/completions/render /v1/completions/derender /v1/messages/render /v1/chat/completions/batch /pooling /classify /score
/v1/score /rerank /v1/rerank /v2/rerank /v2/embed /generative_scoring /v1/audio/transcriptions /v1/audio/translations
/v1/realtime /tokenizer_info /load /ping /version /metrics /start_profile /stop_profile /docs /redoc /admin /admin/replicas
/admin/models /sim/faults /v1/files /v1/batches /v1/conversations /v1/moderations /v1/images/generations /v1/uploads /v1
/v1/chat /chat/completions
"""
SPELLINGS = """
//pause /%70ause /%2Fpause /%2fpause /./pause /v1/../pause /v1/%2e%2e/pause /v1/%2E%2E/pause /v1/..%2fpause
/v1/models/../../pause /v1/models/..%2f..%2fpause /v1/chat/completions/../../../pause
/v1/chat/completions/%2e%2e/%2e%2e/%2e%2e/pause /health/../pause /health;/pause /health%3b/pause /health%00/pause /pause%00
/pause%20 /pause/ /PAUSE /pause;x /pause#x /pause? /pause?mode=abort /%2570ause /\\pause /v1\\..\\pause
/v1//chat/completions //v1/chat/completions /v1/chat//completions /v1/chat/completions/ /v1/./chat/completions
/v1/Chat/Completions /v1/chat/completions%20 /v1/chat/completions%00 /v1/chat/completions;x /%76%31/chat/completions/..
/..;/pause /v1/responses/../pause /v1/responses/..%2F..%2Fpause /v1/responses/x/../../../pause
/v1/responses/x/cancel/../../../../pause
"""


@pytest.mark.parametrize("method", ["POST", "GET", "PUT", "DELETE", "PATCH"])
async def test_a_path_that_is_not_served_reaches_no_engine(
    scripted: ScriptedEngine, scripted_router: RouterProcess, method: str
) -> None:
    """404 `unknown_url` under every spelling; the engine sees nothing."""

    def wrong_answers() -> dict[str, raw.Answer]:
        wrong = {}
        for path in (ENGINE_ROUTES + SPELLINGS).split():
            request = raw.request(method, path, {"content-type": "application/json"}, b'{"model": "scripted"}')
            answer = raw.exchange(scripted_router.url, request)
            codes: tuple[str | None, ...] = ("unknown_url",)
            if path.startswith(("/v1/models/", "/v1/responses/")):  # an id may hold anything; this one names nothing
                codes = ("unknown_url", "model_not_found", "method_not_allowed", "response_not_found")
            is_no_target = answer.status == 400 and ("#" in path or "\\" in path)  # HTTP has no such target
            if not is_no_target and answer.error["code"] not in codes:
                wrong[path] = answer
        return wrong

    assert await asyncio.to_thread(wrong_answers) == {}
    assert scripted.requests == []


async def test_another_spelling_of_a_served_path_reaches_the_engine_as_the_path_itself(
    scripted: ScriptedEngine, scripted_router: RouterProcess
) -> None:
    """Percent-encoding is undone once, by the router: what the engine is asked for is always one of the listed paths."""
    for path in ("/v1/chat%2Fcompletions", "/v1/ch%61t/completions", "/%761/chat/completions", f"{CHAT}?a=/pause", f"{CHAT}?"):
        request = raw.request("POST", path, {"content-type": "application/json"}, b'{"model": "scripted"}')
        answer = await asyncio.to_thread(raw.exchange, scripted_router.url, request)
        assert answer.status in (200, 404)
    assert {request.line for request in scripted.requests} == {"POST /v1/chat/completions HTTP/1.1"}


TARGETS = {
    "absolute form": f"http://router{CHAT}",
    "absolute form of another host": f"http://evil.example:99{CHAT}",
    "query": f"{CHAT}?api-version=2024-10-21",
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_other_forms_of_a_known_target_are_served_or_refused_but_never_misread(service: Service, target: str) -> None:
    """A query changes nothing (Azure's clients send one); the absolute form is what proxies are sent."""
    answer = raw.exchange(service.router.url, raw.request("POST", target, JSON_HEADERS, json.dumps(PLAIN).encode()))
    assert answer.status in ((200,) if "?" in target else (200, 400, 404))
    if answer.status == 200:
        strict.check(ChatCompletion, answer.body)


HOSTS = [
    "x/?",
    "x/health?",
    "x/v1/chat/completions?",
    "x#",
    "x\\",
    "user@x",
    "x:99999",
    "[::1",
    "",
    "a" * 5000,
    "127.0.0.1:1",
    "x y",
]


@pytest.mark.parametrize("host", HOSTS)
def test_the_host_header_decides_nothing(service: Service, host: str) -> None:
    """Frameworks that build the URL from it can be led past their own checks: past the key, or to another path."""
    for path, headers, wanted in (
        ("/pause", AUTHORIZED, 404),
        ("/v1/models", {}, 401),
        ("/v1/models", AUTHORIZED, 200),
        (CHAT, {}, 405),
    ):
        answer = raw.exchange(service.router.url, raw.request("GET", path, {**headers, "host": host}))
        assert answer.status in (wanted, 400), (path, answer)
        assert answer.header("location") is None
    asked = raw.request("POST", CHAT, {**JSON_HEADERS, "host": host}, json.dumps(PLAIN).encode())
    assert raw.exchange(service.router.url, asked).status in (200, 400)


@pytest.mark.parametrize("lines", [b"", b"host: a\r\nhost: b\r\n"], ids=["no Host", "two Hosts"])
def test_a_request_without_one_host_is_refused_or_served_as_it_is(service: Service, lines: bytes) -> None:
    """HTTP/1.1 wants one Host; nothing here depends on it, so nothing breaks without."""
    answer = raw.exchange(service.router.url, b"GET /health HTTP/1.1\r\n" + lines + b"\r\n")
    assert answer.status in (200, 400)


@pytest.mark.parametrize("spelling", [MODEL, MODEL.replace("/", "%2F"), MODEL.replace("/", "%2f")])
def test_t06_b38_a_models_id_may_hold_a_slash(service: Service, spelling: str) -> None:
    """`client.models.retrieve("org/name")` works however the client writes the slash."""
    answer = raw.exchange(service.router.url, raw.request("GET", f"/v1/models/{spelling}", AUTHORIZED))
    assert answer.status == 200
    card = strict.check(Model, answer.body)
    assert (card.id, card.model_extra) in ((MODEL, {"max_model_len": MODEL_LEN}), (MODEL, {}))


UNKNOWN_IDS = [
    "org%252Fsim",
    "org",
    "org/sim/",
    "org//sim",
    "ORG/SIM",
    "%20",
    "%00",
    "x%0d%0aset-cookie:%20a=b",
    "..",
    "%C3%A4",
    "%ff",
]


@pytest.mark.parametrize("spelling", UNKNOWN_IDS)
def test_t06_b38_an_unknown_id_is_a_json_404(service: Service, spelling: str) -> None:
    """Whatever stands in it stays in the JSON of the message."""
    answer = raw.exchange(service.router.url, raw.request("GET", f"/v1/models/{spelling}", AUTHORIZED))
    assert (answer.status, answer.header("set-cookie")) == (404, None)
    assert (answer.error["code"], answer.error["param"]) in (("model_not_found", "model"), ("unknown_url", None))


def test_b38_openais_client_lists_and_finds_models(client: openai.OpenAI) -> None:
    """Both models of three replicas, once each."""
    assert [card.id for card in client.models.list()] == [MODEL, THINKER]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no/such")


def test_b39_no_answer_names_a_folder(service: Service, http: httpx.Client) -> None:
    """vLLM's own list of models shows where the weights lie; this one does not."""
    answers = [
        http.get("/v1/models"),
        http.get(f"/v1/models/{THINKER}"),
        http.post(CHAT, json={**PLAIN, "model": THINKER}),
        http.post(CHAT, json={**PLAIN, "model": "unknown"}),
        http.post(CHAT, json={**PLAIN, "model": THINKER, "temperature": 9}),
        http.get("/ready"),
    ]
    for answer in answers:
        assert "/tmp" not in answer.text
        assert '"root"' not in answer.text


def test_b40_a_browsers_page_may_read_every_answer(service: Service, http: httpx.Client) -> None:
    """The allowed origin is named on success, streams and all errors; others get nothing."""

    def answers(origin: str) -> list[httpx.Response]:
        headers = {"origin": origin}
        service.fault_everywhere(kind="status", status=500, times=1)
        broken = [http.post(CHAT, json=PLAIN, headers=headers) for _ in range(3)]
        service.clear_faults()
        service.fault_everywhere(kind="status", status=429)
        busy = http.post(CHAT, json=PLAIN, headers=headers)
        service.clear_faults()
        return [
            *broken,
            busy,
            http.post(CHAT, json=PLAIN, headers=headers),
            http.post(CHAT, json={**PLAIN, "stream": True}, headers=headers),
            http.get("/v1/models", headers=headers),
            http.get("/v1/models", headers={**headers, "authorization": "Bearer no"}),
            http.get("/nowhere", headers=headers),
            http.put(CHAT, headers=headers),
            http.post(CHAT, content=b"{", headers=headers),
        ]

    ours = answers(ORIGIN)
    assert {429, 200, 401, 404, 405, 400} <= {answer.status_code for answer in ours}
    for answer in ours:
        assert answer.headers["access-control-allow-origin"] == ORIGIN, answer
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    for answer in answers("https://evil.example"):
        assert "access-control-allow-origin" not in answer.headers


def test_the_openapi_document_lists_what_is_served(http: httpx.Client) -> None:
    """Tools can be generated from it, and it promises nothing that is answered 404."""
    document: dict[str, Any] = strict.load(http.get("/openapi.json").content)
    assert document["openapi"].startswith("3.")
    served = """
    /v1/chat/completions /v1/completions /v1/responses /v1/responses/{id} /v1/responses/{id}/cancel /v1/embeddings /v1/messages
    /v1/messages/count_tokens /tokenize /detokenize /v1/models /health /ready
    """
    unnamed = {"/".join("{id}" if part.startswith("{") else part for part in path.split("/")) for path in document["paths"]}
    assert unnamed - {"/v1/models/{id}", "/openapi.json"} == set(served.split())


def test_keys_guard_everything_but_the_probes(service: Service) -> None:
    """The list of models and the tokenizer are behind the key too; the probes and the description are not secrets."""
    with httpx.Client(base_url=service.router.url) as nobody:
        for path in ("/v1/models", f"/v1/models/{MODEL}", "/v1/responses/resp_1"):
            check_failure(nobody.get(path), 401)
        for path in (CHAT, "/tokenize", "/detokenize", "/v1/responses/resp_1/cancel"):
            check_failure(nobody.post(path, json={"model": MODEL}), 401)
        assert [nobody.get(path).status_code for path in ("/health", "/ready")] == [200, 200]
        # Two keys at once, or one in the URL, are none.
        assert nobody.get(f"/v1/models?api_key={KEY}").status_code == 401
