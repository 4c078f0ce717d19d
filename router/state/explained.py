"""A policy that explains some of its placements: how the costs of all candidates stood in the moment of the choice."""

from collections.abc import Sequence

from protocol.usage import Usage
from router.policy.interface import PlacementRequest, Policy, Ticket
from router.types import ReplicaId

# Explaining costs about as much as deciding, so that not every placement is explained.
SAMPLE_EVERY_S = 0.05
# Nothing was placed: the next one is tried soon. When many wait, most tries are of that kind.
RETRY_AFTER_S = SAMPLE_EVERY_S / 4


class Explained(Policy):
    """Stands where requests are placed. It decides nothing itself; what it notes is in `Ticket.terms`."""

    def __init__(self, policy: Policy, *, always: bool) -> None:
        """`always`: each placement is explained, and not only 20 a second."""
        self._policy = policy
        self._always = always
        self._next_at = 0.0
        self.uses_prompt = policy.uses_prompt

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket | None:
        if now < self._next_at and not self._always:
            return self._policy.place(request, candidates, now)
        terms = self._policy.explain(request, candidates)  # before the placement changes them
        ticket = self._policy.place(request, candidates, now)
        if ticket is None:
            self._next_at = now + RETRY_AFTER_S
        else:
            self._next_at = now + SAMPLE_EVERY_S
            ticket.terms = terms
        return ticket

    def place_anyway(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket:
        terms = self._policy.explain(request, candidates) if self._always else ()
        ticket = self._policy.place_anyway(request, candidates, now)
        ticket.terms = terms
        return ticket

    def adopt(self, request: PlacementRequest, replica: ReplicaId, rank: int, now: float) -> Ticket:
        terms = self._policy.explain(request, (replica,)) if self._always else ()
        ticket = self._policy.adopt(request, replica, rank, now)
        ticket.terms = terms
        return ticket

    def first_token(self, ticket: Ticket, now: float) -> None:
        self._policy.first_token(ticket, now)

    def ended(self, ticket: Ticket, usage: Usage | None, now: float) -> None:
        self._policy.ended(ticket, usage, now)
