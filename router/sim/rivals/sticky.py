"""`sticky_least_loaded` of vllm-router: a session stays where it began, and begins where the fewest sessions are."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from router.policy.interface import PlacementRequest
from router.sim.rivals.ledger import Target
from router.sim.rivals.rival import Rival

_SWEEP_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class StickySettings:
    session_ttl_s: float = 7200.0  # since its last request


SEARCH: Mapping[str, Sequence[object]] = {"session_ttl_s": (60.0, 300.0, 1200.0, 7200.0)}


class StickyLeastLoaded(Rival):
    """Source: vllm-project/router, `policies/sticky_least_loaded.rs`. prime-rl's default.

    Load is the number of sessions, not of requests; ties go by rendezvous hash of the session id. A request without an id
    goes to the least loaded too, ties by hash of its prompt, and is not counted. A session whose replica is no candidate
    begins anew. Nobody calls `/finish_session` here: sessions only expire.
    """

    def __init__(self, rng: random.Random, settings: StickySettings) -> None:
        super().__init__(rng)
        self._settings = settings
        self._sessions: dict[str, tuple[Target, float]] = {}  # where it is, and when it was last used
        self._counts: dict[Target, int] = {}
        self._sweep_at = _SWEEP_EVERY_S

    def choose(self, request: PlacementRequest, targets: Sequence[Target], now: float) -> Target:
        if now >= self._sweep_at:
            self._sweep(now)
        session = request.affinity
        if session is None:
            return self._least(str(request.prompt.digest(request.prompt.size)), targets)
        known = self._sessions.get(session)
        if known is not None:
            if known[0] in targets:
                self._sessions[session] = (known[0], now)
                return known[0]
            self._drop(session)
        target = self._least(session, targets)
        self._sessions[session] = (target, now)
        self._counts[target] = self._counts.get(target, 0) + 1
        return target

    def _least(self, key: str, targets: Sequence[Target]) -> Target:
        least = min(self._counts.get(target, 0) for target in targets)
        tied = [target for target in targets if self._counts.get(target, 0) == least]
        return max(tied, key=lambda target: xxh3_64_intdigest(f"{key}:{target[0]}@{target[1]}".encode()))

    def _sweep(self, now: float) -> None:
        oldest = now - self._settings.session_ttl_s
        for session in [session for session, (_, used) in self._sessions.items() if used <= oldest]:
            self._drop(session)
        self._sweep_at = now + _SWEEP_EVERY_S

    def _drop(self, session: str) -> None:
        target, _ = self._sessions.pop(session)
        left = self._counts[target] - 1
        if left:
            self._counts[target] = left
        else:
            del self._counts[target]
