"""The guard inside the engine: which paths need the token, and which label answers carry."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from server.guard import (
    CHECKPOINT_VARIABLE,
    GENERATING_PATHS,
    OTHER_OPEN_PATHS,
    RELABEL_PATH,
    TOKEN_VARIABLE,
    EngineGuard,
    Message,
    Receive,
    Send,
)
from tests.waiting import await_until

TOKEN = "s3cret-engine-token"
ENVIRON = {TOKEN_VARIABLE: TOKEN}
Scope = MutableMapping[str, Any]


class Engine:
    """An application that answers every path with 200, or as `answer` says, and remembers what reached it."""

    def __init__(self, *, status: int = 200, chunks: tuple[bytes, ...] = (b"tok",)) -> None:
        self.status, self.chunks = status, chunks
        self.reached: list[str] = []
        self.bodies: list[bytes] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.started = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.reached.append(scope.get("path", scope["type"]))
        if scope["type"] != "http":
            return
        if scope["method"] == "POST":
            self.bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"x-own", b"1")]})
        self.started.set()
        await self.go_on.wait()
        for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Answer:
    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        status: int = self.messages[0]["status"]
        return status

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def label(self) -> str | None:
        return dict(self.messages[0]["headers"]).get(b"x-intellect-checkpoint", b"").decode() or None


async def call(
    guard: EngineGuard, path: str, *, method: str = "POST", tokens: tuple[str, ...] = (), body: tuple[bytes, ...] = (b"{}",)
) -> Answer:
    headers = [(b"x-intellect-engine-token", token.encode()) for token in tokens]
    chunks: Iterator[bytes] = iter(body)
    left = len(body)

    async def receive() -> Message:
        nonlocal left
        left -= 1
        if left < 0:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": next(chunks), "more_body": left > 0}

    answer = Answer()
    await guard({"type": "http", "method": method, "path": path, "headers": headers}, receive, answer.send)
    return answer


@pytest.mark.parametrize(
    "path", sorted(GENERATING_PATHS | OTHER_OPEN_PATHS) + ["/v1/responses/resp_1", "/v1/responses/r/cancel"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_serving_paths_are_open_for_every_method(path: str, method: str) -> None:
    """A client needs no token for the paths that serve; which methods they take is the engine's business."""
    engine = Engine()
    assert (await call(EngineGuard(engine, ENVIRON), path, method=method)).status == 200
    assert engine.reached == [path]


CLOSED = [
    "/pause",
    "//pause",
    "/pause/",
    "/v1/../pause",
    "/v1/chat/completions/../../../pause",
    "/v1/chat/completions/",
    "/v1/models/../../pause",
    "/v1/responses/../../pause",
    "/v1/responses/a/b",
    "/v1/responses/",
    "/v1/responses/a/cancel/",
    "/V1/models",
    "/collective_rpc",
    "/update_weight_version",
    "/server_info",
    "/v1/load_lora_adapter",
    "/invocations",
    "/openapi.json",
    "/docs",
    "/metrics/x",
    "/",
    "",
    "*",
]


@pytest.mark.parametrize("path", CLOSED)
async def test_every_other_path_needs_the_token(path: str) -> None:
    """Whatever is not spelled exactly like a serving path is refused with 403 in OpenAI's shape and not passed on."""
    engine = Engine()
    answer = await call(EngineGuard(engine, ENVIRON), path)
    assert answer.status == 403
    assert json.loads(answer.body)["error"].keys() == {"message", "type", "param", "code"}
    assert engine.reached == []


@given(st.text())
def test_no_text_is_an_open_path_by_accident(path: str) -> None:
    """A path that is not in the list, whatever it is, does not reach the engine."""
    engine = Engine()
    if path not in GENERATING_PATHS | OTHER_OPEN_PATHS:
        assert asyncio.run(call(EngineGuard(engine, ENVIRON), path)).status == 403


@pytest.mark.parametrize(
    ("environ", "tokens", "status"),
    [
        (ENVIRON, (TOKEN,), 200),
        (ENVIRON, (), 403),
        (ENVIRON, ("",), 403),
        (ENVIRON, (TOKEN[:-1],), 403),
        (ENVIRON, (TOKEN + "x",), 403),
        (ENVIRON, (TOKEN, TOKEN), 403),  # a proxy and the engine could each read another one
        (ENVIRON, ("wrong", TOKEN), 403),
        ({}, (), 403),
        ({}, ("",), 403),
        ({}, (TOKEN,), 403),
        ({TOKEN_VARIABLE: ""}, ("",), 403),
    ],
)
async def test_only_the_very_token_opens(environ: dict[str, str], tokens: tuple[str, ...], status: int) -> None:
    """Without a token in the environment nothing opens the development routes, not even an empty header."""
    assert (await call(EngineGuard(Engine(), environ), "/pause", tokens=tokens)).status == status


