"""What all rivals share: they know the ranks behind a port, and count their own requests on each."""

import random
from collections.abc import Sequence

from protocol.usage import Usage
from router.policy.interface import PlacementRequest, Policy, ReplicaFacts, Ticket
from router.sim.rivals.ledger import Ledger, Target
from router.sim.rivals.prefix import BLOCK_TOKENS
from router.types import ReplicaId


class Rival(Policy):
    """Chooses a target, then books the request there. A subclass chooses, and learns from what was booked."""

    uses_prompt = True

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ranks: dict[ReplicaId, int] = {}
        self._block_tokens = BLOCK_TOKENS  # all replicas of one simulation have the same, or hashes could not be compared
        self.requests = Ledger()

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket:
        ranks = self._ranks
        targets = [(replica, rank) for replica in candidates for rank in range(ranks.get(replica, 1))]
        replica, rank = self.choose(request, targets, now)
        return self.adopt(request, replica, rank, now)

    def adopt(self, request: PlacementRequest, replica: ReplicaId, rank: int, now: float) -> Ticket:
        ticket = Ticket(request, replica, rank)
        self.requests.book(ticket, 1)
        self.booked(ticket, (replica, rank), now)
        return ticket

    def choose(self, request: PlacementRequest, targets: Sequence[Target], now: float) -> Target:
        raise NotImplementedError

    def booked(self, ticket: Ticket, target: Target, now: float) -> None:
        """Reserves and remembers whatever later choices depend on."""

    def ended(self, ticket: Ticket, usage: Usage | None, now: float) -> None:
        self.requests.settle(ticket)

    def changed(self, facts: ReplicaFacts) -> None:
        self._ranks[facts.id] = max(1, facts.ranks)
        if facts.kv_block_tokens:
            self._block_tokens = facts.kv_block_tokens

    def removed(self, replica: ReplicaId) -> None:
        self._ranks.pop(replica, None)
