"""The other routers of the fleet: their open placements, reserved in our policy too, and when they end.

A peer's placement ends here exactly once: when it says so, when its next snapshot no longer lists it, when a batch of its was
lost, when it starts anew, stops or falls silent, or when it has more open than are kept. Whatever was lost, its next snapshot
restores what is really open.
"""

import enum
from collections.abc import Callable, Mapping, Sequence

from protocol.usage import Usage
from router.policy.interface import PlacementRequest, Policy, Ticket
from router.policy.prompt import chunks_in
from router.state.peer_messages import (
    Bye,
    Ended,
    FirstToken,
    Header,
    Hello,
    Malformed,
    Message,
    Placed,
    Snapshot,
    decode_header,
    decode_messages,
    decode_placed,
)
from router.types import ReplicaId

OPEN_MAX = 10_000  # placements kept of each peer
PEERS_MAX = 256
AGE_MAX_S = 7 * 86400.0


class Heard(enum.Enum):
    """What a payload was."""

    OWN = enum.auto()  # our own, come back: the way to the others is open
    NEWS = enum.auto()
    HELLO = enum.auto()  # news, and its router asks for a snapshot
    OLD = enum.auto()  # overtaken by a later one, so nothing of it holds any more
    CLASH = enum.auto()  # of another process that has the same name as one that lives
    CROWD = enum.auto()  # of one router more than we listen to


class HashedPrompt:
    """A prompt of which only hashes are known: `chunks` as in `Prompt`, and by size those `digests` that were sent along."""

    __slots__ = ("_digests", "chunks", "size")

    def __init__(self, chunks: Sequence[int], size: int, digests: Mapping[int, int]) -> None:
        self.chunks = chunks
        self.size = size
        self._digests = digests

    def digest(self, size: int) -> int:
        """0 where it is not known."""
        return self._digests.get(size, 0)


def _bounded(seconds: float) -> float:
    """0 for what no clock can have said."""
    return seconds if 0.0 <= seconds <= AGE_MAX_S else 0.0


class _Peer:
    __slots__ = ("heard", "incarnation", "open", "seq", "started")

    def __init__(self, incarnation: int, seq: int, now: float) -> None:
        self.incarnation = incarnation
        self.seq = seq
        self.heard = now
        self.open: dict[int, Ticket] = {}  # oldest first
        self.started: set[int] = set()  # keys of those whose first token has come


