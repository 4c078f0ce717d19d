"""Routers that share a real redis reserve each other's placements, and serve on whatever becomes of it."""

import asyncio
import logging
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from protocol.usage import Usage
from router.edge.sharing import CHANNEL, Sharing, SharingState, SharingTimes
from router.policy.interface import ReplicaFacts, Ticket
from router.state.shared_policy import WAITING_MAX
from tests.ports import free_port
from tests.redis_server import RedisServer, needs_redis, start_redis
from tests.router.process import ROOT
from tests.router.state.recording_policy import A, B, RecordingPolicy, request
from tests.waiting import await_until

pytestmark = needs_redis

TIMES = SharingTimes(flush=0.002, snapshot=0.2, silent=1.0, command=0.3)
# A peer's placement must not wait for a snapshot where that is what is tested.
SELDOM = SharingTimes(flush=0.002, snapshot=60, silent=90, command=0.5)


class Router:
    def __init__(self, sharing: Sharing, placements: RecordingPolicy) -> None:
        self.sharing = sharing
        self.placements = placements
        self.news = 0
        for replica in (A, B):
            sharing.policy.changed(ReplicaFacts(replica))

    def place(self) -> Ticket:
        ticket = self.sharing.policy.place(request(), [A, B], time.monotonic())
        assert ticket is not None
        return ticket

    def end(self, ticket: Ticket, usage: Usage | None = None) -> None:
        self.sharing.policy.ended(ticket, usage, time.monotonic())

    def note_news(self) -> None:
        self.news += 1

    @property
    def is_joined(self) -> bool:
        return self.sharing.state is SharingState.JOINED

    @property
    def total(self) -> int:
        return self.placements.in_flight.total()


@pytest.fixture(scope="module")
def lasting_redis() -> Iterator[RedisServer]:
    with start_redis() as server:
        yield server


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """One that the test may stop and kill."""
    with start_redis() as server:
        yield server


@asynccontextmanager
async def routers(url: str, count: int, times: SharingTimes = TIMES, *, join: bool = True) -> AsyncIterator[list[Router]]:
    """Stopped at the end, when nothing of a peer may be left at any of them."""
    made, tasks = [], []
    for number in range(count):
        placements = RecordingPolicy()
        sharing = Sharing(
            url,
            placements,
            router=f"router-{number}",
            incarnation=time.time_ns(),
            rng=random.Random(number),
            channel=CHANNEL,
            times=times,
        )
        made.append(Router(sharing, placements))
        tasks.append(asyncio.create_task(sharing.run(made[-1].note_news)))
    try:
        if join:
            await await_until(
                lambda: all(r.is_joined and r.sharing.report().peers == count - 1 for r in made), 5, "the routers to join"
            )
        yield made
    finally:
        for task in tasks:
            task.cancel()
        done, pending = await asyncio.wait(tasks, timeout=5)
        assert not pending, "a router that is stopped does not wait for redis"
        assert all(task.cancelled() for task in done)
        for router in made:
            assert router.sharing.report().remote_open == 0


@pytest.mark.parametrize("count", [2, 4])
async def test_all_routers_see_all_placements_within_milliseconds(lasting_redis: RedisServer, count: int) -> None:
    """Each places as if it were the only one: the load is even over the replicas, though every router made its own choices."""
    async with routers(lasting_redis.url, count, SELDOM) as made:
        tickets = []
        for number in range(20):
            router = made[number % count]
            tickets.append((router, router.place()))
            await await_until(lambda: all(r.total == len(tickets) for r in made), 2, "the placement to be seen")
        assert all(router.placements.in_flight == {A: 10, B: 10} for router in made)
        for router, ticket in tickets:
            router.sharing.policy.first_token(ticket, time.monotonic())
        await await_until(lambda: all(all(r.placements.open.values()) for r in made), 2, "the first tokens to be seen")
        for router, ticket in tickets:
            router.end(ticket, Usage(10, 20, 5))
        await await_until(lambda: all(r.total == 0 for r in made), 2, "the endings to be seen")
        assert all(router.placements.usages == [Usage(10, 20, 5)] * 20 for router in made)


