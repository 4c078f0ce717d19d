"""The soak's judge condemns each kind of lie, hang and leak, and nothing that clients were promised."""

import json
from dataclasses import replace

import pytest

from loadtests.soak.answers import Said
from loadtests.soak.judge import (
    Invariant,
    Logged,
    Remains,
    Sample,
    Violation,
    judge_accounts,
    judge_coverage,
    judge_remains,
    judge_views,
)
from loadtests.soak.requests import Asked
from loadtests.soak.views import Ending, Manner, View

JSON = Asked("chat json", "/v1/chat/completions", b"{}")
STREAM = Asked("chat stream", "/v1/chat/completions", b"{1}", is_stream=True)
RESPONSE = Asked("responses stream", "/v1/responses", b"{2}", is_stream=True)
OURS = Asked("refused n", "/v1/chat/completions", b"{3}", status=400, is_routers_refusal=True)
ENGINES = Asked("refused by the engine", "/v1/chat/completions", b"{4}", status=400)
BYSTANDER = Asked("embeddings", "/v1/embeddings", b"{5}", is_faultless=True)
WHOLE = Said({"0.content": "one two three"}, {"0": ["stop", None]}, {"completion_tokens": 3})
EXPECTED = {JSON: {"text": "one"}, STREAM: WHOLE, RESPONSE: WHOLE, BYSTANDER: {"data": 1}}


def view(asked: Asked, ending: Ending, status: int = 200, **seen: object) -> View:
    made = View("id-1", asked, Manner.READS, ending, status, 1.0)
    for name, value in seen.items():
        setattr(made, name, value)
    return made


def said(text: str, **fields: object) -> Said:
    return replace(Said({"0.content": text}, {}), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "seen",
    [
        view(JSON, Ending.WHOLE, body=json.dumps({"text": "one", "id": "any"}).encode()),
        view(JSON, Ending.REFUSED, 502),
        view(STREAM, Ending.WHOLE, said=WHOLE),
        view(STREAM, Ending.WHOLE, said=replace(WHOLE, usage=None)),  # its engine ended behind the last word, without usage
        view(STREAM, Ending.ERROR_EVENT, said=said("one t")),
        view(STREAM, Ending.LEFT, said=said("one")),
        view(STREAM, Ending.BROKEN, said=said("one"), manner=Manner.HTTP10),
        view(JSON, Ending.BROKEN, body=b"x" * 2_000_000),
        view(OURS, Ending.REFUSED, 400),
        view(ENGINES, Ending.REFUSED, 503),
        view(JSON, Ending.LEFT, 0, is_withdrawn=True),
        view(RESPONSE, Ending.WHOLE, said=said("one", finishes={"0": "completed"})),
    ],
)
def test_what_clients_were_promised_is_no_violation(seen: View) -> None:
    """Faults may be seen, as long as they say so."""
    assert judge_views([seen], EXPECTED, hang_s=60) == []


@pytest.mark.parametrize(
    ("seen", "invariant"),
    [
        (view(JSON, Ending.WHOLE, body=b'{"text": "on"}'), Invariant.NO_SILENT_LIE),
        (view(JSON, Ending.BROKEN, body=b'{"te'), Invariant.NO_SILENT_LIE),
        (view(JSON, Ending.NO_ANSWER, 0), Invariant.NO_SILENT_LIE),
        (view(JSON, Ending.REFUSED, 404), Invariant.NO_SILENT_LIE),
        (view(STREAM, Ending.WHOLE, said=said("one two", finishes=WHOLE.finishes, usage=WHOLE.usage)), Invariant.NO_SILENT_LIE),
        (view(STREAM, Ending.ERROR_EVENT, said=said("one two two")), Invariant.NO_SILENT_LIE),
        (view(STREAM, Ending.LEFT, said=said("two")), Invariant.NO_SILENT_LIE),
        (view(STREAM, Ending.BROKEN, said=said("one")), Invariant.NO_SILENT_LIE),
        (view(STREAM, Ending.WHOLE, said=WHOLE, faults=["choice 0 begins twice"]), Invariant.NO_SILENT_LIE),
        (view(OURS, Ending.WHOLE), Invariant.NO_SILENT_LIE),
        (view(OURS, Ending.REFUSED, 503), Invariant.NO_SILENT_LIE),
        (view(ENGINES, Ending.WHOLE), Invariant.NO_SILENT_LIE),
        (view(BYSTANDER, Ending.REFUSED, 503), Invariant.NO_SILENT_LIE),
        (view(RESPONSE, Ending.WHOLE, said=said("two", finishes={"0": "completed"})), Invariant.NO_SILENT_LIE),
        (view(STREAM, Ending.HUNG, said=said("one")), Invariant.NO_HANG),
        (view(STREAM, Ending.WHOLE, said=WHOLE, seconds=61.0), Invariant.NO_HANG),
    ],
)
def test_each_lie_and_hang_is_found(seen: View, invariant: Invariant) -> None:
    """A soak that passes has looked."""
    assert [violation.invariant for violation in judge_views([seen], EXPECTED, hang_s=60)] == [invariant]


