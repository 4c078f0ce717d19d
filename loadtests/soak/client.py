"""The clients: each asks one thing after the other in some manner and notes what it saw."""

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from loadtests.soak.answers import StreamReading
from loadtests.soak.connection import Connection, ConnectionEnded
from loadtests.soak.requests import Asked, encode
from loadtests.soak.views import BODY_BYTES_MAX, Ending, Manner, View

# How often each manner is met.
_WEIGHTS = {
    Manner.READS: 48,
    Manner.LEAVES_AT_ONCE: 4,
    Manner.LEAVES_BEFORE_ANSWER: 6,
    Manner.LEAVES_INSIDE: 8,
    Manner.LEAVES_AFTER: 4,
    Manner.HALF_CLOSES: 3,
    Manner.READS_SLOWLY: 5,
    Manner.SENDS_SLOWLY: 4,
    Manner.HTTP10: 6,
    Manner.PIPELINES: 4,
    Manner.PIPELINES_AND_LEAVES: 3,
    Manner.SPEAKS_NO_HTTP: 1,
}
_PIPELINED = {Manner.PIPELINES: (2, 5), Manner.PIPELINES_AND_LEAVES: (2, 5)}
_WAIT_BEFORE_LEAVING_S = 0.3
_BYTES_BEFORE_LEAVING = 4000
_SLOW_READ_BYTES = 2048
_SLOW_READ_S = 0.02
_SLOW_READS_MAX = 150  # then it has been slow for long enough
_SLOW_SEND_S = 0.05
_SLOW_SEND_PARTS = 5
_THINKING_S = 0.2
_NOT_HTTP = b"\x16\x03\x01\x02\x00\x01\x00 hello\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Target:
    host: str
    port: int
    hang_s: float  # an answer that takes longer hangs


