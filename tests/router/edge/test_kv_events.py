"""Following KV events over real sockets, of simulated engines and of scripted publishers."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
import psutil
import pytest
import uvloop
import zmq.asyncio
from zmq.constants import SocketOption, SocketType

from router.edge import kv_events
from router.edge.kv_endpoints import KvEndpoints, of_engine
from router.edge.kv_events import KvEvents
from router.state.kv_blocks import CAPACITY_BLOCKS_DEFAULT, block_keys
from router.state.kv_source import KvMode, KvSource
from router.types import ReplicaId
from server.sim_text import encode
from tests.ports import free_port
from tests.sim import SimEngine, start_sim_engine
from tests.waiting import await_until

REPLICA = ReplicaId("127.0.0.1:1")
BLOCK = 16
SECONDS = 10.0


class Mirror:
    """What the sink is told."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.clears = 0
        self.modes: list[KvMode] = []

    def stored(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self.held |= set(blocks)

    def evicted(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self.held -= set(blocks)

    def cleared(self, replica: ReplicaId, rank: int, now: float) -> None:
        self.clears += 1
        self.held.clear()

    def forgotten(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self.held -= set(blocks)

    def mode_changed(self, replica: ReplicaId, rank: int, mode: KvMode, reason: str) -> None:
        self.modes.append(mode)


class Following:
    """A KvEvents with one source."""

    def __init__(self, events: KvEvents, mirror: Mirror) -> None:
        self.events = events
        self.mirror = mirror

    @property
    def source(self) -> KvSource:
        [source] = self.events.sources()
        return source

    @property
    def mode(self) -> KvMode:
        return self.events.mode(REPLICA)

    def resident(self, text: str) -> int | None:
        return self.events.resident(REPLICA, 0, block_keys(encode(text), BLOCK))

    def has(self, name: str) -> int | None:
        """For the one block that `Publisher.store` makes of a name."""
        return self.events.resident(REPLICA, 0, [key_of(name)])

    async def until_mode(self, mode: KvMode) -> None:
        await await_until(lambda: self.mode is mode, SECONDS, f"{mode}, not {self.source}")

    async def until_heard(self, seq: int) -> None:
        """All messages up to `seq` are taken in."""
        await await_until(lambda: self.source.next_seq > seq, SECONDS, f"message {seq}, not {self.source}")


def block_of(name: str) -> list[int]:
    return list(name.encode())[:BLOCK]


def key_of(name: str) -> int:
    [key] = block_keys(block_of(name), BLOCK)
    return key


@asynccontextmanager
async def following(endpoints: KvEndpoints, capacity_blocks: int = 10_000) -> AsyncIterator[Following]:
    mirror = Mirror()
    async with asyncio.TaskGroup() as tasks:
        events = KvEvents(mirror, tasks=tasks)
        events.follow(REPLICA, 0, endpoints, capacity_blocks)
        try:
            yield Following(events, mirror)
        finally:
            await events.close()


class Engine:
    """A simulated engine that publishes, and what it says of its own cache."""

    def __init__(self, sim: SimEngine) -> None:
        self.sim = sim
        self.endpoints = of_engine(sim.admin("GET", "/kv_event_sources").content, "127.0.0.1")[0]

    async def ask(self, text: str, tokens: int = 1) -> int:
        """How many tokens of the prompt it read from its cache."""
        body = {"model": "simulated", "prompt": text, "max_tokens": tokens, "ignore_eos": True}
        usage = (await asyncio.to_thread(self.sim.client.post, "/v1/completions", json=body)).raise_for_status().json()["usage"]
        details = usage["prompt_tokens_details"]
        return details["cached_tokens"] if details else 0

    async def last_seq(self) -> int:
        """Number of the last message that it has published; -1 before the first."""
        assert self.endpoints.replay is not None
        return max((seq for seq, _ in await replayed(self.endpoints.replay)), default=-1)


async def replayed(endpoint: str) -> list[tuple[int, bytes]]:
    with zmq.asyncio.Context() as context, context.socket(SocketType.DEALER) as socket:
        socket.connect(endpoint)
        await socket.send_multipart([b"", bytes(8)])
        found = []
        while (frames := await asyncio.wait_for(socket.recv_multipart(), SECONDS))[2] != b"\xff" * 8:
            found.append((int.from_bytes(frames[2], "big"), frames[3]))
        return found


def events_config(ports: tuple[int, int], buffer_steps: int = 10_000) -> str:
    return json.dumps(
        {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{ports[0]}",
            "replay_endpoint": f"tcp://*:{ports[1]}",
            "topic": "kv",
            "buffer_steps": buffer_steps,
        }
    )


def start_engine(
    ports: tuple[int, int], *arguments: str, blocks: int = 256, buffer_steps: int = 10_000, port: int | None = None
) -> SimEngine:
    return start_sim_engine(
        *("--kv-events-config", events_config(ports, buffer_steps), "--enable-prompt-tokens-details", "--time-scale", "0.01"),
        *("--num-gpu-blocks-override", str(blocks), "--block-size", str(BLOCK), "--max-model-len", "1024", *arguments),
        port=port,
    )


def text_of(*numbers: int) -> str:
    """Paragraphs of about three blocks, the same for the same number."""
    return "".join([f"paragraph {number:4} " * (8 + number % 3) for number in numbers])


async def test_what_an_engine_holds_is_mirrored_exactly() -> None:
    """After a random load with evictions and copies, for every prompt, it is told how much the engine will find cached."""
    rng = random.Random(5)
    prompts = [text_of(*(rng.randrange(30) for _ in range(rng.randrange(1, 6)))) for _ in range(40)]
    with start_engine((free_port(), free_port()), blocks=128) as sim:
        engine = Engine(sim)
        async with following(engine.endpoints, capacity_blocks=128) as followed:
            await followed.until_mode(KvMode.LIVE)
            for _ in range(4):
                await asyncio.gather(*[engine.ask(rng.choice(prompts), rng.randrange(1, 40)) for _ in range(20)])
            found = []
            for prompt in prompts:
                await followed.until_heard(await engine.last_seq())
                resident = followed.resident(prompt)
                assert resident is not None
                cached = await engine.ask(prompt)
                # The last token is computed in any case, and so the last block where the prompt is nothing but whole blocks.
                assert cached == min(resident * BLOCK, (len(encode(prompt)) - 1) // BLOCK * BLOCK)
                found.append(cached)
            assert 0 in found
            assert max(found) > 150
            source = followed.source
            assert (source.mode, source.gaps, source.losses, source.restarts, source.unrooted) == (KvMode.LIVE, 0, 0, 0, 0)
            assert len(followed.mirror.held) == source.blocks > 50
            assert sim.admin("POST", "/reset_prefix_cache").json() == {"success": True}
            await await_until(lambda: followed.mirror.clears == 1, SECONDS, "the cache to be cleared")
            assert (followed.mode, followed.resident(prompts[0]), followed.mirror.held) == (KvMode.LIVE, 0, set())


async def test_a_router_that_comes_late_learns_what_the_engine_still_knows() -> None:
    """Wholly with a replay from the first message on, else only what is stored from now on: the rest is unknown, not absent."""
    with start_engine((free_port(), free_port())) as sim:
        engine = Engine(sim)
        await engine.ask(text_of(1))
        async with following(engine.endpoints) as followed:
            await followed.until_mode(KvMode.LIVE)
            assert followed.resident(text_of(1)) == len(encode(text_of(1))) // BLOCK
        async with following(KvEndpoints(engine.endpoints.events)) as followed:
            assert (followed.mode, followed.resident(text_of(1))) == (KvMode.JOINING, None)

            async def is_heard() -> bool:
                await engine.ask(text_of(random.randrange(1000, 10_000)))
                return followed.mode is KvMode.PARTIAL

            await await_until(is_heard, SECONDS, "the first message")
            await engine.ask(text_of(2))
            await followed.until_heard(await engine.last_seq())
            assert (followed.resident(text_of(1)), followed.resident(text_of(2))) == (None, len(encode(text_of(2))) // BLOCK)
    with start_engine((free_port(), free_port()), buffer_steps=2) as sim:
        engine = Engine(sim)
        for number in range(5):
            await engine.ask(text_of(number))
        async with following(engine.endpoints) as followed:
            await followed.until_mode(KvMode.PARTIAL)
            assert [followed.resident(text_of(number)) is None for number in range(5)] == [True, True, True, False, False]


async def test_an_engine_that_is_started_anew_is_forgotten() -> None:
    """It is suspended while it is away, and known to be empty when it is back, before it has published anything."""
    ports, port = (free_port(), free_port()), free_port()
    with start_engine(ports, port=port) as sim:
        engine = Engine(sim)
        async with following(engine.endpoints) as followed:
            await followed.until_mode(KvMode.LIVE)
            await engine.ask(text_of(1))
            await followed.until_heard(await engine.last_seq())
            assert followed.resident(text_of(1))
            sim.stop()
            await followed.until_mode(KvMode.SUSPENDED)
            assert followed.resident(text_of(1)) is None
            with start_engine(ports, port=port) as again:
                await followed.until_mode(KvMode.LIVE)
                assert (followed.resident(text_of(1)), followed.source.restarts, followed.mirror.held) == (0, 1, set())
                await Engine(again).ask(text_of(1))
                await await_until(lambda: followed.resident(text_of(1)), SECONDS, "what the new start stores")


class Publisher:
    """A publisher whose every message the test decides. Messages that are `lost` are only in the replay."""

    def __init__(self, context: zmq.asyncio.Context, ports: tuple[int, int]) -> None:
        self.endpoints = KvEndpoints(f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}")
        self.socket = context.socket(SocketType.XPUB)
        self.socket.setsockopt(SocketOption.XPUB_VERBOSE, 1)
        self.socket.bind(self.endpoints.events)
        self._replay = context.socket(SocketType.ROUTER)
        assert self.endpoints.replay is not None
        self._replay.bind(self.endpoints.replay)
        self.kept: list[tuple[int, bytes]] = []
        self.asked: list[int] = []
        self.drops: Callable[[int], bool] = lambda _: False
        self.is_deaf = False

    async def answer(self) -> None:
        while True:
            client, _, start = await self._replay.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            if self.is_deaf:
                continue
            for seq, payload in self.kept:
                if seq >= self.asked[-1] and not self.drops(seq):
                    await self._replay.send_multipart([client, b"", b"kv", seq.to_bytes(8, "big"), payload])
            await self._replay.send_multipart([client, b"", b"", b"\xff" * 8, b""])

    async def subscribed(self) -> None:
        """Somebody has subscribed since the last call."""
        while await asyncio.wait_for(self.socket.recv(), SECONDS) != b"\x01":
            pass  # somebody has left

    async def store(self, text: str, *, lost: bool = False) -> int:
        tokens = block_of(text)
        event = {"type": "BlockStored", "block_hashes": [text.encode()], "parent_block_hash": None, "token_ids": tokens}
        return await self.publish(
            [1.0, [event | {"block_size": BLOCK, "lora_id": None, "medium": "GPU", "lora_name": None}]], lost=lost
        )

    async def publish(self, batch: object, *, lost: bool = False) -> int:
        seq, payload = len(self.kept), msgspec.msgpack.encode(batch)
        self.kept.append((seq, payload))
        if not lost:
            await self.socket.send_multipart([b"kv", seq.to_bytes(8, "big"), payload])
        return seq


@asynccontextmanager
async def publishing() -> AsyncIterator[Publisher]:
    context = zmq.asyncio.Context()
    publisher = Publisher(context, (free_port(), free_port()))
    answering = asyncio.create_task(publisher.answer())
    try:
        yield publisher
    finally:
        answering.cancel()
        context.destroy(linger=0)


NAMES = [f"block {number:4} and what else is in it" for number in range(1000)]


async def test_lost_messages_are_asked_for_once_and_repaired() -> None:
    """Whatever is between two messages; then nothing was missed."""
    async with publishing() as publisher, following(publisher.endpoints) as followed:
        await publisher.subscribed()
        await followed.until_mode(KvMode.LIVE)
        assert publisher.asked == [0]
        for number, name in enumerate(NAMES[:200]):
            await publisher.store(name, lost=number % 50 in (7, 8, 9))
        await followed.until_heard(199)
        assert [followed.has(name) for name in NAMES[:200]] == [1] * 200
        assert publisher.asked == [0, 6, 56, 106, 156]
        assert (followed.mode, followed.source.gaps, followed.source.losses) == (KvMode.LIVE, 4, 0)
        assert followed.mirror.modes == [KvMode.JOINING, KvMode.LIVE, *[KvMode.SUSPENDED, KvMode.LIVE] * 4]


async def test_a_long_replay_that_loses_messages_itself_is_asked_for_again() -> None:
    """A publisher's socket drops what its peer does not take in time."""
    async with publishing() as publisher:
        for name in NAMES:
            await publisher.store(name)
        publisher.drops = lambda seq: seq == 300 and len(publisher.asked) < 2
        async with following(publisher.endpoints) as followed:
            await followed.until_mode(KvMode.LIVE)
            assert publisher.asked == [0, 299]
            assert (followed.source.blocks, followed.source.losses) == (1000, 0)


async def test_where_nobody_replays_a_source_is_known_in_part(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was known before the gap is not believed any more; who does not answer is not asked again at once."""
    monkeypatch.setattr(kv_events, "REPLAY_TIMEOUT_S", 0.1)
    async with publishing() as publisher, following(publisher.endpoints) as followed:
        await publisher.subscribed()
        await followed.until_mode(KvMode.LIVE)
        await publisher.store(NAMES[0])
        await followed.until_heard(0)
        publisher.is_deaf = True
        await publisher.store(NAMES[1], lost=True)
        await publisher.store(NAMES[2])
        await followed.until_mode(KvMode.PARTIAL)
        assert [followed.has(name) for name in NAMES[:3]] == [None, None, 1]
        assert publisher.asked == [0, 0]
        await publisher.store(NAMES[3], lost=True)
        await followed.until_heard(await publisher.store(NAMES[4]))
        assert (publisher.asked, followed.has(NAMES[2]), followed.has(NAMES[4])) == ([0, 0], None, 1)
        assert (followed.source.gaps, followed.source.losses) == (2, 2)
        said = [record.getMessage() for record in caplog.records]
        assert said == [f"KV events of {REPLICA}, rank 0 before number 2 are lost"]  # not again for every one


async def test_a_lost_last_message_is_found_when_it_stays_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a source that stays quiet is asked once, not for ever."""
    monkeypatch.setattr(kv_events, "QUIET_S", 0.05)
    async with publishing() as publisher, following(publisher.endpoints) as followed:
        await publisher.subscribed()
        await followed.until_heard(await publisher.store(NAMES[0]))
        await publisher.store(NAMES[1], lost=True)
        await followed.until_heard(1)
        assert (followed.mode, followed.has(NAMES[1])) == (KvMode.LIVE, 1)
        before = len(publisher.asked)
        await asyncio.sleep(0.3)  # six times as long
        assert len(publisher.asked) - before <= 1


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"kv", b"12345678"],
        [b"kv", b"1234567", b"x"],
        [b"kv", b"\xff" * 8, b"x"],
        [b"kv", bytes(8), b"x", b"x"],
        [b"x" * 100_000],
    ],
    ids=["empty", "two frames", "short number", "negative number", "four frames", "large"],
)
async def test_garbage_suspends_until_the_next_message(frames: list[bytes]) -> None:
    """It ends nothing, and costs nothing that was known."""
    async with publishing() as publisher, following(publisher.endpoints) as followed:
        await publisher.subscribed()
        await followed.until_mode(KvMode.LIVE)
        await publisher.store(NAMES[0])
        await publisher.socket.send_multipart(frames)
        await followed.until_mode(KvMode.SUSPENDED)
        assert (followed.source.malformed, followed.has(NAMES[0])) == (1, None)
        await publisher.store(NAMES[1])
        await followed.until_mode(KvMode.LIVE)
        assert [followed.has(name) for name in NAMES[:3]] == [1, 1, 0]


async def test_a_batch_that_cannot_be_read_costs_what_was_known() -> None:
    """What comes after it is followed as before."""
    async with publishing() as publisher, following(publisher.endpoints) as followed:
        await publisher.subscribed()
        await followed.until_mode(KvMode.LIVE)
        await publisher.store(NAMES[0])
        await publisher.publish([1.0, [{"type": "OfALaterRelease"}]])
        await followed.until_heard(await publisher.store(NAMES[1]))
        assert (followed.mode, [followed.has(name) for name in NAMES[:2]]) == (KvMode.PARTIAL, [None, 1])
        assert (followed.source.malformed, followed.source.losses) == (1, 1)


async def test_a_fault_of_the_sink_does_not_end_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the source begins anew."""
    monkeypatch.setattr(kv_events, "RESTART_S", 0.05)
    async with publishing() as publisher, following(publisher.endpoints) as followed:
        await publisher.subscribed()
        await followed.until_mode(KvMode.LIVE)
        with monkeypatch.context() as patched:
            patched.setattr(followed.mirror, "evicted", None)
            await publisher.store(NAMES[0])
            await publisher.publish([1.0, [{"type": "BlockRemoved", "block_hashes": [NAMES[0].encode()], "medium": "GPU"}]])
            await await_until(lambda: caplog.records, SECONDS, "a word in the log")
        await await_until(lambda: followed.source.losses == 1 and followed.source.next_seq == 2, SECONDS, "the replay")
        assert (followed.mode, followed.has(NAMES[0]), followed.mirror.held) == (KvMode.LIVE, 0, set())
        assert caplog.records[0].getMessage() == f"following the KV events of {REPLICA}, rank 0 failed"


def test_it_runs_on_uvloop() -> None:
    """The loop that the router has."""
    uvloop.run(test_lost_messages_are_asked_for_once_and_repaired())


async def test_ranks_and_replicas_come_and_go() -> None:
    """Each has its own state; telling the same again changes nothing, other endpoints begin anew, and who is gone is off."""
    other = ReplicaId("127.0.0.1:2")
    mirror = Mirror()
    async with publishing() as first, publishing() as second, asyncio.TaskGroup() as tasks:
        events = KvEvents(mirror, tasks=tasks)
        try:
            events.follow(REPLICA, 0, first.endpoints)
            events.follow(REPLICA, 1, second.endpoints)
            await first.subscribed()
            await second.subscribed()
            await await_until(lambda: [events.mode(REPLICA, rank) for rank in (0, 1)] == [KvMode.LIVE] * 2, SECONDS, "both")
            await first.store(NAMES[0])
            key = key_of(NAMES[0])
            await await_until(lambda: events.resident(REPLICA, 0, [key]) == 1, SECONDS, "the block")
            assert (events.resident(REPLICA, 1, [key]), events.resident(other, 0, [key]), events.mode(other)) == (
                0,
                None,
                KvMode.OFF,
            )
            events.follow(REPLICA, 0, first.endpoints, 77)
            assert events.resident(REPLICA, 0, [key]) == 1
            assert [source.capacity_blocks for source in events.sources()] == [77, CAPACITY_BLOCKS_DEFAULT]
            events.restarted(REPLICA)
            assert events.resident(REPLICA, 0, [key]) is None
            events.follow(REPLICA, 0, second.endpoints)
            await second.subscribed()
            assert mirror.held == set()
            await await_until(lambda: events.mode(REPLICA) is KvMode.LIVE, SECONDS, "the other endpoint")
            events.unfollow(REPLICA)
            events.unfollow(REPLICA)
            assert (events.mode(REPLICA), events.mode(REPLICA, 1), list(events.sources())) == (KvMode.OFF, KvMode.OFF, [])
        finally:
            await events.close()


async def test_closing_leaves_nothing_behind() -> None:
    """No socket, thread or task, be the engine there, be it away, or be a replay running."""
    process = psutil.Process()

    def left() -> tuple[int, int, int]:
        return process.num_fds(), process.num_threads(), len(asyncio.all_tasks())

    away = KvEndpoints(f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}")
    async with publishing() as publisher:
        publisher.is_deaf = True
        before = left()
        for asked in range(1, 5):
            async with asyncio.TaskGroup() as tasks:
                events = KvEvents(Mirror(), tasks=tasks)
                for rank, endpoints in enumerate([publisher.endpoints, away]):
                    events.follow(REPLICA, rank, endpoints)
                await await_until(lambda: len(publisher.asked) == asked, SECONDS, "a replay")  # noqa: B023
                await events.close()
        # The publisher's side of a connection goes a little later.
        await await_until(lambda: left() == before, SECONDS, f"what was there before, {before}")
