"""One source of KV events: which blocks its engine holds, and how far that can be trusted.

Pure and synchronous; `router/edge/kv_events.py` has the sockets. Never is a block credited that may be gone: where something
was missed for good, all that was known before is forgotten.
"""

import enum
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from xxhash import xxh3_64_intdigest

from router.state.kv_blocks import CAPACITY_BLOCKS_DEFAULT, HeldBlocks
from router.state.kv_wire import AllBlocksCleared, BlockRemoved, KvEvent, decode_batch, is_in_gpu_memory
from router.types import ReplicaId

# Messages whose fingerprints are kept, to tell one that comes twice from one of an engine that was started anew.
RECENT_MAX = 4096


class KvMode(enum.StrEnum):
    """What is known of what a source holds."""

    OFF = "off"  # its engine offers no events
    JOINING = "joining"  # nothing was heard of it yet
    LIVE = "live"  # all that it holds
    PARTIAL = "partial"  # only what it stored since it was first heard, or since something was missed
    SUSPENDED = "suspended"  # something may have been missed, and it is not settled yet what


class KvSink(Protocol):
    """Who is told. A source is one data-parallel rank of a replica; times are seconds of one monotonic clock."""

    def stored(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        """Blocks that it holds from now on."""

    def evicted(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        """Blocks that it holds no longer."""

    def cleared(self, replica: ReplicaId, rank: int, now: float) -> None:
        """It holds nothing: its engine was started anew, or told to forget."""

    def forgotten(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        """Blocks of which is not known any more whether it holds them. It may."""

    def mode_changed(self, replica: ReplicaId, rank: int, mode: KvMode, reason: str) -> None:
        """How far it can be trusted from now on."""


class Received(enum.Enum):
    """What became of a message."""

    APPLIED = enum.auto()
    DUPLICATE = enum.auto()
    GAP = enum.auto()  # not applied: what came before it is missing


class Replayed(enum.Enum):
    """What a replay has brought."""

    CLOSED = enum.auto()  # nothing is missing any more
    AGAIN = enum.auto()  # a part of what is missing; ask for the rest
    LOST = enum.auto()  # nothing of what is missing


class KvSource:
    """Fed with a source's messages in the order of their arrival.

    Messages are numbered from 0 by each start of an engine. `receive` takes those that the engine publishes. Where it finds a
    gap, a replay is fed in between `begin_replay` and `end_replay`; if that did not help, `skip_to` goes on without.
    """

    def __init__(self, replica: ReplicaId, rank: int, sink: KvSink, capacity_blocks: int = CAPACITY_BLOCKS_DEFAULT) -> None:
        self.replica = replica
        self.rank = rank
        self.mode = KvMode.JOINING
        self.next_seq = 0
        self.heard_at: float | None = None  # when the last message came
        # How often each has happened; they only rise.
        self.messages = 0
        self.malformed = 0
        self.gaps = 0
        self.losses = 0  # of what was known, or might have been, because something was missed for good
        self.restarts = 0
        self.unrooted = 0  # blocks that cannot be keyed, since what comes before them is not known
        self._sink = sink
        self._held = HeldBlocks(capacity_blocks)
        self._is_complete = True  # nothing was missed since its cache was empty
        self._must_verify = False  # the connection broke: it may be another start of the engine
        self._recent: deque[int] = deque(maxlen=RECENT_MAX)  # fingerprints of the messages before `next_seq`
        self._replay_is_first = self._replay_is_verified = self._replay_has_hole = self._replay_is_other = False
        self._replay_begins_at = 0

    def __repr__(self) -> str:
        return f"<KvSource {self.replica}/{self.rank} {self.mode} blocks={self.blocks} next={self.next_seq}>"

    @property
    def blocks(self) -> int:
        """How many are known to be held."""
        return len(self._held)

    @property
    def capacity_blocks(self) -> int:
        """The most that its engine can hold, and so the most that is kept here."""
        return self._held.capacity

    @capacity_blocks.setter
    def capacity_blocks(self, blocks: int) -> None:
        self._held.capacity = blocks

    def resident(self, keys: Sequence[int]) -> int | None:
        """How many of a prompt's first blocks are held; while partial at least so many. None: not known."""
        if self.mode is KvMode.LIVE:
            return self._held.leading(keys)
        if self.mode is KvMode.PARTIAL:
            return self._held.leading(keys) or None
        return None

    # Messages as they are published

    def receive(self, seq: int, payload: bytes, now: float) -> Received:
        self.heard_at = now
        if seq < self.next_seq:
            if self._is_recent(seq, payload):
                return Received.DUPLICATE
            self._restart(now)
        if seq > self.next_seq or self._must_verify:
            if self.mode is KvMode.LIVE or self.mode is KvMode.PARTIAL:
                self.gaps += 1
            self._suspend(f"message {seq} came where {self.next_seq} was due")
            return Received.GAP
        self._apply(payload, now)
        self._settle()
        return Received.APPLIED

    def receive_garbage(self) -> None:
        """A message came whose number cannot be read."""
        self.malformed += 1
        self._suspend("a message could not be read")

    def disconnected(self) -> None:
        """What comes next may be of another start of the engine."""
        self._must_verify = self.next_seq > 0
        self._suspend("the connection to its publisher is lost")

    def skip_to(self, seq: int, now: float) -> None:
        """Goes on with message `seq`, without those before it that are missing."""
        if seq == 0:
            return
        self._lose(now)
        self.next_seq = seq
        self._recent.clear()
        self._must_verify = False

    def forget(self, now: float) -> None:
        """Begins anew with what is published next, or with a replay."""
        self._lose(now)
        self._begin()

    # Messages that are asked for again

    def begin_replay(self) -> int:
        """Number of the message to ask from: the last that was heard, if any, which shows whether the engine is the same."""
        self._replay_is_first = True
        self._replay_is_verified = not self._recent
        self._replay_has_hole = self._replay_is_other = False
        self._replay_begins_at = self.next_seq
        return max(0, self.next_seq - 1)

    def receive_replayed(self, seq: int, payload: bytes, now: float, until: int | None = None) -> None:
        """`until`: number of a message that has come already and is received afterwards."""
        if self._replay_is_other or (until is not None and seq >= until):
            return
        is_first, self._replay_is_first = self._replay_is_first, False
        if seq < self.next_seq:
            if seq == self.next_seq - 1:
                self._replay_is_verified = self._is_recent(seq, payload)
                self._replay_is_other = not self._replay_is_verified
        elif seq == self.next_seq and self._replay_is_verified:
            self._apply(payload, now)
        elif is_first:
            # The engine keeps only so many, and the one that was asked for is not among them any more.
            self.skip_to(seq, now)
            self._replay_is_verified = True
            self._apply(payload, now)
        else:
            self._replay_has_hole = True

    def end_replay(self, now: float, *, is_whole: bool, until: int | None = None) -> Replayed:
        """`is_whole`: the engine has said that this was all of it."""
        if self._replay_is_other or (is_whole and self._replay_is_first and self.next_seq > 0 and until is None):
            # Not the messages that were heard, or fewer of them: another start of the engine.
            self._restart(now)
            return Replayed.AGAIN
        has_all = is_whole and not self._replay_has_hole and self._replay_is_verified
        if has_all and (until is None or until == self.next_seq):
            self._must_verify = False
            self._settle()
            return Replayed.CLOSED
        return Replayed.AGAIN if self.next_seq > self._replay_begins_at else Replayed.LOST

    # Inside

    def _is_recent(self, seq: int, payload: bytes) -> bool:
        """Whether this very message was applied before. `seq` is below `next_seq`."""
        back = self.next_seq - seq
        return back <= len(self._recent) and self._recent[-back] == xxh3_64_intdigest(payload)

    def _apply(self, payload: bytes, now: float) -> None:
        """Takes in the message that is due."""
        self.messages += 1
        self.next_seq += 1
        self._recent.append(xxh3_64_intdigest(payload))
        try:
            for event in decode_batch(payload):
                self._take(event, now)
        except (ValueError, OverflowError):
            self.malformed += 1
            self._lose(now)

    def _take(self, event: KvEvent, now: float) -> None:
        if isinstance(event, AllBlocksCleared):
            self._held.clear()
            self._is_complete = True
            self._sink.cleared(self.replica, self.rank, now)
        elif not is_in_gpu_memory(event):
            pass
        elif isinstance(event, BlockRemoved):
            if evicted := self._held.remove(event):
                self._sink.evicted(self.replica, self.rank, evicted, now)
        else:
            stored = self._held.store(event)
            self.unrooted += stored.unrooted
            if stored.keys:
                self._sink.stored(self.replica, self.rank, stored.keys, now)
            if stored.surplus:
                self._sink.forgotten(self.replica, self.rank, stored.surplus, now)

    def _restart(self, now: float) -> None:
        """The engine was started anew, so its cache was empty then."""
        self.restarts += 1
        self._held.clear()
        self._sink.cleared(self.replica, self.rank, now)
        self._begin()

    def _begin(self) -> None:
        self.next_seq = 0
        self._recent.clear()
        self._must_verify = False
        self._is_complete = True
        self._set_mode(KvMode.JOINING, "its messages begin anew")

    def _lose(self, now: float) -> None:
        """Something was missed: what was known may not be true any more."""
        self.losses += 1
        self._is_complete = False
        if lost := self._held.clear():
            self._sink.forgotten(self.replica, self.rank, lost, now)

    def _suspend(self, reason: str) -> None:
        if self.mode is not KvMode.JOINING:
            self._set_mode(KvMode.SUSPENDED, reason)

    def _settle(self) -> None:
        if self._is_complete and self._held.is_exact:
            self._set_mode(KvMode.LIVE, "nothing is missing")
        else:
            self._set_mode(KvMode.PARTIAL, "what came before is not known")

    def _set_mode(self, mode: KvMode, reason: str) -> None:
        if mode is not self.mode:
            self.mode = mode
            self._sink.mode_changed(self.replica, self.rank, mode, reason)
