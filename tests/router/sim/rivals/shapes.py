"""Requests and targets as the tests of the rivals need them."""

import random
from collections.abc import Sequence

from router.policy.interface import PlacementRequest, Ticket
from router.policy.prompt import BytesPrompt
from router.sim.rivals.ledger import Target
from router.sim.rivals.rival import Rival
from router.types import ReplicaId

A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")
TARGETS: list[Target] = [(A, 0), (B, 0), (C, 0)]


def chain(name: int, blocks: int) -> list[int]:
    """Block hashes of one text; two chains of a name share as much as the shorter one has."""
    return [name * 1_000_000 + block for block in range(1, blocks + 1)]


def request(blocks: Sequence[int] = (), *, tokens: int | None = None, affinity: str | None = None) -> PlacementRequest:
    """Of `tokens` (4 bytes each), or of as many as the blocks hold."""
    size = 4 * (16 * len(blocks) if tokens is None else tokens)
    return PlacementRequest("m", BytesPrompt(b"x" * size, 0), affinity=affinity, blocks=blocks)


def put(policy: Rival, replica: ReplicaId, *requests: PlacementRequest, now: float = 0.0) -> list[Ticket]:
    return [policy.adopt(each, replica, 0, now) for each in requests]


def chosen(
    policy: Rival, asked: PlacementRequest, *, now: float = 0.0, candidates: Sequence[ReplicaId] = (A, B, C)
) -> ReplicaId:
    """Where the policy would send it. Books nothing."""
    return policy.choose(asked, [(replica, 0) for replica in candidates], now)[0]


def rng() -> random.Random:
    return random.Random(1)
