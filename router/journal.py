"""What was decided for each request, and how it went: noted at its end for the admin API, metrics and the decision log."""

from router.edge.decision_log import DecisionLog, DecisionRecord
from router.edge.placement_metrics import PlacementMetrics
from router.exchange import Exchange
from router.outcome import Outcome
from router.policy.interface import PlacementRequest
from router.policy.prompt import FIRST_BYTES
from router.policy.targets import PredictedTicket
from router.state.decisions import Decision, Decisions, session_hash

# Longer ones are hashed before they are kept.
SESSION_LENGTH_MAX = 128
# Decisions that are noted: so many a second, and so many more at once.
NOTED_PER_S = 200.0
NOTED_AT_ONCE = 500


class Journal:
    """Of very many requests at once a part is noted, unless there is a decision log, or its placement was explained."""

    def __init__(self, decisions: Decisions, metrics: PlacementMetrics, log: DecisionLog | None) -> None:
        self._decisions = decisions
        self._metrics = metrics
        self._log = log
        self._allowance = float(NOTED_AT_ONCE)
        self._allowed_at = 0.0

    def ended(self, exchange: Exchange, outcome: Outcome, now: float, duration_s: float) -> None:
        """Each request that was understood, once. `now` is Unix time."""
        request, ticket = exchange.placement, exchange.ticket
        if request is None:
            return
        decision = None
        if ticket is not None:
            self._metrics.placed(request.priority, exchange.waited_s)
            if self._log is None and not ticket.terms and not self._may_note(now):
                return
            decision = _decision_of(exchange, request, outcome, now)
            self._decisions.add(decision)
            self._metrics.noted(decision)
        if self._log is not None:
            self._log.write(_record_of(exchange, request, outcome, now - duration_s, decision))

    def _may_note(self, now: float) -> bool:
        elapsed_s = max(0.0, now - self._allowed_at)  # the clock may have been set back
        allowance = self._allowance + elapsed_s * NOTED_PER_S
        self._allowed_at = now
        self._allowance = allowance = NOTED_AT_ONCE if allowance > NOTED_AT_ONCE else allowance
        if allowance < 1.0:
            return False
        self._allowance = allowance - 1.0
        return True


def _decision_of(exchange: Exchange, request: PlacementRequest, outcome: Outcome, now: float) -> Decision:
    ticket, usage, affinity = exchange.ticket, exchange.usage, request.affinity
    assert ticket is not None
    predicted_s = predicted_cached = expected = first_token_s = cached = output = None
    if isinstance(ticket, PredictedTicket):
        predicted_s, predicted_cached, expected = ticket.predicted_s, ticket.cached_tokens, ticket.output
    is_one = not exchange.continuations  # else its first token came, and its usage is, from several placements
    if usage is not None:
        output = usage.completion
        if is_one:
            cached = usage.cached
    if is_one and request.streams and exchange.first_byte_s is not None:
        took_s = exchange.started + exchange.first_byte_s - exchange.placed_at
        first_token_s = took_s if took_s > 0.0 else None  # else what came was of an attempt before, and failed
    return Decision(
        now,
        exchange.request_id,
        outcome,
        request.model,
        request.tenant,
        "" if affinity is None else affinity if len(affinity) <= SESSION_LENGTH_MAX else session_hash(affinity),
        request.priority,
        request.prompt.size,
        ticket.replica,
        ticket.rank,
        exchange.attempts,
        exchange.waited_s,
        predicted_s,
        first_token_s,
        predicted_cached,
        cached,
        expected,
        output,
        ticket.terms,
    )


def _record_of(
    exchange: Exchange, request: PlacementRequest, outcome: Outcome, arrived: float, decision: Decision | None
) -> DecisionRecord:
    usage, affinity, prompt = exchange.usage, request.affinity, request.prompt
    return DecisionRecord(
        t=round(arrived, 6),
        request_id=exchange.request_id,
        outcome=outcome.value,
        model=request.model,
        blocks=prompt.chunks,
        block_bytes=FIRST_BYTES,
        prompt_bytes=prompt.size,
        prompt_hash=prompt.digest(prompt.size),
        prompt_tokens=None if usage is None else usage.prompt,
        output_tokens=None if usage is None else usage.completion,
        max_tokens=request.output_max,
        session="" if affinity is None else session_hash(affinity),
        tenant=request.tenant,
        priority=request.priority.value,
        replica=exchange.replica,
        attempts=exchange.attempts,
        waited_s=round(exchange.waited_s, 6),
        predicted_s=None if decision is None else _microseconds(decision.predicted_s),
        ttft_s=None if decision is None else _microseconds(decision.ttft_s),
        cached_tokens=None if usage is None else usage.cached,
    )


def _microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