def accounts(seen: View, *outcomes: str, counted: dict[str, float] | None = None) -> list[Violation]:
    lines = [Logged(outcome, 200, "") for outcome in outcomes]
    log = {seen.request_id: lines} if lines else {}
    return judge_accounts([seen], log, dict.fromkeys(outcomes, 1.0) if counted is None else counted)


@pytest.mark.parametrize(
    ("seen", "outcomes"),
    [
        (view(JSON, Ending.WHOLE), ["completed"]),
        (view(JSON, Ending.REFUSED, 502), ["upstream_unreachable"]),
        (view(OURS, Ending.REFUSED, 400), ["rejected_invalid"]),
        (view(ENGINES, Ending.REFUSED, 400), ["engine_refused"]),
        (view(STREAM, Ending.ERROR_EVENT), ["upstream_broken"]),
        (view(STREAM, Ending.LEFT), ["client_gone"]),
        (view(STREAM, Ending.LEFT), ["completed"]),
        (view(STREAM, Ending.LEFT, 0, is_withdrawn=True), []),
        (view(replace(JSON, is_counted=False), Ending.WHOLE), []),
    ],
)
def test_true_accounts_pass(seen: View, outcomes: list[str]) -> None:
    """One outcome, the one that the client saw."""
    assert accounts(seen, *outcomes) == []


@pytest.mark.parametrize(
    ("seen", "outcomes", "invariant"),
    [
        (view(JSON, Ending.WHOLE), [], Invariant.ONE_OUTCOME),
        (view(JSON, Ending.LEFT), [], Invariant.ONE_OUTCOME),
        (view(JSON, Ending.WHOLE), ["client_gone"], Invariant.TRUE_OUTCOME),
        (view(STREAM, Ending.ERROR_EVENT), ["completed"], Invariant.TRUE_OUTCOME),
        (view(STREAM, Ending.ERROR_EVENT), ["client_gone"], Invariant.TRUE_OUTCOME),
        (view(JSON, Ending.REFUSED, 503), ["completed"], Invariant.TRUE_OUTCOME),
        (view(JSON, Ending.REFUSED, 500), ["router_error"], Invariant.NO_FAULT_OF_OURS),
    ],
)
def test_false_accounts_are_found(seen: View, outcomes: list[str], invariant: Invariant) -> None:
    """A request that is counted twice, not at all, or as what it was not."""
    assert [violation.invariant for violation in accounts(seen, *outcomes)] == [invariant]


def test_requests_that_are_counted_twice_or_never_sent_are_found() -> None:
    """The log's lines, the metric and the clients' notes must agree."""
    seen = view(JSON, Ending.WHOLE)
    assert len(accounts(seen, "completed", "completed", counted={"completed": 2.0})) == 1
    assert len(accounts(seen, "completed", counted={"completed": 2.0})) == 1
    assert len(judge_accounts([], {"stranger": [Logged("completed", 200, "")]}, {"completed": 1.0})) == 1


CLEAN = Remains(0, 0, {"engine-0": 0}, descriptors_before=20, descriptors=21)


@pytest.mark.parametrize(
    "remains",
    [
        replace(CLEAN, in_flight=1),
        replace(CLEAN, departing=1),
        replace(CLEAN, engines_busy={"engine-0": 2}),
        replace(CLEAN, descriptors=24),
    ],
)
def test_each_leak_is_found(remains: Remains) -> None:
    """Leases, engine work and sockets."""
    assert judge_remains(CLEAN, [], replicas=3) == []
    assert [violation.invariant for violation in judge_remains(remains, [], replicas=3)] == [Invariant.NO_LEAK]


def test_memory_that_grows_is_found_where_the_run_was_long_enough() -> None:
    """Growth of more than 5 % from the second to the last fifth; a short run only warms up."""
    growing = [Sample(float(second), 100 + second // 10, 20, 3) for second in range(300)]
    flat = [Sample(float(second), 100 + second % 2, 20, 3) for second in range(300)]
    assert len(judge_remains(CLEAN, growing, replicas=3)) == 1
    assert judge_remains(CLEAN, flat, replicas=3) == []
    assert judge_remains(CLEAN, growing[:100], replicas=3) == []


def test_a_soak_in_which_something_never_happened_does_not_pass() -> None:
    """A kind of request that never went well, a client or a fault that was never met."""
    everybody = [view(JSON, Ending.WHOLE, manner=manner) for manner in Manner]
    assert judge_coverage(everybody, [JSON], []) == []
    assert len(judge_coverage(everybody, [JSON, STREAM], ["kill -9"])) == 2
    assert len(judge_coverage(everybody[1:], [JSON], [])) == 1
