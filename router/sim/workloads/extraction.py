"""Bulk jobs: the same instructions before one document after another, with short answers."""

from collections.abc import Iterable, Sequence
from random import Random
from typing import NamedTuple

from router.sim.prompts import CHAT_BYTES_PER_TOKEN, SimPrompt
from router.sim.request import SimRequest
from router.sim.workloads.draws import Skewed, arrivals
from router.sim.workloads.issuer import Issuer, segment


class JobShape(NamedTuple):
    jobs: int  # running at any time; one that is through is followed by another
    template_tokens: Skewed
    documents: Skewed  # of one job
    document_tokens: Skewed
    output_tokens: Skewed


class _Job:
    __slots__ = ("left", "template")

    def __init__(self, rng: Random, shape: JobShape) -> None:
        self.template = SimPrompt.empty(CHAT_BYTES_PER_TOKEN).extended(segment(rng, shape.template_tokens.tokens(rng)))
        self.left = shape.documents.tokens(rng)


class Extraction:
    """Requests come as a Poisson process, each of a running job picked at random."""

    def __init__(self, name: str, issuer: Issuer, shape: JobShape, *, rate: float, horizon_s: float) -> None:
        self.name = name
        self.horizon_s = horizon_s
        self._issuer = issuer
        self._shape = shape
        self._rate = rate

    def initial(self, rng: Random) -> Iterable[SimRequest]:
        rng = Random(rng.getrandbits(64))
        shape = self._shape
        jobs = [_Job(rng, shape) for _ in range(shape.jobs)]
        for at in arrivals((self._rate,), self.horizon_s, rng):
            number = rng.randrange(len(jobs))
            job = jobs[number]
            prompt = job.template.extended(segment(rng, shape.document_tokens.tokens(rng)))
            yield self._issuer.request(at, prompt, segment(rng, shape.output_tokens.tokens(rng)))
            job.left -= 1
            if not job.left:
                jobs[number] = _Job(rng, shape)

    def follow_up(self, request: SimRequest, now: float, rng: Random) -> Sequence[SimRequest]:
        return ()
