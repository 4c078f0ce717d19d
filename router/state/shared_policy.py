"""The router's own placements as its peers are to hear of them, and the policy that notes them there by itself."""

from collections.abc import Callable, Sequence

import msgspec

from protocol.usage import Usage
from router.policy.cost import CostTerms
from router.policy.interface import Coverage, EngineLoad, PlacementRequest, Policy, ReplicaFacts, Ticket
from router.state.peer_messages import (
    Bye,
    Ended,
    FirstToken,
    Hello,
    Listed,
    Message,
    Snapshot,
    encode_batch,
    placed,
)
from router.types import ReplicaId

WAITING_MAX = 10_000  # messages that a slow redis may leave waiting; beyond it they are dropped, and a snapshot follows
LARGE = 256  # messages that are sent without waiting for more


class _Open:
    __slots__ = ("encoded", "first_token_s", "key", "placed_at")

    def __init__(self, key: int, now: float) -> None:
        self.key = key
        self.placed_at = now
        self.first_token_s: float | None = None  # since then
        self.encoded: msgspec.Raw | None = None


class Outbox:
    """What is to be sent next. Noting a message costs no encoding: that is done for many at once in `take`.

    While it is shut nothing waits in it, and no request's prompt is held; the first batch after that begins with a snapshot.
    """

    def __init__(self, router: str, incarnation: int, *, with_prompt: bool, wake: Callable[[bool], None]) -> None:
        """`wake` is called when something waits; with True when it is much."""
        self._router = router
        self._incarnation = incarnation
        self._with_prompt = with_prompt
        self._wake = wake
        self._is_shut = True
        self._seq = 0
        self._key = 0
        self._open: dict[Ticket, _Open] = {}
        self._waiting: list[tuple[Ticket, _Open] | Message] = []
        self._wants_snapshot = False
        self.dropped = 0  # messages

    @property
    def open(self) -> int:
        """Our placements that have not ended."""
        return len(self._open)

    def placed(self, ticket: Ticket, now: float) -> None:
        self._key += 1
        entry = self._open[ticket] = _Open(self._key, now)
        self._add((ticket, entry))

    def first_token(self, ticket: Ticket, now: float) -> None:
        entry = self._open.get(ticket)
        if entry is not None:
            entry.first_token_s = now - entry.placed_at
            self._add(FirstToken(entry.key))

    def ended(self, ticket: Ticket, usage: Usage | None) -> None:
        entry = self._open.pop(ticket, None)
        if entry is None:
            return
        if usage is None:
            self._add(Ended(entry.key))
        else:
            self._add(Ended(entry.key, usage.prompt, usage.completion, usage.cached))

    def hello(self) -> None:
        self._add(Hello())

    def snapshot(self) -> None:
        """The next batch ends with a snapshot."""
        self._wants_snapshot = True
        if not self._is_shut:
            self._wake(False)

    def open_up(self) -> None:
        """The way to the peers is there. They are asked for what they have open, and told what we have."""
        self._is_shut = False
        self._wants_snapshot = True
        self.hello()

    def shut(self) -> None:
        """The way to the peers is lost, and what was sent last perhaps too."""
        self._is_shut = True
        self._drop()

    def take(self, now: float, *, last: bool = False) -> bytes:
        """The next batch. `last`: nothing will follow it."""
        messages: list[Message | msgspec.Raw] = [
            self._encoded(*message) if isinstance(message, tuple) else message for message in self._waiting
        ]
        self._waiting.clear()
        if last:
            messages.append(Bye())
        elif self._wants_snapshot:
            self._wants_snapshot = False
            messages.append(Snapshot(tuple(self._listed(*it, now) for it in self._open.items())))
        self._seq += 1
        return encode_batch(self._router, self._incarnation, self._seq, messages)

    def _listed(self, ticket: Ticket, entry: _Open, now: float) -> Listed:
        return Listed(entry.key, now - entry.placed_at, entry.first_token_s, self._encoded(ticket, entry))

    def _encoded(self, ticket: Ticket, entry: _Open) -> msgspec.Raw:
        if entry.encoded is None:
            entry.encoded = placed(entry.key, ticket, with_prompt=self._with_prompt)
        return entry.encoded

    def _add(self, message: tuple[Ticket, _Open] | Message) -> None:
        if self._is_shut:
            return
        if len(self._waiting) >= WAITING_MAX:
            self._drop()
            self._wants_snapshot = True
        self._waiting.append(message)
        waiting = len(self._waiting)
        if waiting == 1 or waiting == LARGE:
            self._wake(waiting == LARGE)

    def _drop(self) -> None:
        self.dropped += len(self._waiting)
        self._waiting.clear()
        self._seq += 1  # the peers shall notice


class SharedPolicy(Policy):
    """A policy whose every placement is noted for the peers. It decides nothing itself."""

    def __init__(self, policy: Policy, outbox: Outbox) -> None:
        self._policy = policy
        self._outbox = outbox
        self._known: set[ReplicaId] = set()
        self.uses_prompt = policy.uses_prompt

    def knows(self, replica: ReplicaId) -> bool:
        return replica in self._known

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket | None:
        ticket = self._policy.place(request, candidates, now)
        if ticket is not None:
            self._outbox.placed(ticket, now)
        return ticket

    def place_anyway(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket:
        ticket = self._policy.place_anyway(request, candidates, now)
        self._outbox.placed(ticket, now)
        return ticket

    def adopt(self, request: PlacementRequest, replica: ReplicaId, rank: int, now: float) -> Ticket:
        """For a rule of our own that leaves no choice: what peers have placed goes to the policy inside, and stays there."""
        ticket = self._policy.adopt(request, replica, rank, now)
        self._outbox.placed(ticket, now)
        return ticket

    def explain(self, request: PlacementRequest, candidates: Sequence[ReplicaId]) -> Sequence[CostTerms]:
        return self._policy.explain(request, candidates)

    def first_token(self, ticket: Ticket, now: float) -> None:
        self._policy.first_token(ticket, now)
        self._outbox.first_token(ticket, now)

    def ended(self, ticket: Ticket, usage: Usage | None, now: float) -> None:
        self._policy.ended(ticket, usage, now)
        self._outbox.ended(ticket, usage)

    def changed(self, facts: ReplicaFacts) -> None:
        self._known.add(facts.id)
        self._policy.changed(facts)

    def removed(self, replica: ReplicaId) -> None:
        self._known.discard(replica)
        self._policy.removed(replica)

    def restarted(self, replica: ReplicaId) -> None:
        self._policy.restarted(replica)

    def scraped(self, replica: ReplicaId, load: EngineLoad, now: float) -> None:
        self._policy.scraped(replica, load, now)

    def stored(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self._policy.stored(replica, rank, blocks, now)

    def evicted(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self._policy.evicted(replica, rank, blocks, now)

    def cleared(self, replica: ReplicaId, rank: int, now: float) -> None:
        self._policy.cleared(replica, rank, now)

    def forgotten(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self._policy.forgotten(replica, rank, blocks, now)

    def trusted(self, replica: ReplicaId, rank: int, coverage: Coverage) -> None:
        self._policy.trusted(replica, rank, coverage)
