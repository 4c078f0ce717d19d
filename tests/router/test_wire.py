"""What a client gets from the router, byte by byte, whatever the engine does."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from protocol.sse import DONE
from tests.router.process import RouterProcess, start_router
from tests.scripted_engine import (
    LAST_CHUNK,
    MODEL,
    SSE_HEAD,
    ScriptedEngine,
    ScriptedRequest,
    chunked,
    json_answer,
    scripted_engine,
)
from tests.waiting import await_until

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


async def unset(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
    raise AssertionError("the test set no script")


@pytest.fixture(scope="module")
def running() -> Iterator[RouterProcess]:
    """One router for all tests of this file; each test adds its own engine."""
    with start_router((), "--cors-origin", "https://app.example") as router:
        yield router


@pytest.fixture
async def engine(running: RouterProcess) -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine(unset) as engine, httpx.AsyncClient(base_url=running.admin) as admin:
        added = (await admin.post("/admin/replicas", json={"url": engine.url})).json()
        await await_until(lambda: is_ready(admin), 5, "the scripted engine to be ready")
        yield engine
        await admin.delete(f"/admin/replicas/{added['id']}")
        assert await in_flight(admin) == 0, "every lease is settled"


async def is_ready(admin: httpx.AsyncClient) -> bool:
    return [replica["health"] for replica in (await admin.get("/admin/replicas")).json()] == ["ready"]


async def in_flight(admin: httpx.AsyncClient) -> int:
    return sum(replica["in_flight"] for replica in (await admin.get("/admin/replicas")).json())


@pytest.fixture
async def client(running: RouterProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url, timeout=10) as client:
        yield client


async def receive_until_broken(client: httpx.AsyncClient) -> bytes:
    """What a streaming client has got when its connection breaks off; fails if it ends cleanly."""
    received = bytearray()

    async def receive() -> None:
        async with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            async for part in response.aiter_raw():
                received.extend(part)

    with pytest.raises(httpx.RemoteProtocolError):
        await receive()
    return bytes(received)


def event(content: str) -> bytes:
    return f"data: {json.dumps({'model': MODEL, 'choices': [{'delta': {'content': content}}]})}\n\n".encode()


async def test_a_stream_is_relayed_byte_for_byte_even_when_it_comes_a_byte_at_a_time(
    engine: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    """Emoji and accents split over packets arrive whole."""
    stream = b": comment\n\n" + event("na\u00efve \U0001f469\u200d\U0001f680") + event("\u4f60\u597d") + DONE

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        for byte in stream:
            writer.write(chunked(bytes([byte])))
            await writer.drain()
        writer.write(LAST_CHUNK)

    engine.script = script
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert response.status_code == 200
    assert response.content == stream
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


async def test_each_event_is_handed_on_as_it_comes(engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
    """Tokens appear while the model still writes: the engine sends the second only after the client has the first."""
    second_wanted = asyncio.Event()

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunked(event("one")))
        await second_wanted.wait()
        writer.write(chunked(event("two"), DONE) + LAST_CHUNK)

    engine.script = script
    async with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        parts = response.aiter_raw()
        assert await anext(parts) == event("one")
        second_wanted.set()
        assert b"".join([part async for part in parts]) == event("two") + DONE


async def test_the_body_reaches_the_engine_unchanged_and_the_clients_secrets_do_not(
    engine: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    """What the client asks is what the engine reads; its key, cookies and engine-steering headers stay behind."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({"model": MODEL}))

    engine.script = script
    body = b'{ "model":"scripted",  "messages":[],\n "extra": 1.0e2, "n":1}'
    sent = {
        "authorization": "Bearer secret",
        "cookie": "c=1",
        "x-request-id": "mine-1",
        "x-data-parallel-rank": "3",
        "x-intellect-engine-token": "x",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    response = await client.post("/v1/completions", content=body, headers=sent)
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "mine-1"
    assert float(response.headers["openai-processing-ms"]) >= 0
    (request,) = engine.requests
    assert request.line == "POST /v1/completions HTTP/1.1"
    assert request.body == body
    assert set(request.headers) == {"content-type", "content-length", "x-request-id", "traceparent", "host"}
    assert request.headers["traceparent"] == sent["traceparent"]
    assert request.headers["x-request-id"] != "mine-1", "an engine takes two requests with one id for the same"


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (
            400,
            {"error": {"message": "bad n", "type": "BadRequestError", "param": "body.n", "code": 400}},
            {"message": "bad n", "type": "invalid_request_error", "param": "n", "code": None},
        ),
        (
            400,
            {"error": {"message": "This model's maximum context length is 10 tokens.", "type": "BadRequestError", "code": 400}},
            {
                "message": "This model's maximum context length is 10 tokens.",
                "type": "invalid_request_error",
                "param": None,
                "code": "context_length_exceeded",
            },
        ),
        (404, {"detail": "Not Found"}, {"message": "Not Found", "type": "invalid_request_error", "param": None, "code": None}),
        (429, {"error": {"message": "slow"}}, {"message": "slow", "type": "rate_limit_error", "param": None, "code": None}),
        (503, {"error": {"message": "full"}}, {"message": "full", "type": "server_error", "param": None, "code": None}),
        (500, "boom", {"message": "The engine answered with status 500.", "type": "server_error", "param": None, "code": None}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engines_error_keeps_its_status_and_gets_openais_shape(
    engine: ScriptedEngine, client: httpx.AsyncClient, status: int, body: object, expected: object, stream: bool
) -> None:
    """An error is an HTTP error, never a stream that starts well, and every client library can read it."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer(body, f"{status} X"))

    engine.script = script
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert response.status_code == status
    assert response.json() == {"error": expected}
    assert ("retry-after" in response.headers) is (status in (429, 503))


@pytest.mark.parametrize("status", [401, 403])
async def test_an_engine_that_refuses_the_routers_key_is_not_the_clients_fault(
    engine: ScriptedEngine, client: httpx.AsyncClient, status: int
) -> None:
    """A client whose key is right is never told that it is wrong."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({"error": "Unauthorized"}, f"{status} X"))

    engine.script = script
    response = await client.post("/v1/chat/completions", json=CHAT)
    assert (response.status_code, response.json()["error"]["code"]) == (502, "upstream_error")


async def test_a_path_without_its_v1_is_pointed_at(client: httpx.AsyncClient) -> None:
    """A base URL that lacks /v1, the commonest mistake, is recognised."""
    response = await client.post("/chat/completions", json=CHAT)
    assert response.status_code == 404
    assert "did you mean /v1/chat/completions?" in response.json()["error"]["message"]


async def test_the_engines_retry_after_is_kept_within_what_clients_obey(
    engine: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    """OpenAI's clients give up when told to wait for minutes."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({}, "429 X", extra="retry-after: 300\r\n"))

    engine.script = script
    assert (await client.post("/v1/chat/completions", json=CHAT)).headers["retry-after"] == "60"


@pytest.mark.parametrize("clean_end", [False, True], ids=["engine died", "no [DONE]"])
async def test_a_stream_cut_by_the_engine_ends_in_an_error_event_and_a_broken_connection(
    engine: ScriptedEngine, client: httpx.AsyncClient, clean_end: bool
) -> None:
    """A half answer is never taken for a whole one."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunked(event("half")) + (LAST_CHUNK if clean_end else b""))
        if not clean_end:
            writer.close()

    engine.script = script
    received = await receive_until_broken(client)
    first, error = received.rstrip().split(b"\n\n")
    assert first + b"\n\n" == event("half")
    assert json.loads(error.removeprefix(b"data: "))["error"]["type"] == "server_error"
    assert b"[DONE]" not in received


async def test_a_short_json_answer_cut_by_the_engine_is_a_502(engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
    """Nothing of it was sent yet, so the client gets an error that its library retries, not half a JSON."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()

    engine.script = script
    response = await client.post("/v1/chat/completions", json=CHAT)
    assert (response.status_code, response.json()["error"]["code"]) == (502, "upstream_error")


@pytest.mark.parametrize("cut", [False, True])
async def test_a_long_json_answer_is_passed_on_as_it_comes_and_breaks_if_it_is_cut(
    engine: ScriptedEngine, client: httpx.AsyncClient, cut: bool
) -> None:
    """An answer too long to be held is whole or a connection error, never a parse error that looks like the model's fault."""
    body = json.dumps({"text": "x" * 3_000_000}).encode()

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        writer.write(head + (body[:-100] if cut else body))
        await writer.drain()
        if cut:
            writer.close()

    engine.script = script
    if cut:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/chat/completions", json=CHAT)
    else:
        assert (await client.post("/v1/chat/completions", json=CHAT)).content == body


ABORTED = b'data: {"choices":[{"delta":{},"finish_reason":"abort"}]}\n\n'
FAILED = b'data: {"error":{"message":"out of memory","type":"InternalServerError","code":500}}\n\n'


@pytest.mark.parametrize(("failure", "message"), [(ABORTED, "incomplete"), (FAILED, "out of memory")])
async def test_a_stream_that_the_engine_gave_up_does_not_end_as_if_it_were_whole(
    engine: ScriptedEngine, client: httpx.AsyncClient, failure: bytes, message: str
) -> None:
    """vLLM writes [DONE] behind its own error; the client gets the error in OpenAI's shape and a broken connection."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunked(event("half") + failure, DONE) + LAST_CHUNK)

    engine.script = script
    received = await receive_until_broken(client)
    half, error = received.rstrip().split(b"\n\n")
    assert half + b"\n\n" == event("half")
    detail = json.loads(error.removeprefix(b"data: "))["error"]
    assert message in detail["message"]
    assert (detail["type"], detail["param"]) == ("server_error", None)
    assert not isinstance(detail["code"], int)


async def test_a_whole_answer_that_the_engine_gave_up_is_an_error(engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
    """Text cut off by an engine's shutdown is not a 200."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({"choices": [{"message": {"content": "half"}, "finish_reason": "abort"}]}))

    engine.script = script
    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 502


async def test_a_stream_cut_behind_its_done_is_whole(engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
    """An engine that dies right after [DONE] has answered."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunked(event("all"), DONE))
        await writer.drain()
        writer.close()

    engine.script = script
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert response.content == event("all") + DONE


@pytest.mark.parametrize(
    "surplus", [b"HTTP/1.1 200 OK\r\nx-intellect-checkpoint: EVIL\r\ncontent-length: 4\r\n\r\nevil", b"junk"]
)
async def test_what_an_engine_sends_behind_its_answer_reaches_nobody(
    engine: ScriptedEngine, client: httpx.AsyncClient, surplus: bytes
) -> None:
    """One request's answer never holds bytes of another."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({"n": len(engine.requests)}) + surplus)

    engine.script = script
    for number in (1, 2):
        response = await client.post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.json()) == (200, {"n": number})
        assert "EVIL" not in response.headers.values()


@pytest.mark.parametrize("line", ["999 X", "101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade"])
async def test_a_status_that_no_answer_can_have_is_a_502(engine: ScriptedEngine, client: httpx.AsyncClient, line: str) -> None:
    """Nonsense from an engine is an error, not an empty connection."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({}, line))

    engine.script = script
    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 502


@pytest.mark.parametrize("kilobytes", [60, 100, 1000, 30_000])
async def test_a_long_prompt_passes(engine: ScriptedEngine, client: httpx.AsyncClient, kilobytes: int) -> None:
    """Bodies up to the limit reach the engine whole, one after the other on one connection."""

    async def script(request: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({"received": len(request.body)}))

    engine.script = script
    body = json.dumps({"model": MODEL, "prompt": "x" * kilobytes * 1000}).encode()
    for _ in range(2):
        response = await client.post("/v1/completions", content=body)
        assert (response.status_code, response.json()) == (200, {"received": len(body)})


async def test_a_body_above_the_limit_is_a_413(engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
    """It is refused by its announced length, or, if it announces none, when it grows too long."""
    too_long = 33 * 1024 * 1024

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(too_long // 65536):
            yield b"x" * 65536

    for content in (b"x" * too_long, endless()):
        response = await client.post("/v1/completions", content=content)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    assert engine.requests == []


async def raw(router: RouterProcess, request: bytes, *, then: bytes = b"") -> bytes:
    """Everything that the router answers to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rsplit(":", 1)[1]))
    try:
        writer.write(request)
        if then:
            await writer.drain()
            writer.write(then)
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


async def test_endless_headers_are_cut(engine: ScriptedEngine, running: RouterProcess) -> None:
    """Nobody fills the router's memory with a request that never begins."""
    for flood in (b"x-a: " + b"a" * 200_000, b"x-a: b\r\n" * 30_000):
        try:
            answer = await raw(running, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", then=flood)
        except ConnectionResetError:
            continue  # cut while it still sent: the answer is lost on the way, as TCP has it
        assert answer.startswith(b"HTTP/1.1 431"), answer[:100]
        assert b'"type":"invalid_request_error"' in answer
    assert (await raw(running, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_what_is_not_http_gets_an_error_in_openais_shape(running: RouterProcess) -> None:
    """Even then a client finds the error where it looks for it."""
    answer = await raw(running, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}")
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


async def test_a_client_that_offers_http2_is_served(engine: ScriptedEngine, running: RouterProcess) -> None:
    """Java's default client sends such an offer with its first request."""

    async def script(request: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({"body": request.body.decode()}))

    engine.script = script
    body = json.dumps(CHAT).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\ncontent-length: %d\r\n"
        b"host: x\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rsplit(":", 1)[1]))
    writer.write(head % len(body) + body)
    answer = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert json.loads(engine.requests[-1].body) == CHAT


async def test_a_replica_that_dies_before_its_first_byte_is_a_502(
    engine: ScriptedEngine, client: httpx.AsyncClient, running: RouterProcess
) -> None:
    """With no other replica to ask the client gets a clear error that its library retries."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    engine.script = script
    response = await client.post("/v1/chat/completions", json=CHAT)
    assert (response.status_code, response.json()["error"]["code"]) == (502, "upstream_error")
    assert "127.0.0.1" not in response.text, "where engines live is nobody's business"


@pytest.mark.parametrize("sent_first", [False, True], ids=["before the first byte", "mid-stream"])
async def test_a_client_that_leaves_frees_the_engine(
    engine: ScriptedEngine, client: httpx.AsyncClient, running: RouterProcess, sent_first: bool
) -> None:
    """Closing a tab stops the work it asked for within a second, and is counted as the client's doing."""
    gone_before = running.metric("intellect_router_requests_total", outcome="client_gone")

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        if sent_first:
            writer.write(SSE_HEAD + chunked(event("one")))
        await asyncio.Event().wait()

    engine.script = script
    asking = asyncio.create_task(client.post("/v1/chat/completions", json={**CHAT, "stream": sent_first}))
    await await_until(lambda: engine.open_requests == 1, 5, "the engine to get the request")
    asking.cancel()
    await await_until(lambda: engine.open_requests == 0, 1, "the engine to be told")
    await await_until(
        lambda: running.metric("intellect_router_requests_total", outcome="client_gone") == gone_before + 1, 2, "the count"
    )


@pytest.mark.parametrize(
    ("content", "param", "part_of_message"),
    [
        (b"", None, "could not parse"),
        (b"{", None, "could not parse"),
        (b"[]", None, "must be a JSON object"),
        (b"null", None, "must be a JSON object"),
        (b'"x"', None, "must be a JSON object"),
        (b'{"model": 7}', "model", "'model'"),
        (b'{"messages": []}', "model", "must provide a 'model'"),
        (b'{"model": "scripted", "a": ' + b"[" * 100_000, None, "nested too deeply"),
        (b"\xff\xfe{}", None, "could not parse"),
        (b'{"model": "scripted", "temperature": NaN}', None, "could not parse"),
    ],
)
async def test_a_body_that_is_no_request_is_a_400_that_names_the_fault(
    engine: ScriptedEngine, client: httpx.AsyncClient, content: bytes, param: str | None, part_of_message: str
) -> None:
    """A wrong body is explained and never reaches an engine."""
    response = await client.post("/v1/chat/completions", content=content)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert part_of_message in error["message"]
    assert engine.requests == []


async def test_an_unknown_model_is_a_404_that_says_how_to_list_them(engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
    """A typing error in the model's name is recognised as one by client libraries."""
    response = await client.post("/v1/chat/completions", json={**CHAT, "model": "gpt-4"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "/v1/models" in response.json()["error"]["message"]


async def test_unknown_codings_are_refused_with_what_is_accepted(engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
    """A body that the engine could not read is not sent to it."""
    response = await client.post("/v1/chat/completions", content=b"{}", headers={"content-encoding": "br"})
    assert (response.status_code, response.headers["accept-encoding"]) == (415, "gzip")


@pytest.mark.parametrize(
    "path",
    ["/", "/pause", "//pause", "/%70ause", "/v1/../pause", "/v1/%2e%2e/pause", "/collective_rpc", "/metrics", "/admin/replicas",
     "/v1/chat/completions/", "/v1/chat/completions/render", "/v1/load_lora_adapter", "/docs",
     "/v1/responses/a/b", "/v1/responses/../pause"],
)  # fmt: skip
async def test_a_path_that_is_not_served_never_reaches_an_engine(
    engine: ScriptedEngine, running: RouterProcess, path: str
) -> None:
    """Engine-internal routes cannot be reached through the router, however the path is spelt."""
    port = int(running.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{{}}".encode())
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 404"), answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "unknown_url"
    assert engine.requests == []


async def test_a_wrong_method_is_a_405_with_allow(engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
    """A client that mixes up GET and POST is told."""
    assert (await client.get("/v1/chat/completions")).headers["allow"] == "POST"
    assert (await client.request("FOO", "/v1/models")).status_code in (400, 405)


async def test_models_are_listed_and_found_by_name(engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
    """`client.models.list()` and `.retrieve()` work although engines lack the second."""
    assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == [MODEL]
    assert (await client.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
    missing = await client.get("/v1/models/org/name")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    head = await client.head("/v1/models")
    assert (head.status_code, head.content) == (200, b"")


async def test_pages_of_an_allowed_origin_may_read_every_answer(engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
    """A browser application sees errors too, and other pages see nothing."""
    ours, other = {"origin": "https://app.example"}, {"origin": "https://evil.example"}
    preflight = await client.options(
        "/v1/chat/completions",
        headers={**ours, "access-control-request-method": "POST", "access-control-request-headers": "authorization"},
    )
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    for response in (
        await client.post("/v1/chat/completions", content=b"{", headers=ours),
        await client.get("/v1/models", headers=ours),
        await client.get("/nowhere", headers=ours),
    ):
        assert response.headers["access-control-allow-origin"] == ours["origin"]
    assert "access-control-allow-origin" not in (await client.get("/v1/models", headers=other)).headers


async def test_two_requests_with_the_same_id_are_two_requests(engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
    """A client library that repeats its request id gets both answers."""
    both = asyncio.Event()

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        if len(engine.requests) == 2:
            both.set()
        await both.wait()
        writer.write(json_answer({"model": MODEL}))

    engine.script = script
    headers = {"x-request-id": "same"}
    answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=CHAT, headers=headers) for _ in range(2)))
    assert [answer.headers["x-request-id"] for answer in answers] == ["same", "same"]
    assert len({request.headers["x-request-id"] for request in engine.requests}) == 2


async def test_a_request_id_that_could_break_a_log_is_replaced(engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
    """Only short, harmless ids are echoed."""
    for bad in ("a" * 129, "a b", "a;b", ""):
        response = await client.get("/v1/models", headers={"x-request-id": bad})
        assert response.headers["x-request-id"].startswith("req_")


async def test_an_engine_that_does_not_end_its_message_holds_up_nobody(engine: ScriptedEngine, running: RouterProcess) -> None:
    """A stream is over at its [DONE]: the next request is answered on the same connection, and the lease is given back."""

    async def script(request: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        if b'"stream"' in request.body:
            writer.write(SSE_HEAD + chunked(event("one"), DONE))
            await asyncio.Event().wait()
        writer.write(json_answer({"model": MODEL}))

    engine.script = script
    async with httpx.AsyncClient(base_url=running.url, timeout=10) as client:
        streamed = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert streamed.content == event("one") + DONE
        whole = await client.post("/v1/chat/completions", json=CHAT)
        assert whole.json() == {"model": MODEL}
    async with httpx.AsyncClient(base_url=running.admin) as admin:

        async def is_settled() -> bool:
            return await in_flight(admin) == 0

        await await_until(is_settled, 5, "the lease to be given back")


async def test_an_old_client_can_tell_a_cut_answer_from_a_whole_one(engine: ScriptedEngine, running: RouterProcess) -> None:
    """For HTTP/1.0 the end of the connection is the end of an answer, so one that is cut is reset."""
    has_taken_it = asyncio.Event()

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(chunked(b'{"text": "' + b"x" * 2_000_000))
        await writer.drain()
        await has_taken_it.wait()  # so that nothing is left to send when it breaks
        writer.close()

    engine.script = script
    reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rsplit(":", 1)[1]))
    body = json.dumps(CHAT).encode()
    head = f"POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(2_000_000)
    has_taken_it.set()
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()
