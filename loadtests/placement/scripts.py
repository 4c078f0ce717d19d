"""What clients send, said once for the simulator and for real servers: prompts in segments, to be played or spelt out. Pure."""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from router.sim.prompts import Segment


class Turn(NamedTuple):
    """One request. Its prompt is everything before it in its script, answers included, and `segments`."""

    segments: tuple[Segment, ...]
    answer: Segment  # the server's own words, but as many tokens as this has
    pause_s: float = 0.0  # from the end of the answer before it; of a first turn: nothing


class Script(NamedTuple):
    """A client's requests, one after the other. `at`: seconds from the beginning of the run to the first of them."""

    id: str
    at: float
    turns: tuple[Turn, ...]
    tells_session: bool = False  # sends its id, as `x-session-id`


class Range(NamedTuple):
    """Whole numbers, both ends included, each as likely."""

    least: int
    most: int

    def draw(self, rng: Random) -> int:
        return rng.randint(self.least, self.most)


class Prefixes(NamedTuple):
    """Single requests behind one of `shared` beginnings. Tokens; `rate` in requests a second."""

    shared: int
    tokens: int
    question: Range
    output: Range
    rate: float
    skew: float = 0.0  # the n-th beginning is as likely as n to the power of minus this; 0: each as likely


class Talks(NamedTuple):
    """Short conversations behind one of `systems` shared beginnings. `rate` in conversations a second."""

    systems: int
    system_tokens: int
    step: Range  # what each turn adds
    output: Range
    turns: Range
    pause_s: float  # on average, exponential
    rate: float


def segment(rng: Random, tokens: int) -> Segment:
    """Content that nothing else has."""
    return Segment(rng.getrandbits(64), tokens)


def prefix_scripts(shape: Prefixes, seconds: float, rng: Random) -> list[Script]:
    """Arrivals as a Poisson process, in order."""
    shared = [segment(rng, shape.tokens) for _ in range(shape.shared)]
    weights = [number**-shape.skew for number in range(1, shape.shared + 1)]
    scripts: list[Script] = []
    at = rng.expovariate(shape.rate)
    while at < seconds:
        prompt = (rng.choices(shared, weights)[0], segment(rng, shape.question.draw(rng)))
        turn = Turn(prompt, segment(rng, shape.output.draw(rng)))
        scripts.append(Script(f"single-{len(scripts)}", at, (turn,)))
        at += rng.expovariate(shape.rate)
    return scripts


def round_scripts(shape: Prefixes, users: int, rng: Random) -> list[Script]:
    """`users` requests behind each of the beginnings, all of them in shuffled order."""
    shared = [segment(rng, shape.tokens) for _ in range(shape.shared)]
    order = shared * users
    rng.shuffle(order)
    scripts: list[Script] = []
    at = 0.0
    for beginning in order:
        at += rng.expovariate(shape.rate)
        prompt = (beginning, segment(rng, shape.question.draw(rng)))
        scripts.append(Script(f"user-{len(scripts)}", at, (Turn(prompt, segment(rng, shape.output.draw(rng))),)))
    return scripts


def talk_scripts(shape: Talks, seconds: float, rng: Random) -> list[Script]:
    """Conversations that begin as a Poisson process, in the order of their beginnings."""
    systems = [segment(rng, shape.system_tokens) for _ in range(shape.systems)]
    scripts: list[Script] = []
    at = rng.expovariate(shape.rate)
    while at < seconds:
        opening = (rng.choice(systems), segment(rng, shape.step.draw(rng)))
        turns = [Turn(opening, segment(rng, shape.output.draw(rng)))]
        for _ in range(shape.turns.draw(rng) - 1):
            said = (segment(rng, shape.step.draw(rng)),)
            turns.append(Turn(said, segment(rng, shape.output.draw(rng)), rng.expovariate(1.0 / shape.pause_s)))
        scripts.append(Script(f"talk-{len(scripts)}", at, tuple(turns), tells_session=True))
        at += rng.expovariate(shape.rate)
    return scripts


def in_order(*parts: Sequence[Script]) -> list[Script]:
    """Several kinds of traffic as one, by the time of their beginning."""
    return sorted((script for part in parts for script in part), key=lambda script: script.at)


def jittered(scripts: Sequence[Script], by_s: float, rng: Random) -> list[Script]:
    """The same clients, each up to `by_s` seconds earlier or later: as times fall out where processes share a machine."""
    return in_order([script._replace(at=max(0.0, script.at + rng.uniform(-by_s, by_s))) for script in scripts])
