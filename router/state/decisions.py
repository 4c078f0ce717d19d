"""The last placements, with what was predicted for each and what became of it: why a replica was chosen, and how right it was.

Sizes, ids and times only. A client's session id is shown as its hash, and nothing of a prompt is kept at all.
"""

from collections import deque
from collections.abc import Sequence

import msgspec
from xxhash import xxh3_64_hexdigest

from router.policy.cost import CostTerms
from router.policy.interface import Priority, Ticket
from router.policy.targets import PredictedTicket
from router.types import ReplicaId

KEPT = 1000


class Decision(msgspec.Struct, frozen=True, gc=False):
    """One request that was placed, as it was when it ended. Of several attempts the last. Times are seconds."""

    time: float  # Unix time of its ending
    request_id: str
    outcome: str
    model: str
    tenant: str
    session: str  # the client's word, at most 128 characters; empty without one
    priority: Priority
    prompt_bytes: int
    replica: ReplicaId
    rank: int
    attempts: int
    waited_s: float  # in the router, until a replica could start it
    predicted_s: float | None  # from placement to the first token; None: the policy predicts nothing
    ttft_s: float | None  # the same as it was; None: no first token was seen, or another attempt's
    predicted_cached_tokens: float | None
    cached_tokens: int | None  # None: the engine did not tell, or several attempts made up the answer
    expected_tokens: float | None  # of the answer
    output_tokens: int | None
    terms: Sequence[CostTerms] = ()  # of every candidate; empty for placements that were not explained


class Kept(msgspec.Struct, frozen=True):
    """What one process has: the decisions asked for, and how predictions went in all that it keeps."""

    decisions: list[Decision]  # newest first
    count: int
    first_token_ratios: list[float]  # predicted / actual
    cached_ratios: list[float]
    predicted_cached_tokens: float
    cached_tokens: int


class Decisions:
    """Bounded: the oldest makes place for the newest."""

    def __init__(self, kept: int = KEPT) -> None:
        self._decisions: deque[Decision] = deque(maxlen=kept)
        self.add = self._decisions.append

    def kept(self, *, limit: int, replica: str | None = None, request_id: str | None = None) -> Kept:
        """At most `limit` decisions, of one replica or one request where asked for. The ratios are of all."""
        every = self._decisions
        chosen: list[Decision] = []
        for decision in reversed(every):
            if len(chosen) >= limit:
                break
            if replica in (None, decision.replica) and request_id in (None, decision.request_id):
                chosen.append(decision)
        told = [
            (decision.predicted_cached_tokens, decision.cached_tokens)
            for decision in every
            if decision.predicted_cached_tokens is not None and decision.cached_tokens is not None
        ]
        return Kept(
            decisions=chosen,
            count=len(every),
            first_token_ratios=[
                decision.predicted_s / decision.ttft_s
                for decision in every
                if decision.predicted_s is not None and decision.ttft_s
            ],
            cached_ratios=[predicted / actual for predicted, actual in told if actual],
            predicted_cached_tokens=sum(predicted for predicted, _ in told),
            cached_tokens=sum(actual for _, actual in told),
        )


def merged(parts: Sequence[Kept], limit: int) -> Kept:
    """Of several processes as of one."""
    decisions = sorted((decision for part in parts for decision in part.decisions), key=_time_of, reverse=True)
    return Kept(
        decisions=decisions[:limit],
        count=sum(part.count for part in parts),
        first_token_ratios=[ratio for part in parts for ratio in part.first_token_ratios],
        cached_ratios=[ratio for part in parts for ratio in part.cached_ratios],
        predicted_cached_tokens=sum(part.predicted_cached_tokens for part in parts),
        cached_tokens=sum(part.cached_tokens for part in parts),
    )


def described(kept: Kept) -> dict[str, object]:
    """As JSON shows it."""
    return {
        "summary": {
            "decisions": kept.count,
            "predicted_to_actual": {
                "first_token_seconds": _spread(kept.first_token_ratios),
                "cached_tokens": _spread(kept.cached_ratios),
            },
            "predicted_cached_tokens": round(kept.predicted_cached_tokens),
            "cached_tokens": kept.cached_tokens,
        },
        "decisions": [_described(decision) for decision in kept.decisions],
    }


def header_value(ticket: Ticket) -> bytes:
    """The chosen replica with the terms of its cost, where they are known, in milliseconds."""
    parts = [f"replica={ticket.replica}"]
    if isinstance(ticket, PredictedTicket):
        parts.append(f"predicted_ttft_ms={ticket.predicted_s * 1000:.2f}")
    for terms in ticket.terms:
        if terms.replica == ticket.replica and terms.rank == ticket.rank:
            parts.append(f"cached_tokens={terms.cached_tokens:.0f}")
            parts += [f"{name}_ms={seconds * 1000:.2f}" for name, seconds in _seconds_of(terms).items()]
            parts.append(f"candidates={len(ticket.terms)}")
    return ";".join(parts).encode("latin-1")


def session_hash(session: str) -> str:
    """What is shown in place of a client's word."""
    return xxh3_64_hexdigest(session.encode())


def _described(decision: Decision) -> dict[str, object]:
    shown = {name: _rounded(value) for name, value in msgspec.structs.asdict(decision).items() if name != "terms"}
    shown["session"] = session_hash(decision.session) if decision.session else ""
    if decision.terms:
        shown["candidates"] = [
            {
                "replica": terms.replica,
                "rank": terms.rank,
                "cached_tokens": _rounded(terms.cached_tokens),
                "is_startable": terms.is_startable,
                "seconds": {
                    **{name: _rounded(seconds) for name, seconds in _seconds_of(terms).items()},
                    "total": _rounded(terms.total),
                },
            }
            for terms in decision.terms
        ]
    return shown


def _seconds_of(terms: CostTerms) -> dict[str, float]:
    return {
        "wait": terms.wait,
        "own": terms.own,
        "step": terms.step,
        "decode": terms.decode,
        "evict": terms.evict,
        "room": terms.room,
    }


def _rounded(value: object) -> object:
    return round(value, 6) if isinstance(value, float) else value


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """None where there is nothing to compare."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "median": round(ordered[(len(ordered) - 1) // 2], 4),
        "p90": round(ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], 4),
        "count": len(ordered),
    }


def _time_of(decision: Decision) -> float:
    return decision.time
