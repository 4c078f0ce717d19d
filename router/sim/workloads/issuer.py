"""Makes the requests of one sender of traffic: what they all have in common is said once."""

from collections.abc import Iterator
from random import Random

from router.policy.interface import Priority
from router.sim.prompts import Segment, SimPrompt, answer_blocks
from router.sim.request import SimRequest

MODEL = "sim"


class Issuer:
    """`ids` is shared by all issuers of a workload, so that ids stay unique."""

    def __init__(
        self,
        ids: Iterator[int],
        *,
        ttft_target_s: float,
        output_max: int,
        tenant: str = "",
        priority: Priority = Priority.DEFAULT,
    ) -> None:
        self._ids = ids
        self._ttft_target_s = ttft_target_s
        self._output_max = output_max
        self.tenant = tenant
        self._priority = priority

    def request(
        self,
        at: float,
        prompt: SimPrompt,
        answer: Segment,
        *,
        session: str = "",
        turn: int = 0,
        affinity: str | None = None,
    ) -> SimRequest:
        return SimRequest(
            next(self._ids),
            arrives_at=at,
            model=MODEL,
            prompt=prompt,
            prompt_tokens=prompt.tokens,
            output_tokens=answer.tokens,
            blocks=prompt.blocks,
            answer_blocks=answer_blocks(prompt, answer),
            tenant=self.tenant,
            session=session,
            turn=turn,
            affinity=affinity,
            priority=self._priority,
            output_max=max(self._output_max, answer.tokens),
            ttft_target_s=self._ttft_target_s,
        )


def segment(rng: Random, tokens: int) -> Segment:
    """Content that nothing else has."""
    return Segment(rng.getrandbits(64), tokens)