class Client:
    """One of many. Asks for things out of `catalogue`; `views` takes what it saw."""

    def __init__(self, name: str, target: Target, catalogue: Sequence[Asked], rng: random.Random, views: list[View]) -> None:
        self._name = name
        self._target = target
        self._catalogue = catalogue
        self._rng = rng
        self._views = views
        self._serial = itertools.count()
        self._deck: list[Asked] = []
        self._kept: Connection | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Returns soon after `stop` is set, with the requests that run then at their end."""
        try:
            while not stop.is_set():
                await self._once()
                await asyncio.sleep(self._rng.uniform(0, _THINKING_S))
        finally:
            if self._kept is not None:
                await self._kept.close()

    async def _once(self) -> None:
        manner = self._rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        count = self._rng.randint(*_PIPELINED.get(manner, (1, 1)))
        views = [View(f"{self._name}-{next(self._serial)}", self._deal(), manner) for _ in range(count)]
        self._views += views
        connection, self._kept = self._kept, None
        try:
            if connection is None or manner is not Manner.READS:
                if connection is not None:
                    await connection.close()
                receive_bytes = _SLOW_READ_BYTES if manner is Manner.READS_SLOWLY else None
                connection = await Connection.open(self._target.host, self._target.port, receive_bytes=receive_bytes)
            await self._send(connection, views)
            await self._see(connection, views)
        except ConnectionEnded:
            if connection is not None:
                await connection.reset()
            return
        assert connection is not None
        if manner is Manner.READS and connection.keeps_alive and views[0].ending in (Ending.WHOLE, Ending.REFUSED):
            self._kept = connection
        else:
            await connection.reset()

    def _deal(self) -> Asked:
        if not self._deck:
            self._deck = list(self._catalogue)
            self._rng.shuffle(self._deck)
        return self._deck.pop()

    async def _send(self, connection: Connection, views: Sequence[View]) -> None:
        """Raises ConnectionEnded."""
        manner = views[0].manner
        host = f"{self._target.host}:{self._target.port}"
        data = b"".join(encode(view.asked, view.request_id, host, is_http10=manner is Manner.HTTP10) for view in views)
        if manner is Manner.SPEAKS_NO_HTTP:
            data = _NOT_HTTP
        parts = _SLOW_SEND_PARTS if manner is Manner.SENDS_SLOWLY else 1
        size = -(-len(data) // parts)
        for start in range(0, len(data), size):
            await connection.send(data[start : start + size])
            if parts > 1:
                await asyncio.sleep(self._rng.uniform(0, _SLOW_SEND_S))

    async def _see(self, connection: Connection, views: Sequence[View]) -> None:
        """Reads the answers, or leaves. Raises ConnectionEnded, with what was seen until then noted."""
        manner = views[0].manner
        if manner is Manner.LEAVES_BEFORE_ANSWER:
            await asyncio.sleep(self._rng.uniform(0, _WAIT_BEFORE_LEAVING_S))
        if manner in (Manner.LEAVES_AT_ONCE, Manner.LEAVES_BEFORE_ANSWER):
            await self._leave(connection, views)
            return
        if manner is Manner.HALF_CLOSES:
            connection.half_close()
        for number, view in enumerate(views):
            started = time.monotonic()
            try:
                async with asyncio.timeout(self._target.hang_s):
                    await self._see_one(connection, view)
            except TimeoutError:
                view.ending = Ending.HUNG
                return
            except ConnectionEnded as error:
                view.note = str(error)
                _cut_off(views[number + 1 :])
                raise
            finally:
                view.seconds = time.monotonic() - started
            if view.ending is Ending.LEFT and manner is not Manner.HALF_CLOSES:
                await self._leave(connection, views[number:])
                return
            if manner is Manner.PIPELINES_AND_LEAVES and number + 1 < len(views) and self._rng.random() < 0.5:
                await self._leave(connection, views[number + 1 :])
                return
            if not connection.keeps_alive:
                _cut_off(views[number + 1 :])
                return

    async def _leave(self, connection: Connection, views: Sequence[View]) -> None:
        """Closes, or resets, the connection before these were answered."""
        resets = self._rng.random() < 0.5
        for number, view in enumerate(views):
            view.ending = Ending.LEFT
            view.is_withdrawn = view.status == 0 and (resets or number > 0 or view.manner is Manner.PIPELINES_AND_LEAVES)
        await (connection.reset() if resets else connection.close())

    async def _see_one(self, connection: Connection, view: View) -> None:
        """Raises ConnectionEnded."""
        if view.manner is Manner.HALF_CLOSES:
            view.ending = Ending.LEFT
        view.status = await connection.read_status()
        reading = StreamReading(view.asked.path, asks_usage=view.asked.asks_usage)
        is_stream = view.asked.is_stream and view.status < 300
        body: list[bytes] = []
        size = read = 0
        try:
            view.ending = Ending.BROKEN
            while data := await self._read(connection, view.manner, read):
                read += 1
                size += len(data)
                if size <= BODY_BYTES_MAX:
                    body.append(data)
                if is_stream:
                    reading.feed(data)
                if self._leaves_inside(view, size):
                    view.ending = Ending.LEFT
                    return
            view.ending = Ending.WHOLE if view.status < 300 else Ending.REFUSED
        finally:
            if is_stream:
                _conclude(view, reading)
            else:
                view.body = b"".join(body)
            if view.manner is Manner.HALF_CLOSES:
                view.ending = Ending.LEFT

    async def _read(self, connection: Connection, manner: Manner, read: int) -> bytes:
        if manner is not Manner.READS_SLOWLY or read > _SLOW_READS_MAX:
            return await connection.read_body()
        await asyncio.sleep(self._rng.uniform(0, _SLOW_READ_S))
        return await connection.read_body(_SLOW_READ_BYTES)

    def _leaves_inside(self, view: View, size: int) -> bool:
        """With each part that comes anew, so that some leave early, some late, and some miss it."""
        leaves = view.manner in (Manner.LEAVES_INSIDE, Manner.PIPELINES_AND_LEAVES)
        return leaves and self._rng.random() < size / _BYTES_BEFORE_LEAVING / 4


def _cut_off(views: Sequence[View]) -> None:
    for view in views:
        view.ending = Ending.CUT_OFF
        view.is_withdrawn = True


def _conclude(view: View, reading: StreamReading) -> None:
    view.said = reading.said
    view.continuations = reading.continuations
    view.faults += reading.faults
    if reading.has_half_event and view.ending is not Ending.LEFT:
        view.faults.append("half an event was sent")
    if view.ending is Ending.WHOLE and not reading.is_done:
        # HTTP/1.0 has no other end of an answer than that of its connection.
        if view.manner is not Manner.HTTP10:
            view.faults.append("a clean end without the stream's own")
        view.ending = Ending.BROKEN
    elif view.ending is Ending.BROKEN and reading.is_done:
        view.faults.append("the stream's own end, and then a broken connection")
    if reading.has_error:
        view.ending = Ending.ERROR_EVENT if view.ending is Ending.BROKEN else view.ending
        if view.ending is Ending.WHOLE:
            view.faults.append("a clean end behind an error event")
