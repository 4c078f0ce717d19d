"""A program that stands for engines which stream: each port gives all its streams one event per step, as a batch decodes.

    python -m loadtests.overhead.paced_upstream --chunks 100 --interval-s 0.02 --ports 9001 9002

The ports' steps are spread over the interval: engines do not step together.
"""

import argparse
import asyncio
from typing import cast

import uvloop

from loadtests.overhead.engine_answers import (
    CHAT,
    CHAT_PATH,
    MODELS,
    NOT_FOUND,
    RENDER_PATH,
    RENDERED,
    chunked,
    metrics,
    stream_end,
    stream_events,
)
from loadtests.overhead.routers import HOST

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_BACKLOG = 2048


class Engine:
    """The streams of one port. `held`: a stream that has had its events stays open and silent."""

    def __init__(self, chunks: tuple[bytes, ...], *, held: bool) -> None:
        self._chunks = chunks
        self._held = held
        self._streams: dict[_Connection, int] = {}  # events sent so far
        self._iterations = 0

    def begin(self, connection: "_Connection") -> None:
        connection.write(_STREAM_HEAD)
        self._streams[connection] = 0

    def drop(self, connection: "_Connection") -> None:
        self._streams.pop(connection, None)

    def step(self) -> None:
        self._iterations += 1
        for connection, sent in list(self._streams.items()):
            if sent < len(self._chunks):
                connection.write(self._chunks[sent])
                self._streams[connection] = sent + 1
            elif not self._held:
                connection.write(stream_end(connection.wants_usage))
                self.drop(connection)

    async def run(self, first_after_s: float, interval_s: float) -> None:
        now = asyncio.get_running_loop().time
        due = now() + first_after_s
        while True:
            await asyncio.sleep(max(0.0, due - now()))
            self.step()
            due = max(due + interval_s, now())  # after a stall no burst of steps: an engine cannot catch up

    def answer(self, target: bytes) -> tuple[bytes, bytes]:
        """Status line and body for everything that is no stream."""
        fixed = {CHAT_PATH.encode(): CHAT, RENDER_PATH.encode(): RENDERED, b"/v1/models": MODELS, b"/health": b""}
        if target == b"/metrics":
            return b"200 OK", metrics(len(self._streams), self._iterations)
        return (b"200 OK", fixed[target]) if target in fixed else (b"404 Not Found", NOT_FOUND)


class _Connection(asyncio.Protocol):
    """Parses only what routers send it: HTTP/1.1 with a content-length, one request after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self.wants_usage = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.drop(self)

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (head_end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:head_end].lower()
            _, found, rest = head.partition(b"content-length:")
            end = head_end + 4 + (int(rest.partition(b"\r\n")[0]) if found else 0)
            if len(self._received) < end:
                return
            body, self._received = self._received[head_end + 4 : end], self._received[end:]
            self._respond(head.split(b" ", 2)[1], body)

    def _respond(self, target: bytes, body: bytes) -> None:
        if target == CHAT_PATH.encode() and b'"stream":true' in body:
            self.wants_usage = b'"include_usage":true' in body
            self._engine.begin(self)
            return
        status, answer = self._engine.answer(target)
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(answer))
        self.write(head + answer)


async def serve(ports: list[int], chunks: int, interval_s: float, *, held: bool) -> None:
    loop = asyncio.get_running_loop()
    events = tuple(chunked(event) for event in stream_events(chunks))
    async with asyncio.TaskGroup() as tasks:
        for number, port in enumerate(ports):
            engine = Engine(events, held=held)
            await loop.create_server(lambda engine=engine: _Connection(engine), HOST, port, backlog=_BACKLOG)  # type: ignore[misc]
            tasks.create_task(engine.run(interval_s * number / len(ports), interval_s))


def main() -> None:
    parser = argparse.ArgumentParser(description="Streams fixed answers at a steady pace, on several ports.")
    parser.add_argument("--chunks", type=int, required=True, help="events of a stream")
    parser.add_argument("--interval-s", type=float, required=True, help="seconds between a stream's events")
    parser.add_argument("--held", action="store_true", help="keep a stream open and silent after its events")
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options.ports, options.chunks, options.interval_s, held=options.held))


if __name__ == "__main__":
    main()
