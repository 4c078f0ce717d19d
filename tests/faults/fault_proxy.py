"""A TCP proxy between the router and one engine that breaks connections as a test scripts it.

It runs in the test's event loop; router and engine are processes of their own. Health probes, model lists, metrics and token
counts pass unharmed: a `Fault` hits generating requests only, one fault for each, in the order in which they were armed.
Proxies that share one `Faults` make "whichever replica is asked first fails" exact, without knowing whom the router asks.
"""

import asyncio
import enum
import itertools
import re
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

_LINGER_0 = struct.pack("ii", 1, 0)  # on, zero seconds: close() sends RST
# What was written before a RST is lost if the other side has not read it yet; this long it gets for that.
_BEFORE_RESET_S = 0.03
_PART_BYTES = 64 * 1024
_SLOW_PART_BYTES = 16 * 1024
_COUNTS_TOKENS = ("POST /tokenize ", "POST /detokenize ")
_WEIGHTS_LINE = re.compile(rb"(?<=\r\n)x-intellect-checkpoint:[^\r]*\r\n", re.IGNORECASE)


class Break(enum.Enum):
    """How the router's connection ends, seen from the router."""

    RESET = "RST"
    CLOSE = "FIN"
    HALF_CLOSE = "FIN of the engine's sending side, which goes on to listen"
    SILENCE = "nothing more comes, and nothing is closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong with one request. Without any of it the answer passes unchanged.

    A break comes after `after_bytes` bytes of the answer, its head included; with `after_events`, after the head, so many
    events (in an answer that is no stream: so many parts of the body), and `after_bytes` bytes more; a negative number is
    counted from the end of the next event or part.
    """

    delay_s: float = 0.0  # before the request goes on to the engine
    read_bytes_per_s: int | None = None  # how slowly the request is taken in
    breaks: Break | None = None
    reaches_engine: bool = True  # False: broken as soon as the request's head is here
    after_events: int | None = None
    after_bytes: int = 0
    answer: bytes | None = None  # comes in place of the engine's, whole with its head; a break comes behind it
    then_forever: bytes | None = None  # comes behind `answer` again and again, until the router closes
    one_byte_a_time: bool = False
    pause_s: float = 0.0  # before each part of the answer, or before each byte


@dataclass(slots=True)
class Faults:
    """The faults that are armed, for one or several proxies."""

    _next: deque[Fault] = field(default_factory=deque)
    _always: Fault | None = None
    hit: int = 0  # requests that a fault has hit

    def arm(self, fault: Fault, times: int | None = 1) -> None:
        """`times` requests are hit, after those armed before; None: all that follow, until `clear`."""
        if times is None:
            self._always = fault
        else:
            self._next.extend([fault] * times)

    def clear(self) -> None:
        self._next.clear()
        self._always = None

    def take(self) -> Fault | None:
        fault = self._next.popleft() if self._next else self._always
        self.hit += fault is not None
        return fault


@dataclass(frozen=True, slots=True)
class ProxiedRequest:
    connection: int  # serial number of the connection that carried it
    path: str
    headers: dict[str, str]
    body: bytes


class FaultProxy:
    """See `fault_proxy`. `requests` are the generating ones, in the order in which they came."""

    def __init__(self, engine_port: int, faults: Faults) -> None:
        self._engine_port = engine_port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.faults = faults
        self.port = 0
        self._serials = itertools.count()
        self.requests: list[ProxiedRequest] = []
        self.open_requests = 0
        self.probes = 0
        self.closes_idle_after_s: float | None = None  # behind an answer, as an engine's keep-alive timeout does
        self.resets_connections = False  # every new connection gets a RST at once
        self.hides_weights = False  # the engine's answers do not say which weights gave them, as without our guard

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def replica_id(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Nobody listens any more, and every connection ends; until `listen`."""
        if self._server is not None:
            self._server.close()
        await self._end_connections()

    async def _end_connections(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        engine = _EngineSide(self._engine_port, next(self._serials), hides_weights=self.hides_weights)
        try:
            if self.resets_connections:
                _reset(writer)
                return
            head: bytes | None = await reader.readuntil(b"\r\n\r\n")
            while head is not None and await self._exchange(head, engine, reader, writer):
                head = await self._next_head(reader)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # one of the two sides has ended it, or `refuse`
        finally:
            self._tasks.discard(task)
            engine.abort()
            writer.close()

    async def _next_head(self, reader: asyncio.StreamReader) -> bytes | None:
        """None when the connection ends, or has been idle for too long."""
        with suppress(asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(self.closes_idle_after_s):
                return await reader.readuntil(b"\r\n\r\n")
        return None

    async def _exchange(
        self, head: bytes, engine: "_EngineSide", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """One request and its answer; whether the connection goes on."""
        line, headers = _parse_head(head)
        if not line.startswith("POST ") or line.startswith(_COUNTS_TOKENS):
            self.probes += 1
            await engine.send(head + await _read_body(reader, int(headers.get("content-length", "0")), None))
            async for part in engine.answer():
                writer.write(part)
            await writer.drain()
            return True
        fault = self.faults.take() or Fault()
        path = line.split(" ")[1]
        if not fault.reaches_engine:
            self.requests.append(ProxiedRequest(engine.serial, path, headers, b""))
            await self._break(fault.breaks or Break.CLOSE, reader, writer)
            return False
        body = await _read_body(reader, int(headers.get("content-length", "0")), fault.read_bytes_per_s)
        self.requests.append(ProxiedRequest(engine.serial, path, headers, body))
        return await self._answer(fault, head + body, engine, reader, writer)

    async def _answer(
        self, fault: Fault, request: bytes, engine: "_EngineSide", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        self.open_requests += 1
        answering = asyncio.ensure_future(self._relay(fault, request, engine, writer))
        gone = asyncio.ensure_future(reader.read(1))  # nothing more comes on a request's connection until it is answered
        try:
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return False
            is_whole = answering.result()
        finally:
            self.open_requests -= 1
            answering.cancel()
            gone.cancel()
            await asyncio.gather(answering, gone, return_exceptions=True)
        if is_whole:
            return True
        engine.abort()
        await self._break(fault.breaks or Break.CLOSE, reader, writer)
        return False

    async def _relay(self, fault: Fault, request: bytes, engine: "_EngineSide", writer: asyncio.StreamWriter) -> bool:
        """Hands the answer on, up to where the fault wants it; whether it is whole."""
        await asyncio.sleep(fault.delay_s)
        if fault.answer is not None:
            parts = _once(fault.answer)
        else:
            await engine.send(request)
            parts = engine.answer()
            if fault.breaks is not None:
                parts = _up_to(fault, parts)
        async for part in parts:
            for piece in _split(part) if fault.one_byte_a_time else (part,):
                await asyncio.sleep(fault.pause_s)
                writer.write(piece)
                await writer.drain()
        while fault.then_forever is not None:
            writer.write(fault.then_forever)
            await writer.drain()
        if fault.breaks is Break.SILENCE:
            await asyncio.Event().wait()  # the engine works on, until the router has had enough
        return fault.breaks is None

    async def _break(self, how: Break, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        match how:
            case Break.RESET:
                await asyncio.sleep(_BEFORE_RESET_S)
                _reset(writer)
            case Break.CLOSE:
                writer.close()
            case Break.HALF_CLOSE:
                writer.write_eof()
                await reader.read()
            case Break.SILENCE:
                await reader.read()


class _EngineSide:
    """The proxy's own connection to the engine, opened when the first request needs it and kept."""

    def __init__(self, port: int, serial: int, *, hides_weights: bool) -> None:
        self._port = port
        self._hides_weights = hides_weights
        self.serial = serial
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: bytes) -> None:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        self._streams[1].write(request)
        await self._streams[1].drain()

    async def answer(self) -> AsyncIterator[bytes]:
        """The raw answer: its head, then one part for each chunk, or for what has come of a body with a length."""
        assert self._streams is not None
        reader, _ = self._streams
        head = await reader.readuntil(b"\r\n\r\n")
        yield _WEIGHTS_LINE.sub(b"", head) if self._hides_weights else head
        _, headers = _parse_head(head)
        if headers.get("transfer-encoding") == "chunked":
            while True:
                line = await reader.readuntil(b"\r\n")
                part = line + await reader.readexactly(int(line, 16) + 2)
                yield part
                if part == b"0\r\n\r\n":
                    return
        left = int(headers.get("content-length", "0"))
        while left:
            part = await reader.read(min(left, _PART_BYTES))
            if not part:
                raise ConnectionResetError("the engine ended its answer early")
            left -= len(part)
            yield part

    def abort(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


@asynccontextmanager
async def fault_proxy(engine_port: int, faults: Faults | None = None) -> AsyncIterator[FaultProxy]:
    """A proxy in front of the engine on this port of 127.0.0.1, on a port of its own."""
    proxy = FaultProxy(engine_port, Faults() if faults is None else faults)
    await proxy.listen()
    try:
        yield proxy
    finally:
        await proxy.refuse()


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _up_to(fault: Fault, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The parts as far as the fault lets them pass."""
    whole_left = 0 if fault.after_events is None else 1 + fault.after_events  # the head is the first
    bytes_left = fault.after_bytes
    async for part in parts:
        if whole_left:
            whole_left -= 1
            yield part
            if not whole_left and not bytes_left:
                return
            continue
        yield part[:bytes_left]
        bytes_left -= len(part)
        if bytes_left <= 0:
            return


def _split(data: bytes) -> Iterator[bytes]:
    return (bytes([byte]) for byte in data)


async def _read_body(reader: asyncio.StreamReader, length: int, bytes_per_s: int | None) -> bytes:
    if bytes_per_s is None:
        return await reader.readexactly(length)
    body = bytearray()
    while len(body) < length:
        part = await reader.readexactly(min(_SLOW_PART_BYTES, length - len(body)))
        body += part
        await asyncio.sleep(len(part) / bytes_per_s)
    return bytes(body)


def _reset(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
    writer.transport.abort()


def _parse_head(head: bytes) -> tuple[str, dict[str, str]]:
    """The first line and the headers, their names in lower case."""
    line, *lines = head.decode("latin-1").split("\r\n")[:-2]
    return line, {name.lower(): value.strip() for name, _, value in (text.partition(":") for text in lines)}
