"""A policy that places like least_loaded and remembers what it was told, so that a test can compare two routers."""

from collections import Counter
from collections.abc import Sequence

from protocol.usage import Usage
from router.policy.interface import PlacementRequest, Policy, Ticket
from router.policy.prompt import BytesPrompt
from router.types import ReplicaId

A, B = ReplicaId("a:1"), ReplicaId("b:1")


class RecordingPolicy(Policy):
    uses_prompt = True

    def __init__(self) -> None:
        self.in_flight: Counter[ReplicaId] = Counter()
        self.open: dict[Ticket, bool] = {}  # whether the first token has come
        self.placed_at: dict[Ticket, float] = {}
        self.first_tokens: list[float] = []  # seconds that each took
        self.adopted: list[PlacementRequest] = []
        self.usages: list[Usage | None] = []  # of those that ended

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket | None:
        return self._reserve(Ticket(request, min(candidates, key=lambda candidate: self.in_flight[candidate])), now)

    def adopt(self, request: PlacementRequest, replica: ReplicaId, rank: int, now: float) -> Ticket:
        self.adopted.append(request)
        return self._reserve(Ticket(request, replica, rank), now)

    def first_token(self, ticket: Ticket, now: float) -> None:
        assert not self.open[ticket], "a first token came twice"
        self.open[ticket] = True
        self.first_tokens.append(now - self.placed_at[ticket])

    def ended(self, ticket: Ticket, usage: Usage | None, now: float) -> None:
        del self.open[ticket], self.placed_at[ticket]  # KeyError: it ended twice
        self.in_flight[ticket.replica] -= 1
        self.usages.append(usage)

    def _reserve(self, ticket: Ticket, now: float) -> Ticket:
        self.placed_at[ticket] = now
        self.in_flight[ticket.replica] += 1
        self.open[ticket] = False
        return ticket


def request(text: str = "x" * 1000, *, tenant: str = "", affinity: str | None = None) -> PlacementRequest:
    return PlacementRequest("m", BytesPrompt(text.encode(), 7), tenant=tenant, affinity=affinity, output_max=99)
