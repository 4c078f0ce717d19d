"""What is kept of the last placements, and how it is shown."""

import json
import random
from collections.abc import Sequence

import msgspec

from protocol.usage import Usage
from router.policy.interface import PlacementRequest, Policy, Priority, Ticket
from router.policy.predicted import Predicted
from router.state.decisions import Decision, Decisions, Kept, described, header_value, merged
from router.state.explained import SAMPLE_EVERY_S, Explained
from router.types import ReplicaId
from tests.router.policy.prompts import prompt, text

A, B = ReplicaId("a:1"), ReplicaId("b:1")


def decision(number: int, *, replica: ReplicaId = A, predicted_s: float | None = 1.0, actual_s: float | None = 2.0) -> Decision:
    return Decision(
        time=float(number),
        request_id=f"r{number}",
        outcome="completed",
        model="m",
        tenant="",
        session="who asks",
        priority=Priority.DEFAULT,
        prompt_bytes=1000,
        replica=replica,
        rank=0,
        attempts=1,
        waited_s=0.0,
        predicted_s=predicted_s,
        ttft_s=actual_s,
        predicted_cached_tokens=30.0,
        cached_tokens=60 if number % 2 else 0,
        expected_tokens=10.0,
        output_tokens=12,
    )


def explained(policy: Policy, *, always: bool = False) -> Explained:
    return Explained(policy, always=always)


def asks(name: str) -> PlacementRequest:
    return PlacementRequest("m", prompt(text(name, 8)))


def placed_and_ended(policy: Policy, at: float) -> Ticket:
    ticket = policy.place(asks(str(at)), (A, B), at)
    assert ticket is not None
    policy.ended(ticket, None, at)
    return ticket


def test_the_oldest_makes_place_for_the_newest() -> None:
    """However long the router runs, so many decisions are kept."""
    decisions = Decisions(kept=3)
    for number in range(10):
        decisions.add(decision(number))
    kept = decisions.kept(limit=10)
    assert [one.request_id for one in kept.decisions] == ["r9", "r8", "r7"]
    assert kept.count == 3


def test_one_replica_or_one_request_can_be_asked_for() -> None:
    """The answer to "why did this request go there" is one line, whatever else has come since."""
    decisions = Decisions()
    for number in range(20):
        decisions.add(decision(number, replica=B if number % 5 == 0 else A))
    assert [one.time for one in decisions.kept(limit=2, replica=B).decisions] == [15, 10]
    assert [one.time for one in decisions.kept(limit=9, request_id="r7").decisions] == [7]
    assert decisions.kept(limit=9, replica=B, request_id="r7").decisions == []


def test_the_summary_is_of_all_that_are_kept() -> None:
    """Median and 90th percentile of predicted to actual; what is not known is left out, and nothing is divided by zero."""
    decisions = Decisions()
    for number in range(1, 11):
        decisions.add(decision(number, predicted_s=float(number), actual_s=2.0))
    decisions.add(decision(11, predicted_s=None))
    decisions.add(decision(12, actual_s=None))
    assert described(decisions.kept(limit=1))["summary"] == {
        "decisions": 12,
        "predicted_to_actual": {
            "first_token_seconds": {"median": 2.5, "p90": 5.0, "count": 10},
            "cached_tokens": {"median": 0.5, "p90": 0.5, "count": 6},
        },
        "predicted_cached_tokens": 360,
        "cached_tokens": 360,
    }
    assert described(Decisions().kept(limit=1)) == {
        "summary": {
            "decisions": 0,
            "predicted_to_actual": {"first_token_seconds": None, "cached_tokens": None},
            "predicted_cached_tokens": 0,
            "cached_tokens": 0,
        },
        "decisions": [],
    }


def test_those_of_several_processes_are_shown_as_one() -> None:
    """Newest first over all workers, also after they have gone over a socket."""
    parts = []
    for offset in (0, 1):
        decisions = Decisions()
        for number in range(offset, 10, 2):
            decisions.add(decision(number))
        parts.append(msgspec.msgpack.decode(msgspec.msgpack.encode(decisions.kept(limit=4)), type=Kept))
    kept = merged(parts, 4)
    assert [one.time for one in kept.decisions] == [9, 8, 7, 6]
    assert (kept.count, len(kept.first_token_ratios), kept.cached_tokens) == (10, 10, 300)


