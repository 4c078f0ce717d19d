"""An engine whose every byte is scripted, for what happens on the wire. `server.sim_engine` is the one that acts like vLLM."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

MODEL = "scripted"

# Gets the request and writes the answer; the connection stays open afterwards unless it closes the writer.
Script = Callable[["ScriptedRequest", asyncio.StreamWriter], Awaitable[None]]


@dataclass
class ScriptedRequest:
    line: str
    headers: dict[str, str]
    body: bytes


@dataclass
class ScriptedEngine:
    url: str
    script: Script
    requests: list[ScriptedRequest] = field(default_factory=list)
    connections: int = 0
    open_requests: int = 0  # POSTs whose connection is still open
    gets: dict[str, bytes] = field(default_factory=dict)  # path -> whole answer, for GETs beyond those of every engine


def json_answer(value: object, status: str = "200 OK", extra: str = "") -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{extra}\r\n"
    return head.encode() + body


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


@asynccontextmanager
async def scripted_engine(script: Script) -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(url="", script=script)
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine.connections += 1
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while request := await _read_request(reader):
                await _answer(engine, request, reader, writer)
                if writer.is_closing():
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    engine.url = f"http://127.0.0.1:{port}"
    try:
        yield engine
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(
    engine: ScriptedEngine, request: ScriptedRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    path = request.line.split()[1]
    if request.line.startswith("GET") and path in engine.gets:
        writer.write(engine.gets[path])
    elif request.line.startswith("GET /v1/models"):
        writer.write(json_answer({"object": "list", "data": [{"id": MODEL}]}))
    elif request.line.startswith("GET /health"):
        writer.write(json_answer({}))
    elif request.line.startswith("GET"):
        writer.write(json_answer({"detail": "Not Found"}, "404 Not Found"))
    else:
        engine.requests.append(request)
        engine.open_requests += 1
        running = asyncio.ensure_future(engine.script(request, writer))
        gone = asyncio.ensure_future(reader.read(1))  # nothing more comes on a request's connection until it is answered
        try:
            await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise ConnectionResetError
            running.result()
        finally:
            engine.open_requests -= 1
            running.cancel()
            if not gone.done():
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
    await writer.drain()


async def _read_request(reader: asyncio.StreamReader) -> ScriptedRequest | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    line, *lines = head.decode().split("\r\n")[:-2]
    headers = {name.lower(): value.strip() for name, _, value in (text.partition(":") for text in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return ScriptedRequest(line, headers, body)
