"""Open-loop traffic of single requests: groups of users behind shared system prompts, down to one group or none."""

from collections.abc import Iterable, Sequence
from itertools import count
from random import Random
from typing import NamedTuple

from router.sim.prompts import CHAT_BYTES_PER_TOKEN, SimPrompt
from router.sim.request import SimRequest
from router.sim.workloads.draws import Skewed, arrivals
from router.sim.workloads.issuer import Issuer, segment


class Groups(NamedTuple):
    """`groups` system prompts, each with `users` prompts behind it."""

    groups: int
    users: int
    system_tokens: int
    question_tokens: int
    output_tokens: int


class Ladder:
    """llm-d's benchmark of prefix-aware routing: the prompts of all users in shuffled order, round and round, at rising rates.

    A prompt comes back unchanged, as in inference-perf's `shared_prefix` data.
    """

    def __init__(self, name: str, groups: Groups, rates: Sequence[float], horizon_s: float, ttft_target_s: float) -> None:
        self.name = name
        self.horizon_s = horizon_s
        self._groups = groups
        self._rates = rates
        self._issuer = Issuer(count(), ttft_target_s=ttft_target_s, output_max=groups.output_tokens)

    def initial(self, rng: Random) -> Iterable[SimRequest]:
        rng = Random(rng.getrandbits(64))
        prompts = self._prompts(rng)
        for number, at in enumerate(arrivals(self._rates, self.horizon_s, rng)):
            answer = segment(rng, self._groups.output_tokens)
            yield self._issuer.request(at, prompts[number % len(prompts)], answer)

    def follow_up(self, request: SimRequest, now: float, rng: Random) -> Sequence[SimRequest]:
        return ()

    def _prompts(self, rng: Random) -> list[SimPrompt]:
        shape = self._groups
        prompts = []
        for _ in range(shape.groups):
            system = SimPrompt.empty(CHAT_BYTES_PER_TOKEN).extended(segment(rng, shape.system_tokens))
            prompts += [system.extended(segment(rng, shape.question_tokens)) for _ in range(shape.users)]
        rng.shuffle(prompts)
        return prompts


class Singles:
    """Requests that have at most a common beginning of `shared_tokens`, at a constant rate."""

    def __init__(
        self,
        name: str,
        issuer: Issuer,
        *,
        rate: float,
        horizon_s: float,
        own_tokens: Skewed,
        output_tokens: Skewed,
        shared_tokens: int = 0,
    ) -> None:
        self.name = name
        self.horizon_s = horizon_s
        self._issuer = issuer
        self._rate = rate
        self._own_tokens = own_tokens
        self._output_tokens = output_tokens
        self._shared_tokens = shared_tokens

    def initial(self, rng: Random) -> Iterable[SimRequest]:
        rng = Random(rng.getrandbits(64))
        shared = SimPrompt.empty(CHAT_BYTES_PER_TOKEN).extended(segment(rng, self._shared_tokens))
        for at in arrivals((self._rate,), self.horizon_s, rng):
            prompt = shared.extended(segment(rng, self._own_tokens.tokens(rng)))
            yield self._issuer.request(at, prompt, segment(rng, self._output_tokens.tokens(rng)))

    def follow_up(self, request: SimRequest, now: float, rng: Random) -> Sequence[SimRequest]:
        return ()
