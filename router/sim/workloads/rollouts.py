"""What a reinforcement-learning trainer sends: groups of identical prompts whose answers end at very different times."""

from collections.abc import Iterable, Sequence
from random import Random
from typing import NamedTuple

from router.sim.prompts import CHAT_BYTES_PER_TOKEN, SimPrompt
from router.sim.request import SimRequest
from router.sim.workloads.draws import Skewed
from router.sim.workloads.issuer import Issuer, segment


class GroupShape(NamedTuple):
    siblings: int
    burst_s: float  # within which the siblings are sent
    system_tokens: int  # shared by all groups
    prompt_tokens: Skewed
    output_tokens: Skewed


class RolloutGroups:
    """Closed loop: whenever a whole group fits below `in_flight` requests, one is sent, until the horizon.

    Siblings carry the group's name as session, since trainers know it, but do not send it.
    """

    def __init__(self, name: str, issuer: Issuer, shape: GroupShape, *, in_flight: int, horizon_s: float) -> None:
        self.name = name
        self.horizon_s = horizon_s
        self._issuer = issuer
        self._shape = shape
        self._target = max(in_flight, shape.siblings)
        self._in_flight = 0
        self._groups = 0
        self._rng = Random()
        self._system = SimPrompt.empty(CHAT_BYTES_PER_TOKEN)

    def initial(self, rng: Random) -> Iterable[SimRequest]:
        # Of its own, so that the same groups come whatever the order in which a policy lets them end.
        self._rng = Random(rng.getrandbits(64))
        self._system = self._system.extended(segment(self._rng, self._shape.system_tokens))
        return sorted(self._refilled(0.0), key=lambda request: request.arrives_at)

    def follow_up(self, request: SimRequest, now: float, rng: Random) -> Sequence[SimRequest]:
        self._in_flight -= 1
        return self._refilled(now) if now < self.horizon_s else ()

    def _refilled(self, now: float) -> list[SimRequest]:
        sent: list[SimRequest] = []
        while self._in_flight + self._shape.siblings <= self._target:
            sent += self._group(now)
            self._in_flight += self._shape.siblings
        return sent

    def _group(self, now: float) -> list[SimRequest]:
        shape, rng = self._shape, self._rng
        name = f"{self.name}-{self._groups}"
        self._groups += 1
        prompt = self._system.extended(segment(rng, shape.prompt_tokens.tokens(rng)))
        times = sorted(now + rng.random() * shape.burst_s for _ in range(shape.siblings))
        return [self._issuer.request(at, prompt, segment(rng, shape.output_tokens.tokens(rng)), session=name) for at in times]
