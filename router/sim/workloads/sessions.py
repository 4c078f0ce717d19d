"""Conversations: each turn is the one before, its answer, and something new, after a time of thinking or of running a tool."""

from collections.abc import Iterable, Sequence
from random import Random
from typing import NamedTuple

from router.sim.prompts import Segment, SimPrompt, history_of
from router.sim.request import SimRequest
from router.sim.workloads.draws import Quantiles, Skewed, arrivals
from router.sim.workloads.issuer import Issuer, segment


class SessionShape(NamedTuple):
    """What sessions are like. Their system prompts are shared: there are `kinds` of them."""

    bytes_per_token: float
    kinds: int
    system_tokens: int
    opening_tokens: Skewed
    step_tokens: Skewed  # what each later turn adds: a tool's result, a question
    output_tokens: Skewed
    think_s: Skewed  # from an answer's end to the next turn
    turns: Quantiles
    tells_session: bool  # the client sends `x-session-id`
    kept: float = 1.0  # share of an answer that stays in the history; see `history_of`


class _Session:
    """One conversation. Its own randomness: the same seed plays the same turns, in whatever order policies let answers end."""

    __slots__ = ("answer", "id", "prompt", "rng", "turn", "turns")

    def __init__(self, session_id: str, rng: Random, system: SimPrompt, shape: SessionShape) -> None:
        self.id = session_id
        self.rng = rng
        self.turn = 0
        self.turns = max(1, round(shape.turns.draw(rng)))
        self.prompt = system.extended(segment(rng, shape.opening_tokens.tokens(rng)))
        self.answer = segment(rng, shape.output_tokens.tokens(rng))

    def next_turn(self, shape: SessionShape) -> float:
        """Goes on to the next turn. Returns the seconds until it is sent."""
        said: Segment = history_of(self.answer, shape.kept)
        self.turn += 1
        self.prompt = self.prompt.extended(said, segment(self.rng, shape.step_tokens.tokens(self.rng)))
        self.answer = segment(self.rng, shape.output_tokens.tokens(self.rng))
        return shape.think_s.draw(self.rng)


class Sessions:
    """Sessions begin as a Poisson process of `rate` a second. What would be sent behind the horizon is not sent."""

    def __init__(self, name: str, issuer: Issuer, shape: SessionShape, *, rate: float, horizon_s: float) -> None:
        self.name = name
        self.horizon_s = horizon_s
        self._issuer = issuer
        self._shape = shape
        self._rate = rate
        self._open: dict[str, _Session] = {}

    def initial(self, rng: Random) -> Iterable[SimRequest]:
        rng = Random(rng.getrandbits(64))
        shape = self._shape
        empty = SimPrompt.empty(shape.bytes_per_token)
        systems = [empty.extended(segment(rng, shape.system_tokens)) for _ in range(shape.kinds)]
        for number, at in enumerate(arrivals((self._rate,), self.horizon_s, rng)):
            own = Random(rng.getrandbits(64))
            session = _Session(f"{self.name}-{number}", own, systems[own.randrange(len(systems))], shape)
            self._open[session.id] = session
            yield self._request(session, at)

    def follow_up(self, request: SimRequest, now: float, rng: Random) -> Sequence[SimRequest]:
        session = self._open.get(request.session)
        if session is None:
            return ()
        if session.turn + 1 < session.turns:
            at = now + session.next_turn(self._shape)
            if at < self.horizon_s:
                return (self._request(session, at),)
        del self._open[session.id]
        return ()

    def _request(self, session: _Session, at: float) -> SimRequest:
        return self._issuer.request(
            at,
            session.prompt,
            session.answer,
            session=session.id,
            turn=session.turn,
            affinity=session.id if self._shape.tells_session else None,
        )
