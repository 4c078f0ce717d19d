"""What is noted of a request when it ends, also of one that took several attempts or none."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from protocol.openai import Surface
from protocol.usage import Usage
from router.admission.dispatcher import Dispatcher
from router.edge.decision_log import DecisionLog
from router.edge.placement_metrics import PlacementMetrics
from router.exchange import Exchange
from router.journal import NOTED_AT_ONCE, Journal
from router.outcome import Outcome
from router.policy.interface import PlacementRequest
from router.policy.predicted import Predicted
from router.state.decisions import Decision, Decisions
from router.types import ReplicaId
from tests.router.policy.prompts import prompt, text

A = ReplicaId("a:1")


def exchange(*, affinity: str | None = None, is_placed: bool = True, streams: bool = True) -> Exchange:
    """Arrived at 100 on the process's clock, placed half a second later, its first byte after two seconds."""
    request = PlacementRequest("m", prompt(text("a", 4.5)), affinity=affinity, output_max=50, streams=streams)
    one = Exchange(Surface.CHAT, "/v1/chat/completions", "r", "e", started=100.0)
    one.placement = request
    if is_placed:
        one.ticket = Predicted(random.Random(1)).place(request, (A,), 1.0)
        one.replica, one.attempts, one.placed_at, one.first_byte_s = A, 1, 100.5, 2.0
        one.usage = Usage(300, 40, 100)
    return one


def noted(one: Exchange, outcome: Outcome = Outcome.COMPLETED) -> list[Decision]:
    policy = Predicted(random.Random(1))
    decisions = Decisions()
    Journal(decisions, PlacementMetrics(Dispatcher(policy), policy), None).ended(one, outcome, 1000.0, 3.0)
    return decisions.kept(limit=9).decisions


def test_the_first_token_is_measured_from_the_placement() -> None:
    """The time in the queue is none of the replica's; an answer that is not streamed shows no first token."""
    (one,) = noted(exchange())
    assert one.ttft_s == pytest.approx(1.5)
    assert (one.cached_tokens, one.output_tokens, one.expected_tokens, one.prompt_bytes) == (100, 40, 50, 1152)
    assert noted(exchange(streams=False))[0].ttft_s is None


def test_what_several_attempts_made_is_compared_with_no_prediction() -> None:
    """A continued answer's counts are of two replicas; bytes before the last placement are of an attempt that failed."""
    continued = exchange()
    continued.continuations = 1
    (one,) = noted(continued)
    assert (one.ttft_s, one.cached_tokens, one.output_tokens) == (None, None, 40)
    retried = exchange()
    retried.placed_at = 103.0
    assert noted(retried)[0].ttft_s is None


def test_a_request_that_was_never_placed_is_no_decision() -> None:
    """One that was refused or not understood has no replica to explain."""
    assert noted(exchange(is_placed=False), Outcome.REJECTED_OVERLOADED) == []
    assert noted(Exchange(Surface.CHAT, "/v1/chat/completions", "r", "e", started=100.0), Outcome.REJECTED_INVALID) == []


def test_a_clients_word_may_be_of_any_length() -> None:
    """Long ones take no more memory than others."""
    (one,) = noted(exchange(affinity="é" * 100_000))
    assert len(one.session) == 16


def test_a_clock_that_is_set_back_does_not_stop_the_notes() -> None:
    """What may still be noted is kept, and grows again from then on."""
    policy = Predicted(random.Random(1))
    decisions = Decisions()
    journal = Journal(decisions, PlacementMetrics(Dispatcher(policy), policy), None)
    one = exchange()

    def noted_at(now: float, count: int) -> int:
        for _ in range(count):
            journal.ended(one, Outcome.COMPLETED, now, 3.0)
        return sum(decision.time == now for decision in decisions.kept(limit=2 * NOTED_AT_ONCE).decisions)

    assert noted_at(10_000.0, 1) == 1
    assert noted_at(1000.0, 1) == 1
    assert noted_at(1000.5, NOTED_AT_ONCE + 1) == NOTED_AT_ONCE


async def test_each_request_that_was_understood_is_a_line_of_the_log(tmp_path: Path) -> None:
    """Also those that found no place: what came is as much of the traffic."""
    path = tmp_path / "log"
    log = DecisionLog(path)
    policy = Predicted(random.Random(1))
    journal = Journal(Decisions(), PlacementMetrics(Dispatcher(policy), policy), log)
    journal.ended(exchange(affinity="s"), Outcome.COMPLETED, 1000.0, 3.0)
    journal.ended(exchange(is_placed=False), Outcome.REJECTED_OVERLOADED, 1001.0, 0.0)
    await asyncio.to_thread(log.close)
    good, refused = (json.loads(line) for line in path.read_text().splitlines())
    assert (good["t"], good["replica"], good["ttft_s"], good["cached_tokens"]) == (997.0, A, 1.5, 100)
    assert (good["prompt_tokens"], good["output_tokens"], good["max_tokens"]) == (300, 40, 50)
    assert len(good["session"]) == 16
    assert good["blocks"] == refused["blocks"] == list(prompt(text("a", 4.5)).chunks)
    assert (refused["t"], refused["outcome"], "output_tokens" in refused) == (1001.0, "rejected_overloaded", False)
