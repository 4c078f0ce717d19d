"""Follows the KV events that engines publish on ZeroMQ: one task for each source (a replica's data-parallel rank).

A source publishes numbered messages on a PUB socket and keeps the last of them for who asks on a ROUTER socket (vLLM 0.32).
ZeroMQ connects again by itself; a heartbeat finds a machine that has gone without a word. Memory is bounded: by what a
socket queues (`QUEUE_MAX` messages, each below `MESSAGE_BYTES_MAX`; the publisher drops what is more), and by the engine's
own capacity.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence

import zmq.asyncio
from zmq.constants import Event, Flag, PollEvent, SocketOption, SocketType
from zmq.error import Again
from zmq.sugar.socket import Socket
from zmq.utils.monitor import parse_monitor_message

from router.edge.kv_endpoints import KvEndpoints
from router.state.kv_blocks import CAPACITY_BLOCKS_DEFAULT
from router.state.kv_source import KvMode, KvSink, KvSource, Received, Replayed
from router.types import ReplicaId

log = logging.getLogger(__name__)

QUEUE_MAX = 10_000
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
# Seconds for which messages are taken in without letting requests have their turn.
TURN_S = 0.001
# A source from which nothing came for so long is asked once whether that is true: the last message may be the lost one.
QUIET_S = 5.0
# Seconds between two messages of a replay. vLLM answers between its own messages, at the latest after 0.1 s.
REPLAY_TIMEOUT_S = 5.0
REPLAY_MAX_S = 60.0
# A publisher's socket drops what its peer does not take in time, so a long replay may have holes and is asked for again.
REPLAYS_MAX = 8
# After a replay that nobody answered.
REPLAY_PAUSE_S = 30.0
# Between two lines in the log about the same source.
WARNING_PAUSE_S = 60.0
# After a fault of ours.
RESTART_S = 5.0

_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 5_000
_HEARTBEAT_MS = 5_000
_HEARTBEAT_TIMEOUT_MS = 15_000
_WATCHED = Event.HANDSHAKE_SUCCEEDED | Event.DISCONNECTED


class KvEvents:
    """All sources of a fleet. `now` is the clock of what the sink is told."""

    def __init__(self, sink: KvSink, *, tasks: asyncio.TaskGroup, now: Callable[[], float] = time.monotonic) -> None:
        self._sink = sink
        self._tasks = tasks
        self._now = now
        self._context = zmq.asyncio.Context()
        self._followed: dict[tuple[ReplicaId, int], _Follower] = {}
        self._running: set[asyncio.Task[None]] = set()

    def follow(
        self, replica: ReplicaId, rank: int, endpoints: KvEndpoints, capacity_blocks: int = CAPACITY_BLOCKS_DEFAULT
    ) -> None:
        """Begins, or goes on where nothing has changed, so it can be called after each probe.

        `capacity_blocks` are the KV blocks of this one rank.
        """
        before = self._followed.get((replica, rank))
        if before is not None:
            if before.endpoints == endpoints:
                before.source.capacity_blocks = capacity_blocks
                return
            self._stop(before)
        follower = _Follower(self._context, replica, rank, endpoints, self._sink, capacity_blocks, self._now)
        self._followed[replica, rank] = follower
        self._sink.mode_changed(replica, rank, KvMode.JOINING, "nothing was heard yet")
        follower.task = self._tasks.create_task(follower.run(), name=f"KV events of {replica}, rank {rank}")
        self._running.add(follower.task)
        follower.task.add_done_callback(self._running.discard)

    def unfollow(self, replica: ReplicaId) -> None:
        """Stops following all ranks of a replica, if any is followed."""
        for key in [key for key in self._followed if key[0] == replica]:
            self._stop(self._followed.pop(key))

    def restarted(self, replica: ReplicaId) -> None:
        """Its agent says that the engine was started anew: nothing is known until its events say so themselves."""
        for key, follower in self._followed.items():
            if key[0] == replica:
                follower.source.disconnected()

    def mode(self, replica: ReplicaId, rank: int = 0) -> KvMode:
        follower = self._followed.get((replica, rank))
        return KvMode.OFF if follower is None else follower.source.mode

    def resident(self, replica: ReplicaId, rank: int, keys: Sequence[int]) -> int | None:
        """How many of a prompt's first blocks (`block_keys`) a rank holds; None: not known."""
        follower = self._followed.get((replica, rank))
        return None if follower is None else follower.source.resident(keys)

    def sources(self) -> Iterator[KvSource]:
        """For metrics: each source with its counts."""
        return (follower.source for follower in self._followed.values())

    async def close(self) -> None:
        """Stops following and closes every socket."""
        for replica in {replica for replica, _ in self._followed}:
            self.unfollow(replica)
        await asyncio.gather(*self._running, return_exceptions=True)
        self._context.term()

    def _stop(self, follower: "_Follower") -> None:
        if follower.task is not None:
            follower.task.cancel()
        follower.source.forget(self._now())
        self._sink.mode_changed(follower.source.replica, follower.source.rank, KvMode.OFF, "it is not followed any more")