class Peers:
    """Times are seconds of one monotonic clock, and only ours: those of other machines say nothing here."""

    def __init__(
        self,
        policy: Policy,
        *,
        router: str,
        incarnation: int,
        knows: Callable[[ReplicaId], bool],
        silent_s: float = 5.0,
        open_max: int = OPEN_MAX,
    ) -> None:
        """`router` and `incarnation` are ours. Placements on replicas that we do not know are left out until we do."""
        self._policy = policy
        self._router = router
        self._incarnation = incarnation
        self._knows = knows
        self._silent_s = silent_s
        self._open_max = open_max
        self._peers: dict[str, _Peer] = {}
        self.gaps = 0  # batches lost, or several in a row
        self.overflowed = 0  # placements ended because their router has too many
        self.refused = 0  # placements whose fields contradict each other

    @property
    def count(self) -> int:
        return len(self._peers)

    @property
    def open(self) -> int:
        """Placements of others that are reserved in our policy now."""
        return sum(len(peer.open) for peer in self._peers.values())

    def receive(self, payload: bytes, now: float) -> Heard:
        """Raises Malformed; the batch counts as lost then."""
        header = decode_header(payload)
        if header.router == self._router:
            if header.incarnation == self._incarnation:
                return Heard.OWN
            return Heard.CLASH if header.incarnation > self._incarnation else Heard.OLD
        peer = self._peers.get(header.router)
        if peer is not None:
            if header.incarnation < peer.incarnation:
                return Heard.CLASH
            if header.incarnation == peer.incarnation and header.seq <= peer.seq:
                return Heard.OLD
        messages = decode_messages(header)
        if peer is None:
            if len(self._peers) >= PEERS_MAX:
                return Heard.CROWD
            peer = self._peers[header.router] = _Peer(header.incarnation, header.seq, now)
        else:
            self._follow(peer, header, now)
        heard = Heard.NEWS
        for message in messages:
            if isinstance(message, Hello):
                heard = Heard.HELLO
            elif isinstance(message, Bye):
                self._end_all(peer, now)
                del self._peers[header.router]
                break
            else:
                self._take(peer, message, now)
        return heard

    def tick(self, now: float) -> None:
        """Forgets the peers that have been silent for too long."""
        for router, peer in list(self._peers.items()):
            if now - peer.heard > self._silent_s:
                self._end_all(peer, now)
                del self._peers[router]

    def close(self, now: float) -> None:
        """Ends all that is open."""
        for peer in self._peers.values():
            self._end_all(peer, now)
        self._peers.clear()

    def _follow(self, peer: _Peer, header: Header, now: float) -> None:
        if header.incarnation != peer.incarnation:
            self._end_all(peer, now)
        elif header.seq != peer.seq + 1:
            self.gaps += 1
            self._end_all(peer, now)
        peer.incarnation, peer.seq, peer.heard = header.incarnation, header.seq, now

    def _take(self, peer: _Peer, message: Message, now: float) -> None:
        if isinstance(message, Placed):
            self._adopt(peer, message.key, message, now)
        elif isinstance(message, FirstToken):
            self._first_token(peer, message.key, now)
        elif isinstance(message, Ended):
            self._end(peer, message.key, message.usage, now)
        elif isinstance(message, Snapshot):
            self._reconcile(peer, message, now)

    def _reconcile(self, peer: _Peer, snapshot: Snapshot, now: float) -> None:
        listed = {entry.key: entry for entry in snapshot.open[-self._open_max :]}
        for key in [key for key in peer.open if key not in listed]:
            self._end(peer, key, None, now)
        for key, entry in listed.items():
            if key not in peer.open:
                try:
                    self._adopt(peer, key, decode_placed(entry), now, age_s=_bounded(entry.age_s))
                except Malformed:
                    self.refused += 1
            if entry.first_token_s is not None:
                # When it was, not when we hear of it: a policy learns from how long it took.
                self._first_token(peer, key, now - _bounded(entry.age_s - entry.first_token_s))

    def _adopt(self, peer: _Peer, key: int, placed: Placed, now: float, *, age_s: float = 0.0) -> None:
        replica = ReplicaId(placed.replica)
        if key in peer.open or not self._knows(replica):
            return
        if placed.chunks and len(placed.chunks) != chunks_in(placed.size):
            self.refused += 1
            return
        if len(peer.open) >= self._open_max:
            self.overflowed += 1
            self._end(peer, next(iter(peer.open)), None, now)
        request = PlacementRequest(
            placed.model,
            HashedPrompt(placed.chunks, placed.size, {placed.size: placed.digest}),
            tenant=placed.tenant,
            affinity=placed.affinity,
            priority=placed.priority,
            output_max=placed.output_max,
            streams=placed.streams,
        )
        peer.open[key] = self._policy.adopt(request, replica, placed.rank, now - age_s)

    def _first_token(self, peer: _Peer, key: int, now: float) -> None:
        ticket = peer.open.get(key)
        if ticket is not None and key not in peer.started:
            peer.started.add(key)
            self._policy.first_token(ticket, now)

    def _end(self, peer: _Peer, key: int, usage: Usage | None, now: float) -> None:
        ticket = peer.open.pop(key, None)
        if ticket is not None:
            peer.started.discard(key)
            self._policy.ended(ticket, usage, now)

    def _end_all(self, peer: _Peer, now: float) -> None:
        for key in list(peer.open):
            self._end(peer, key, None, now)