def test_what_is_shown_holds_no_word_of_the_client() -> None:
    """A session id can be a name or a mail address."""
    decisions = Decisions()
    decisions.add(decision(1))
    shown = json.dumps(described(decisions.kept(limit=1)))
    assert "who asks" not in shown
    assert '"session": "' in shown


def test_a_placement_is_explained_as_it_was_seen_before_it() -> None:
    """The terms of every candidate, with the lowest total where it was placed; its own tokens are not in the queue yet."""
    policy = Predicted(random.Random(1))
    first = explained(policy, always=True).place(asks("one"), (A, B), 1.0)
    assert first is not None
    policy.first_token(first, 1.1)
    policy.ended(first, Usage(512, 4, 0), 1.2)
    again = explained(policy, always=True).place(asks("one"), (A, B), 2.0)
    assert again is not None
    assert again.replica == first.replica
    assert {terms.replica for terms in again.terms} == {A, B}
    assert min(again.terms, key=lambda terms: terms.total).replica == again.replica
    assert all(terms.wait == 0.0 for terms in again.terms)
    assert [terms.cached_tokens > 400 for terms in again.terms if terms.replica == again.replica] == [True]


def test_only_a_sample_is_explained() -> None:
    """Twenty a second at most, so that explaining costs next to nothing; with debug headers every one."""
    policy = explained(Predicted(random.Random(1)))
    times = [1.0 + number * SAMPLE_EVERY_S / 10 for number in range(101)]
    tickets = [placed_and_ended(policy, at) for at in times]
    assert sum(bool(ticket.terms) for ticket in tickets) in (10, 11)
    policy = explained(Predicted(random.Random(1)), always=True)
    tickets = [placed_and_ended(policy, at) for at in times]
    assert all(len(ticket.terms) == 2 for ticket in tickets)
    assert len(policy.adopt(asks("x"), B, 0, 9.0).terms) == 1


def test_the_sample_is_not_lost_to_requests_that_have_to_wait() -> None:
    """When the fleet is full, most tries place nothing; those that do are the ones to be explained."""

    class SometimesFull(Predicted):
        is_full = False

        def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket | None:
            return None if self.is_full else super().place(request, candidates, now)

    inner = SometimesFull(random.Random(1))
    policy = explained(inner)
    samples = 0
    for number in range(100):  # polled every 50 ms, and something is placed 20 ms later
        inner.is_full = True
        assert policy.place(asks("waits"), (A, B), 1.0 + number * 0.05) is None
        inner.is_full = False
        samples += bool(placed_and_ended(policy, 1.02 + number * 0.05).terms)
    assert samples >= 50


def test_the_debug_header_has_the_terms_of_the_chosen_replica() -> None:
    """One line, readable by eye and by a program."""
    policy = explained(Predicted(random.Random(1)), always=True)
    ticket = policy.place(asks("one"), (A, B), 1.0)
    assert ticket is not None
    value = dict(part.split("=") for part in header_value(ticket).decode().split(";"))
    terms = ("wait_ms", "own_ms", "step_ms", "decode_ms", "evict_ms", "room_ms")
    assert list(value) == ["replica", "predicted_ttft_ms", "cached_tokens", *terms, "candidates"]
    assert (value["replica"], value["candidates"], value["cached_tokens"]) == (ticket.replica, "2", "0")
    assert float(value["own_ms"]) > 0


def test_a_policy_without_costs_explains_nothing_and_fails_nothing() -> None:
    """Under --policy random there is no reason to show."""

    class Blind(Policy):
        pass

    policy = explained(Blind(), always=True)
    ticket = policy.adopt(asks("one"), A, 0, 1.0)
    assert (ticket.terms, header_value(ticket)) == ((), b"replica=a:1")