async def test_websockets_are_closed_before_they_are_accepted() -> None:
    """vLLM's WebSocket routes do not become a way around the guard."""
    engine, sent = Engine(), Answer()

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    await EngineGuard(engine, ENVIRON)({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, sent.send)
    assert [message["type"] for message in sent.messages] == ["websocket.close"]
    assert engine.reached == []


async def test_lifespan_passes() -> None:
    """The engine's own start-up hooks run."""
    engine = Engine()
    guard = EngineGuard(engine, ENVIRON)

    async def never() -> Message:
        raise AssertionError

    await guard({"type": "lifespan"}, never, Answer().send)
    assert engine.reached == ["lifespan"]


@pytest.mark.parametrize("path", sorted(GENERATING_PATHS) + ["/v1/responses/resp_1"])
@pytest.mark.parametrize("status", [200, 400, 500])
async def test_generated_answers_name_their_checkpoint(path: str, status: int) -> None:
    """Every answer of a generating route, an error too, carries the served label beside the engine's own headers."""
    guard = EngineGuard(Engine(status=status), {**ENVIRON, CHECKPOINT_VARIABLE: "v7+3"})
    answer = await call(guard, path)
    assert (answer.status, answer.label, answer.body) == (status, "v7+3", b"tok")
    assert (b"x-own", b"1") in answer.messages[0]["headers"]


@pytest.mark.parametrize("path", sorted(OTHER_OPEN_PATHS))
async def test_other_answers_carry_no_label(path: str) -> None:
    """What does not depend on the weights does not name them."""
    assert (await call(EngineGuard(Engine(), ENVIRON), path)).label is None


async def relabel(guard: EngineGuard, *body: bytes) -> Answer:
    return await call(guard, RELABEL_PATH, tokens=(TOKEN,), body=body)


async def test_the_label_starts_as_base_and_follows_the_engine() -> None:
    """After a swap, answers carry the new label; the engine receives the request as it was sent."""
    engine = Engine()
    guard = EngineGuard(engine, ENVIRON)
    assert (await call(guard, "/v1/completions")).label == "base"
    assert (await relabel(guard, b'{"new_ver', b'sion": "v2+1"}')).status == 200
    assert engine.bodies[-1] == b'{"new_version": "v2+1"}'
    assert (await call(guard, "/v1/completions")).label == "v2+1"


async def test_a_refused_version_changes_no_label() -> None:
    """If the engine does not take the version, answers keep the label of the weights that they come from."""
    engine = Engine(status=500)
    guard = EngineGuard(engine, ENVIRON)
    assert (await relabel(guard, b'{"new_version": "v2+1"}')).status == 500
    assert (await call(guard, "/v1/completions")).label == "base"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"new_version": 3}',
        b'{"new_version": ""}',
        b'{"new_version": "v2\\r\\nset-cookie: x"}',
        b'{"new_version": "v2+"}',
        b'{"new_version": "' + b"v" * 200 + b'"}',
        b'{"new_version": "v2", "pad": "' + b"x" * 5000 + b'"}',
        b"\xff",
    ],
)
async def test_a_label_that_is_no_label_is_refused(body: bytes) -> None:
    """It would end up in a response header, so it is checked before the engine sees it."""
    engine = Engine()
    guard = EngineGuard(engine, ENVIRON)
    assert (await relabel(guard, body)).status == 400
    assert engine.reached == []
    assert (await call(guard, "/v1/completions")).label == "base"


async def test_a_request_that_waited_through_a_swap_is_labelled_with_the_new_weights() -> None:
    """The label is that of the first token's weights, not that of the moment when the request arrived."""
    engine = Engine()
    guard = EngineGuard(engine, ENVIRON)
    engine.go_on.clear()
    waiting = asyncio.create_task(call(guard, "/v1/chat/completions"))
    await engine.started.wait()
    engine.go_on.set()
    assert (await relabel(guard, b'{"new_version": "v2+1"}')).status == 200
    assert (await waiting).label == "v2+1"


async def test_a_stream_keeps_the_label_of_its_first_token() -> None:
    """The label is sent before the first token and a swap in the middle does not hold back or change what follows."""
    engine = Engine()
    first_sent, go_on = asyncio.Event(), asyncio.Event()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == RELABEL_PATH:
            await engine(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        first_sent.set()
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"b"})

    guard = EngineGuard(stream, ENVIRON)
    streaming = asyncio.create_task(call(guard, "/v1/chat/completions"))
    await first_sent.wait()
    await relabel(guard, b'{"new_version": "v2+1"}')
    go_on.set()
    answer = await streaming
    assert (answer.label, answer.body) == ("base", b"ab")


@pytest.mark.parametrize("label", ["", "v2+1"])
def test_a_start_label_that_cannot_be_a_header_stops_the_engine(label: str) -> None:
    """A wrong environment is an error at start, not a broken response later; an empty variable means the default."""
    EngineGuard(Engine(), {CHECKPOINT_VARIABLE: label})
    with pytest.raises(ValueError, match="not a checkpoint label"):
        EngineGuard(Engine(), {CHECKPOINT_VARIABLE: label + "\n"})


@asynccontextmanager
async def served(app: EngineGuard) -> AsyncIterator[int]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await await_until(lambda: server.started, 5, "the server")
    yield listener.getsockname()[1]
    server.should_exit = True
    await task


@pytest.mark.parametrize(
    "target",
    [
        "/pause",
        "/%70ause",
        "//pause",
        "/%2fpause",
        "/v1/%2e%2e/pause",
        "/v1/models/..%2f..%2fpause",
        "/pause?mode=keep",
        "/pause#",
    ],
)
async def test_no_spelling_on_the_wire_gets_through(target: str) -> None:
    """Over a real socket, percent-encoding does not hide a development route."""
    engine = Engine()
    async with served(EngineGuard(engine, ENVIRON)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"POST {target} HTTP/1.1\r\nhost: x/v1/models?\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
        status = (await reader.readline()).split()[1]
        await reader.read()
        writer.close()
        await writer.wait_closed()
    assert status in (b"403", b"400")
    assert engine.reached == []
