"""What of a request reaches the engine, and what of its answer reaches the client."""

import asyncio
import gzip
import json

import httpx
import pytest

from tests.conformance import raw
from tests.conformance.replies import CHAT
from tests.conformance.service import logged
from tests.router.process import RouterProcess
from tests.scripted_engine import LAST_CHUNK, SSE_HEAD, ScriptedEngine, ScriptedRequest, chunked, json_answer

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CLIENTS_HEADERS = {
    "authorization": "Bearer sk-secret",
    "x-api-key": "sk-secret",
    "proxy-authorization": "Basic c2VjcmV0",
    "cookie": "session=secret",
    "forwarded": "for=1.2.3.4",
    "x-forwarded-for": "1.2.3.4",
    "x-forwarded-host": "evil",
    "x-real-ip": "1.2.3.4",
    "x-data-parallel-rank": "3",
    "x-vllm-priority": "-100",
    "x-session-id": "other",
    "x-intellect-engine-token": "guess",
    "endpoint-load-metrics-format": "json",
    "openai-organization": "org",
    "openai-project": "p",
    "x-stainless-retry-count": "1",
    "x-client-request-id": "c",
    "idempotency-key": "k",
    "accept-encoding": "gzip",
    "te": "trailers",
    "connection": "x-secret, keep-alive",
    "x-secret": "1",
    "keep-alive": "timeout=99",
    "trailer": "x",
    "upgrade": "h2c",
    "user-agent": "spy",
    "referer": "http://x",
    "x-http-method-override": "DELETE",
    "x-original-url": "/pause",
    "traceparent": TRACE,
    "tracestate": "a=1",
}
BODY = b'{"model":"scripted","messages":[]}'
ALLOWED = {"host", "content-type", "content-length", "x-request-id", "traceparent", "tracestate"}


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
async def test_only_the_routers_own_headers_reach_the_engine(
    scripted: ScriptedEngine, scripted_router: RouterProcess, stream: bool
) -> None:
    """Keys, cookies, addresses and everything that steers an engine stay behind; the trace goes on."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        end = chunked(b'data: {"choices":[{}]}\n\n', b"data: [DONE]\n\n") + LAST_CHUNK
        writer.write(SSE_HEAD + end if stream else json_answer({}))

    scripted.script = script
    body = b'{"stream":true,' + BODY[1:] if stream else BODY
    data = raw.request("POST", CHAT, {"content-type": "application/json", **CLIENTS_HEADERS}, body)
    answer = await asyncio.to_thread(raw.exchange, scripted_router.url, data)
    assert answer.status == 200
    (request,) = scripted.requests
    assert request.headers.keys() <= ALLOWED
    assert (request.headers["traceparent"], request.headers["tracestate"]) == (TRACE, "a=1")
    assert request.headers["host"] == scripted.url.removeprefix("http://")
    assert request.headers["content-type"] == "application/json"


async def test_b33_a_body_is_framed_anew(scripted: ScriptedEngine, scripted_router: RouterProcess) -> None:
    """Chunks, compression and the client's lengths end at the router: the engine gets plain bytes and their right length."""
    chunks = b"".join(b"%x\r\n%b\r\n" % (1, BODY[at : at + 1]) for at in range(len(BODY))) + b"0\r\n\r\n"
    plain = {"content-type": "application/json"}
    packed = gzip.compress(BODY)
    for data in (
        raw.request("POST", CHAT, {**plain, "transfer-encoding": "chunked"}) + chunks,
        raw.request("POST", CHAT, {**plain, "content-encoding": "gzip"}, packed),
        raw.request("POST", CHAT, {**plain, "content-encoding": "gzip", "transfer-encoding": "chunked"})
        + chunked(packed)
        + b"0\r\n\r\n",
        raw.request(
            "POST", CHAT, {"content-type": "application/json; charset=utf-8", "content-length": f"{len(BODY):05}"}, BODY
        ),
    ):
        answer = await asyncio.to_thread(raw.exchange, scripted_router.url, data)
        assert answer.status == 200, answer
        request = scripted.requests[-1]
        assert request.body == BODY
        assert request.headers["content-length"] == str(len(BODY))
        assert request.headers.keys() <= ALLOWED
    assert len(scripted.requests) == 4


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
async def test_the_engines_headers_stay_behind(
    scripted: ScriptedEngine, scripted_http: httpx.AsyncClient, stream: bool
) -> None:
    """Its cookies, its server's name and its wishes for caches and browsers are not the client's business."""
    extra = (
        "server: uvicorn\r\nset-cookie: a=1\r\naccess-control-allow-origin: *\r\nx-request-id: engines-own\r\n"
        "x-engine: 1\r\nconnection: x-engine\r\nlocation: /pause\r\nkeep-alive: timeout=1\r\nx-intellect-checkpoint: v7+2\r\n"
    )

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        if stream:
            head = SSE_HEAD.replace(b"\r\n\r\n", b"\r\n" + extra.encode() + b"\r\n")
            writer.write(head + chunked(b'data: {"choices":[{}]}\n\n', b"data: [DONE]\n\n") + LAST_CHUNK)
        else:
            writer.write(json_answer({"model": "scripted"}, extra=extra))

    scripted.script = script
    response = await scripted_http.post(CHAT, json={**json.loads(BODY), "stream": stream}, headers={"x-request-id": "mine"})
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["x-intellect-checkpoint"] == "v7+2"
    names = {name for name, _ in response.headers.multi_items()}
    assert names <= {
        *("content-type", "content-length", "transfer-encoding", "date", "x-request-id", "openai-processing-ms"),
        *("x-intellect-checkpoint", "cache-control", "x-accel-buffering", "connection", "vary"),
    }