async def test_many_placements_travel_in_few_messages(lasting_redis: RedisServer) -> None:
    """Redis and its reader are asked a few hundred times a second, however many requests there are."""
    async with routers(lasting_redis.url, 2, SELDOM) as (one, two):
        before = one.sharing.report().batches_sent
        tickets = [one.place() for _ in range(2000)]
        await await_until(lambda: two.total == 2000, 5, "the placements to be seen")
        for ticket in tickets:
            one.end(ticket)
        await await_until(lambda: two.total == 0, 5, "the endings to be seen")
        assert one.sharing.report().batches_sent - before < 20


async def test_a_router_that_joins_late_learns_what_is_open(lasting_redis: RedisServer) -> None:
    """It does not send its first requests to replicas that others keep busy."""
    async with routers(lasting_redis.url, 1, SELDOM) as (one,):
        tickets = [one.place() for _ in range(7)]
        late = RecordingPolicy()
        sharing = Sharing(lasting_redis.url, late, router="late", incarnation=1, rng=random.Random(0), times=SELDOM)
        for replica in (A, B):
            sharing.policy.changed(ReplicaFacts(replica))
        running = asyncio.create_task(sharing.run())
        await await_until(lambda: late.in_flight.total() == 7, 2, "the newcomer to hear of the placements")
        ticket = sharing.policy.place(request(), [A, B], 0.0)
        assert ticket is not None
        await await_until(lambda: one.total == 8, 2, "its own placement to be seen")
        running.cancel()
        await asyncio.wait([running])
        await await_until(lambda: one.total == 7, 2, "its goodbye")
        assert one.sharing.report().peers == 0
        for own in tickets:
            one.end(own)


async def test_what_a_killed_router_had_open_ends(lasting_redis: RedisServer) -> None:
    """kill -9 leaves nothing reserved: after five seconds of silence (here one) the router counts as gone."""
    async with routers(lasting_redis.url, 1) as (one,):
        command = [sys.executable, "-m", "tests.router.edge.sharing_peer", lasting_redis.url, "5"]
        process = await asyncio.to_thread(subprocess.Popen, command, cwd=ROOT)
        try:
            await await_until(lambda: one.total == 5, 10, "the other process's placements")
            process.kill()
            news = one.news
            await await_until(lambda: one.total == 0, 5, "its end to be noticed")
            assert one.news > news, "who waits for a place may have one now"
            assert one.placements.usages == [None] * 5
        finally:
            process.kill()
            await asyncio.to_thread(process.wait, 10)


async def test_a_hung_redis_holds_up_nobody_and_the_routers_agree_when_it_is_back(redis: RedisServer) -> None:
    """Requests go on at full speed; peers end by silence and come back with the next snapshots."""
    async with routers(redis.url, 2) as (one, two):
        held = [one.place() for _ in range(3)]
        await await_until(lambda: two.total == 3, 2, "the placements to be seen")
        redis.stop()
        try:
            slowest = 0.0
            await_lost = asyncio.create_task(
                await_until(lambda: not one.is_joined and not two.is_joined, 5, "the loss to be noticed")
            )
            while not await_lost.done():
                began = time.perf_counter()
                one.end(one.place())
                slowest = max(slowest, time.perf_counter() - began)
                await asyncio.sleep(0)
            await await_lost
            assert slowest < 0.1
            await await_until(lambda: two.total == 0, 5, "the other router's placements to end")
        finally:
            redis.resume()
        late = one.place()
        await await_until(lambda: one.is_joined and two.is_joined, 10, "both to join again")
        await await_until(lambda: two.total == 4, 2, "the open placements to be seen again")
        for ticket in [*held, late]:
            one.end(ticket)
        await await_until(lambda: two.total == 0, 2, "the endings to be seen")


