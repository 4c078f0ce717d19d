"""Small workloads of plain token lists, and the hashes of their blocks."""

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise

from router.policy.interface import PlacementRequest, Policy, Ticket
from router.policy.prompt import BytesPrompt
from router.sim.request import SimRequest
from router.types import ReplicaId

BLOCK = 16


def block_hashes(tokens: Sequence[int], block: int = BLOCK) -> list[int]:
    hashes, digest = [], 0
    for end in range(block, len(tokens) + 1, block):
        digest = hash((digest, tuple(tokens[end - block : end])))
        hashes.append(digest)
    return hashes


def request_of(
    request_id: int,
    at: float,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    block: int = BLOCK,
    session: str = "",
    ttft_target_s: float = 2.0,
) -> SimRequest:
    """A request whose prompt and answer are these tokens."""
    hashes = block_hashes([*prompt, *answer], block)
    whole = len(prompt) // block
    return SimRequest(
        request_id,
        arrives_at=at,
        model="m",
        prompt=BytesPrompt(b"".join(token.to_bytes(8, "little") for token in prompt), 0),
        prompt_tokens=len(prompt),
        output_tokens=len(answer),
        blocks=hashes[:whole],
        answer_blocks=hashes[whole:],
        session=session,
        ttft_target_s=ttft_target_s,
    )


def fresh(rng: random.Random, count: int) -> list[int]:
    """Tokens that nothing else has."""
    return [rng.getrandbits(40) for _ in range(count)]


class OpenLoad:
    """Requests that come whatever becomes of others."""

    name = "open"

    def __init__(self, requests: Iterable[SimRequest], horizon_s: float = 60.0) -> None:
        self._requests = sorted(requests, key=lambda request: request.arrives_at)
        self.horizon_s = horizon_s

    def initial(self, rng: random.Random) -> Iterable[SimRequest]:
        return self._requests

    def follow_up(self, request: SimRequest, now: float, rng: random.Random) -> Sequence[SimRequest]:
        return ()


class SessionLoad:
    """Sessions whose every turn goes on from the turn before, `think_s` after its answer."""

    name = "sessions"
    horizon_s = 1e9

    def __init__(self, firsts: Sequence[SimRequest], turns: Sequence[Sequence[SimRequest]], think_s: float) -> None:
        self._firsts = sorted(firsts, key=lambda request: request.arrives_at)
        self._turns = {request.id: later for chain in turns for request, later in pairwise(chain)}
        self._think_s = think_s

    def initial(self, rng: random.Random) -> Iterable[SimRequest]:
        return self._firsts

    def follow_up(self, request: SimRequest, now: float, rng: random.Random) -> Sequence[SimRequest]:
        later = self._turns.get(request.id)
        if later is None:
            return ()
        later.arrives_at = now + self._think_s * (1 + later.id / 1000)  # no two at the same time
        return (later,)


class InTurn(Policy):
    """Round robin over replicas, and over the ranks of each."""

    def __init__(self, ranks: int = 1) -> None:
        self._placed = 0
        self._ranks = ranks

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket:
        number, self._placed = self._placed, self._placed + 1
        return Ticket(request, candidates[number % len(candidates)], number // len(candidates) % self._ranks)