async def test_b42_two_requests_with_one_id_are_two_requests(
    scripted: ScriptedEngine, scripted_http: httpx.AsyncClient
) -> None:
    """The engine, which takes equal ids for one request, gets different ones; the client gets its own back."""
    both = asyncio.Event()

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        if len(scripted.requests) == 2:
            both.set()
        await both.wait()
        writer.write(json_answer({"model": "scripted"}))

    scripted.script = script
    headers = {"x-request-id": "same-id", "content-type": "application/json"}
    answers = await asyncio.gather(*(scripted_http.post(CHAT, content=BODY, headers=headers) for _ in range(2)))
    assert [(answer.status_code, answer.headers["x-request-id"]) for answer in answers] == [(200, "same-id")] * 2
    ids = {request.headers["x-request-id"] for request in scripted.requests}
    assert len(ids) == 2
    assert "same-id" not in ids


async def test_nothing_of_a_prompt_or_a_key_is_logged_or_counted(
    scripted: ScriptedEngine, scripted_http: httpx.AsyncClient, scripted_router: RouterProcess
) -> None:
    """Neither from a good request nor from a bad one."""
    prompt, key = "canary-prompt-7391", "sk-canary-7391"
    headers = {"authorization": f"Bearer {key}", "x-api-key": key}
    body = {"model": "scripted", "messages": [{"role": "user", "content": prompt}], "user": prompt}
    for changes in ({}, {"n": 1000}, {"model": "nope"}, {"functions": [prompt]}):
        await scripted_http.post(CHAT, json=body | changes, headers=headers)
    await scripted_http.post(CHAT, content=json.dumps(body).encode()[:-1], headers=headers)
    await scripted_http.get(f"/{prompt}?key={key}", headers=headers)
    last = await scripted_http.get(f"/v1/models/{prompt}", headers={**headers, "x-request-id": "canary-done"})
    assert last.status_code == 404
    await asyncio.to_thread(logged, scripted_router, "canary-done")
    async with httpx.AsyncClient() as admin:
        metrics = (await admin.get(f"{scripted_router.admin}/metrics")).text
    for text in (scripted_router.log, metrics):
        assert prompt not in text
        assert key not in text