class _Follower:
    """One source, its sockets and its task."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        replica: ReplicaId,
        rank: int,
        endpoints: KvEndpoints,
        sink: KvSink,
        capacity_blocks: int,
        now: Callable[[], float],
    ) -> None:
        self.source = KvSource(replica, rank, sink, capacity_blocks)
        self.endpoints = endpoints
        self.task: asyncio.Task[None] | None = None
        self._context = context
        self._now = now
        self._no_replay_until = self._no_warning_until = -math.inf

    async def run(self) -> None:
        """Follows until cancelled. Nothing that an engine sends ends it."""
        has_failed = False
        while True:
            try:
                if has_failed:
                    self.source.forget(self._now())
                await self._follow()
            except Exception:  # a fault of ours, or of the sink, must end neither the requests nor the other sources
                log.exception("following the KV events of %s, rank %d failed", self.source.replica, self.source.rank)
                has_failed = True
            await asyncio.sleep(RESTART_S)

    async def _follow(self) -> None:
        events = self._context.socket(SocketType.SUB)
        try:
            events.setsockopt(SocketOption.RCVHWM, QUEUE_MAX)
            _set_common(events)
            events.setsockopt(SocketOption.SUBSCRIBE, b"")
            monitor = events.get_monitor_socket(_WATCHED)
            try:
                events.connect(self.endpoints.events)
                await self._listen(events, monitor)
            finally:
                events.disable_monitor()
                monitor.close(linger=0)
        finally:
            events.close(linger=0)

    async def _listen(self, events: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        loop = asyncio.get_running_loop()
        poller = zmq.asyncio.Poller()
        poller.register(events, PollEvent.POLLIN)
        poller.register(monitor, PollEvent.POLLIN)
        # Plain sockets, to take what has arrived without a task switch for each message.
        arrived, connections = Socket.shadow(events), Socket.shadow(monitor)
        is_checked = True
        while True:
            ready = await poller.poll(None if is_checked else QUIET_S * 1000)
            if not ready:
                is_checked = True
                await self._repair(None)
                continue
            is_checked = False
            if self._is_connected_anew(connections):
                await self._repair(None)
            ends_at = loop.time() + TURN_S
            while loop.time() < ends_at and (frames := _take(arrived)):
                await self._receive(frames)
            await asyncio.sleep(0)

    def _is_connected_anew(self, connections: Socket) -> bool:
        is_connected = False
        while frames := _take(connections):
            is_connected = parse_monitor_message(frames)["event"] == Event.HANDSHAKE_SUCCEEDED
            if not is_connected:
                self.source.disconnected()
        return is_connected

    async def _receive(self, frames: list[bytes]) -> None:
        source, now = self.source, self._now()
        if len(frames) != 3 or len(frames[1]) != 8 or (seq := _number(frames[1])) < 0:
            source.receive_garbage()  # whether anything was missed shows in the next message, or when it stays quiet
            return
        if source.receive(seq, frames[2], now) is not Received.GAP:
            return
        if not await self._repair(seq):
            if source.mode is KvMode.SUSPENDED and now >= self._no_warning_until:
                self._no_warning_until = now + WARNING_PAUSE_S
                log.warning("KV events of %s, rank %d before number %d are lost", source.replica, source.rank, seq)
            source.skip_to(seq, now)
        source.receive(seq, frames[2], now)

    async def _repair(self, until: int | None) -> bool:
        """Asks for what is missing before message `until`, or at all. Returns whether nothing is missing now."""
        endpoint = self.endpoints.replay
        if endpoint is None or self._now() < self._no_replay_until:
            return False
        for _ in range(REPLAYS_MAX):
            is_whole = await self._replay(endpoint, self.source.begin_replay(), until)
            if not is_whole:
                self._no_replay_until = self._now() + REPLAY_PAUSE_S
            outcome = self.source.end_replay(self._now(), is_whole=is_whole, until=until)
            if outcome is not Replayed.AGAIN:
                return outcome is Replayed.CLOSED
        return False

    async def _replay(self, endpoint: str, start: int, until: int | None) -> bool:
        """Returns whether the engine said that it has sent all."""
        loop = asyncio.get_running_loop()
        socket = self._context.socket(SocketType.DEALER)
        try:
            socket.setsockopt(SocketOption.RCVHWM, QUEUE_MAX)
            _set_common(socket)
            socket.connect(endpoint)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            arrived = Socket.shadow(socket)
            gives_up_at = loop.time() + REPLAY_MAX_S
            while loop.time() < gives_up_at and await socket.poll(REPLAY_TIMEOUT_S * 1000):
                ends_at = loop.time() + TURN_S
                while loop.time() < ends_at and (frames := _take(arrived)):
                    if len(frames) != 4 or len(frames[2]) != 8:
                        continue
                    if (seq := _number(frames[2])) == -1:
                        return True
                    self.source.receive_replayed(seq, frames[3], self._now(), until)
                await asyncio.sleep(0)
            return False
        finally:
            socket.close(linger=0)


def _take(socket: Socket) -> list[bytes] | None:
    """The next message, if one has arrived."""
    try:
        frames: list[bytes] = socket.recv_multipart(Flag.NOBLOCK)
    except Again:
        return None
    return frames


def _number(frame: bytes) -> int:
    return int.from_bytes(frame, "big", signed=True)


def _set_common(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(SocketOption.MAXMSGSIZE, MESSAGE_BYTES_MAX)
    socket.setsockopt(SocketOption.IPV6, 1)
    socket.setsockopt(SocketOption.LINGER, 0)
    socket.setsockopt(SocketOption.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(SocketOption.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.setsockopt(SocketOption.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(SocketOption.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
