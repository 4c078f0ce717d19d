"""What the requests in flight add up to on each replica."""

from typing import TypeAlias

from router.policy.interface import Ticket
from router.types import ReplicaId

Target: TypeAlias = tuple[
    ReplicaId, int
]  # a replica and the data-parallel rank behind its port: what has a KV cache and a queue


class Ledger:
    """Amounts that open tickets hold on their targets: requests, tokens or blocks. What is settled twice is settled once."""

    def __init__(self) -> None:
        self._held: dict[Ticket, int] = {}
        self._sums: dict[Target, int] = {}

    def book(self, ticket: Ticket, amount: int) -> None:
        target = (ticket.replica, ticket.rank)
        self._held[ticket] = amount
        self._sums[target] = self._sums.get(target, 0) + amount

    def settle(self, ticket: Ticket) -> int:
        """What the ticket held until now."""
        amount = self._held.pop(ticket, None)
        if amount is None:
            return 0
        target = (ticket.replica, ticket.rank)
        left = self._sums.get(target, 0) - amount
        if left:
            self._sums[target] = left
        else:
            self._sums.pop(target, None)
        return amount

    def on(self, target: Target) -> int:
        return self._sums.get(target, 0)
