"""Placements shared with the other routers of a fleet over redis: what each has placed, all reserve.

Redis only carries messages (PUBLISH and SUBSCRIBE of one channel) and keeps nothing. No request ever waits for it: while it is
slow or gone, each router goes on with what it has placed itself, and catches up when it is back.
"""

import asyncio
import enum
import logging
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from router.policy.interface import Policy
from router.state.peer_messages import Malformed
from router.state.peers import Heard, Peers
from router.state.shared_policy import Outbox, SharedPolicy

log = logging.getLogger(__name__)

CHANNEL = "intellect:placements"
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 2.0


class SharingState(enum.StrEnum):
    OFF = "off"  # no redis was given
    JOINED = "joined"  # what we say comes back to us, so the others hear it and we hear them
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class SharingTimes:
    """Seconds."""

    flush: float = 0.005  # that a placement waits for others to be sent with
    snapshot: float = 2.0  # between two snapshots
    silent: float = 5.0  # after which a peer is gone, and a connection on which nothing comes is dead
    command: float = 1.0  # for redis to answer


@dataclass(frozen=True, slots=True)
class SharingReport:
    """For metrics. All but the first three count from the start."""

    state: SharingState
    peers: int
    remote_open: int  # placements of peers that are reserved here
    batches_sent: int
    batches_received: int  # of peers
    messages_dropped: int  # not sent, or not known to have arrived
    gaps: int
    malformed: int