async def test_a_redis_that_is_killed_and_started_again_is_joined_again(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log for the loss and one for the return, however many tries lie between."""
    async with routers(redis.url, 2) as (one, two):
        held = one.place()
        await await_until(lambda: two.total == 1, 2, "the placement to be seen")
        with caplog.at_level(logging.INFO, "router.edge.sharing"):
            redis.kill()
            await await_until(lambda: not one.is_joined and not two.is_joined, 2, "the loss to be noticed")
            for _ in range(WAITING_MAX + 1):
                one.end(one.place())
            await await_until(lambda: two.total == 0, 5, "the other router's placement to end")
            await asyncio.to_thread(redis.start)
            await await_until(lambda: one.is_joined and two.is_joined, 10, "both to join again")
        await await_until(lambda: two.total == 1, 2, "the open placement to be seen again")
        one.end(held)
        await await_until(lambda: two.total == 0, 2, "its end to be seen")
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) <= 4
    assert len([record for record in caplog.records if record.levelname == "INFO"]) == 2


async def test_connections_that_redis_cuts_cost_no_placement(redis: RedisServer) -> None:
    """Redis cuts readers that are too slow; each comes back and asks for what it missed."""
    async with routers(redis.url, 2) as (one, two):
        tickets = []
        for kind in ("pubsub", "normal", "pubsub", "normal"):
            redis.command("CLIENT", "KILL", "TYPE", kind)
            tickets.append(one.place())
            await await_until(lambda: one.is_joined and two.is_joined and two.total == len(tickets), 5, "both to agree")
        for ticket in tickets:
            one.end(ticket)
        await await_until(lambda: two.total == 0, 2, "the endings to be seen")


async def test_what_cannot_be_sent_is_dropped_and_logged(lasting_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """A fault of ours in a message costs its batch: the router serves on, and its next snapshot tells the others the rest."""
    async with routers(lasting_redis.url, 2) as (one, two):
        kept = one.place()
        one.end(one.place(), Usage(10**30, 1))  # more than MessagePack can write
        await await_until(lambda: "could not be shared" in caplog.text, 5, "the fault in the log")
        await await_until(lambda: one.is_joined and two.total == 1, 5, "the open placement to be seen")
        one.end(kept)
        await await_until(lambda: two.total == 0, 2, "its end to be seen")
    assert two.sharing.report().gaps > 0


async def test_a_router_can_be_stopped_at_any_moment(lasting_redis: RedisServer) -> None:
    """Also while a message is on its way to redis: stopping never hangs."""
    rng = random.Random(5)
    for _ in range(25):
        async with routers(lasting_redis.url, 1, join=False) as (one,):
            end = time.monotonic() + 0.1 * rng.random()
            while time.monotonic() < end:
                one.end(one.place())
                await asyncio.sleep(0.0005)


async def test_a_full_redis_still_carries_placements(redis: RedisServer) -> None:
    """Nothing is stored there, so a limit of memory does not matter."""
    redis.command("CONFIG", "SET", "maxmemory", "1")
    redis.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert redis.command("SET", "key", "value").startswith(b"-OOM")
    async with routers(redis.url, 2) as (one, two):
        ticket = one.place()
        await await_until(lambda: two.total == 1, 2, "the placement to be seen")
        one.end(ticket)
        await await_until(lambda: two.total == 0, 2, "its end to be seen")


async def test_strangers_on_the_channel_are_left_out_and_counted(
    lasting_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever else is published there, the routers go on, and the log says it once."""
    async with routers(lasting_redis.url, 2) as (one, two):
        for payload in ("", "hello", "[1, 2]", "\x91" * 5000, "x" * 100_000):
            lasting_redis.command("PUBLISH", CHANNEL, payload)
        await await_until(lambda: two.sharing.report().malformed == 5, 2, "the strangers' messages")
        ticket = one.place()
        await await_until(lambda: two.total == 1, 2, "the placement to be seen")
        one.end(ticket)
        await await_until(lambda: two.total == 0, 2, "its end to be seen")
    assert len([record for record in caplog.records if "left out" in record.message]) == 2  # one of each router


async def test_a_redis_that_was_never_there_is_an_error_of_sharing_only(caplog: pytest.LogCaptureFixture) -> None:
    """The router serves alone and says why, without the password."""
    url = f"redis://somebody:secret-word@127.0.0.1:{free_port()}/0"
    async with routers(url, 1, join=False) as (one,):
        await await_until(lambda: "not shared" in caplog.text, 5, "a warning")
        for _ in range(100):
            one.end(one.place())
        assert one.sharing.state is SharingState.LOST
    assert "secret-word" not in caplog.text


async def test_a_password_is_needed_and_used(caplog: pytest.LogCaptureFixture) -> None:
    """A redis that is not open to everybody."""
    with start_redis("--requirepass", "secret-word") as redis:
        async with routers(redis.url, 1, join=False) as (one,):
            await await_until(lambda: "Authentication required" in caplog.text, 5, "a warning")
            assert one.sharing.report().batches_sent == 0
        async with routers(redis.url.replace("redis://", "redis://:secret-word@"), 2) as (one, two):
            one.place()
            await await_until(lambda: two.total == 1, 2, "the placement to be seen")