class Sharing:
    """Use `policy` in place of the one that was given, and keep `run` running."""

    def __init__(
        self,
        url: str,
        policy: Policy,
        *,
        router: str,
        incarnation: int,
        rng: random.Random,
        channel: str = CHANNEL,
        times: SharingTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            url: redis://, rediss:// or unix://.
            router: A name of this process that no other of the fleet has. A restarted one may take it again.
            incarnation: Unix nanoseconds of the start.
            clock: The one whose times `policy` is given by others too.
        """
        self._url = url
        self._channel = channel
        self._times = times or SharingTimes()
        self._rng = rng
        self._clock = clock
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._outbox = Outbox(router, incarnation, with_prompt=policy.uses_prompt, wake=self._wake)
        self.policy = SharedPolicy(policy, self._outbox)
        self._peers = Peers(
            policy, router=router, incarnation=incarnation, knows=self.policy.knows, silent_s=self._times.silent
        )
        self._on_news: Callable[[], None] = lambda: None
        self._is_publishing = False
        self._hears_itself = False
        self._warned: set[str] = set()
        self._sent = 0
        self._received = 0
        self._malformed = 0

    @property
    def state(self) -> SharingState:
        return SharingState.JOINED if self._is_publishing and self._hears_itself else SharingState.LOST

    def report(self) -> SharingReport:
        return SharingReport(
            state=self.state,
            peers=self._peers.count,
            remote_open=self._peers.open,
            batches_sent=self._sent,
            batches_received=self._received,
            messages_dropped=self._outbox.dropped,
            gaps=self._peers.gaps,
            malformed=self._malformed + self._peers.refused,
        )

    async def run(self, on_news: Callable[[], None] = lambda: None) -> None:
        """Shares until cancelled, then says goodbye. Redis may come and go.

        `on_news` is called when something may have ended elsewhere: who waits for a replica can look again.
        """
        self._on_news = on_news
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep(self._publish, "sending"), name="placements to peers")
                tasks.create_task(self._keep(self._subscribe, "hearing"), name="placements of peers")
                tasks.create_task(self._tick(), name="sweep of the peers")
        finally:
            self._outbox.shut()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._peers.close(self._clock())

    async def _keep(self, session: Callable[[], Coroutine[Any, Any, NoReturn]], what: str) -> NoReturn:
        """One session after the other, with growing pauses while they fail at once."""
        pause_s = BACKOFF_FIRST_S
        while True:
            began = self._clock()
            try:
                await session()
            except (RedisError, OSError, TimeoutError, ValueError) as error:  # ValueError: an address that is none
                _heed_cancellation()  # closing the connection failed too
                self._warn_once(
                    what,
                    "placements are not shared, %s fails: redis at %s: %s",
                    what,
                    _place(self._url),
                    str(error) or "no answer",
                )
            except Exception:  # a fault of ours in a message costs what waited, and must not end the requests that run
                _heed_cancellation()
                log.exception("placements could not be shared, %s is begun anew", what)
            if self._clock() - began > BACKOFF_MAX_S:
                pause_s = BACKOFF_FIRST_S
            await asyncio.sleep(pause_s * (0.5 + self._rng.random()))
            pause_s = min(2 * pause_s, BACKOFF_MAX_S)

    async def _publish(self) -> NoReturn:
        async with self._client(self._times.command) as client:
            async with asyncio.timeout(self._times.command):
                await client.ping()
            _heed_cancellation()
            self._is_publishing = True
            self._outbox.open_up()
            try:
                while True:
                    await self._due.wait()
                    self._due.clear()
                    await self._send(client, self._outbox.take(self._clock()))
                    _heed_cancellation()
            except asyncio.CancelledError:
                with suppress(RedisError, OSError, TimeoutError):
                    await self._send(client, self._outbox.take(self._clock(), last=True))
                raise
            finally:
                self._is_publishing = False
                self._outbox.shut()

    async def _send(self, client: Redis, payload: bytes) -> None:
        async with asyncio.timeout(self._times.command):
            await client.publish(self._channel, payload)
        self._sent += 1

    async def _subscribe(self) -> NoReturn:
        loop = asyncio.get_running_loop()
        try:
            async with self._client(None) as client, client.pubsub() as subscription:
                async with asyncio.timeout(self._times.command):
                    await subscription.subscribe(self._channel)
                _heed_cancellation()
                # Our own snapshots come back too: when nothing does, the connection is dead, whatever TCP thinks of it.
                async with asyncio.timeout(self._times.silent) as deadline:
                    while True:
                        message = await subscription.get_message(timeout=None)
                        if message is None:
                            continue
                        if message["type"] == "subscribe":
                            self._outbox.hello()
                        elif message["type"] == "message" and self._receive(message["data"]):
                            deadline.reschedule(loop.time() + self._times.silent)
        finally:
            self._hears_itself = False

    def _receive(self, payload: bytes) -> bool:
        """Whether it was our own, come back."""
        try:
            heard = self._peers.receive(payload, self._clock())
        except Malformed as error:
            self._malformed += 1
            self._warn_once("malformed", "a message on %s was left out: %s", self._channel, error)
            return False
        except Exception:  # a fault of ours must not cut us off from the others; their next snapshot mends what it broke
            log.exception("a batch of another router could not be taken")
            return False
        if heard is Heard.OWN:
            if not self._hears_itself:
                self._hears_itself = True
                self._warned.clear()
                log.info("placements are shared over redis at %s", _place(self._url))
            return True
        self._received += 1
        self._on_news()
        if heard is Heard.HELLO:
            self._outbox.snapshot()
        elif heard is Heard.CLASH:
            self._warn_once("clash", "another router on %s has the name of one that runs: give each its own", self._channel)
        elif heard is Heard.CROWD:
            self._warn_once("crowd", "more routers on %s than are listened to: use a channel for each fleet", self._channel)
        return False

    async def _tick(self) -> NoReturn:
        tick_s = min(self._times.snapshot, self._times.silent / 5)
        due = 0.0
        while True:
            now = self._clock()
            before = self._peers.open
            self._peers.tick(now)
            if self._peers.open < before:
                self._on_news()
            if now >= due:
                due = now + self._times.snapshot
                self._outbox.snapshot()
            await asyncio.sleep(tick_s)

    def _wake(self, is_much: bool) -> None:
        if is_much:
            self._flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._times.flush, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due.set()

    def _client(self, timeout_s: float | None) -> Redis:
        """`timeout_s`: for one answer; None where messages are waited for."""
        return Redis.from_url(
            self._url,
            protocol=2,
            socket_timeout=timeout_s,
            socket_connect_timeout=self._times.command,
            retry=Retry(NoBackoff(), 0),
        )

    def _warn_once(self, kind: str, message: str, *values: object) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(message, *values)


def _heed_cancellation() -> None:
    """Raises CancelledError again where asyncio.wait_for, inside the client, has swallowed it, as it may before Python 3.12."""
    task = asyncio.current_task()
    if task is not None and task.cancelling() > 0:
        raise asyncio.CancelledError


def _place(url: str) -> str:
    """Where it is, without the password and whatever else the URL holds."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    return f"{parts.hostname}:{parts.port or 6379}"
