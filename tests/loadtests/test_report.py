"""What the benchmark prints, and what it calls a PASS."""

import pytest

from loadtests.overhead.document import Circumstances, document
from loadtests.overhead.figures import Metric, Summary
from loadtests.overhead.report import TARGETS, Target, Verdict, figures_table, judge, ratios_table, targets_table
from loadtests.overhead.routers import RouterName

SUMMARY: Summary = {
    "ours": {Metric.REQUEST_400: 100.0, Metric.IDLE_STREAM: 14.25, Metric.ERRORS: 0.0},
    "vllm-router": {Metric.REQUEST_400: 200.0, Metric.IDLE_STREAM: 90.0, Metric.ERRORS: 0.0},
    "sglang-router": {Metric.REQUEST_400: 125.0},
}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Target(Metric.REQUEST_400, 0.40, RouterName.VLLM), (Verdict.MISS, 0.5)),
        (Target(Metric.REQUEST_400, 0.50, RouterName.VLLM), (Verdict.PASS, 0.5)),
        (Target(Metric.REQUEST_400, 0.80, RouterName.SGLANG), (Verdict.PASS, 0.8)),
        (Target(Metric.IDLE_STREAM, 60.0), (Verdict.PASS, 14.25)),
        (Target(Metric.IDLE_STREAM, 14.0), (Verdict.MISS, 14.25)),
        (Target(Metric.ERRORS, 0.0), (Verdict.PASS, 0.0)),
        (Target(Metric.CHUNK, 1.0, RouterName.VLLM_ROUND_ROBIN), None),
        (Target(Metric.IDLE_STREAM, 1.0, RouterName.SGLANG), None),
        (Target(Metric.CHUNK, 1.0), None),
    ],
)
def test_a_target_is_met_at_its_limit_and_not_above(target: Target, expected: tuple[Verdict, float] | None) -> None:
    """Without figures of both routers there is no verdict, so that nothing passes because it was left out."""
    assert judge(target, SUMMARY) == expected


def test_a_rival_that_measured_nothing_gives_no_verdict() -> None:
    """A rival whose figure is 0 is not divided by."""
    summary: Summary = {"ours": {Metric.CHUNK: 1.0}, "vllm-router-rr": {Metric.CHUNK: 0.0}}
    assert judge(Target(Metric.CHUNK, 1.0, RouterName.VLLM_ROUND_ROBIN), summary) is None


def test_the_targets_are_those_of_the_acceptance() -> None:
    """Three prompt sizes against two routers, chunks, memory and errors."""
    limits = [(target.limit, target.rival) for target in TARGETS]
    against = [(0.40, RouterName.VLLM)] * 3 + [(0.80, RouterName.SGLANG)] * 3
    assert limits == [*against, (1.00, RouterName.VLLM_ROUND_ROBIN), (60.0, None), (0.0, None)]


def test_tables_are_aligned_and_leave_out_what_was_not_measured() -> None:
    """A partial run prints only its own figures, readable as plain text and as Markdown."""
    for table in (figures_table(SUMMARY), ratios_table(SUMMARY), targets_table(SUMMARY)):
        lines = table.splitlines()
        assert len({len(line) for line in lines}) == 1
        assert len({line.count("|") for line in lines}) == 1
        assert "chunk" not in table
    assert "| 14.2 " in figures_table(SUMMARY)
    assert "| 0.50 " in ratios_table(SUMMARY)


def test_ours_alone_has_nothing_to_be_compared_with() -> None:
    """The table of ratios is left out then."""
    assert ratios_table({"ours": SUMMARY["ours"]}) == ""


def test_the_document_says_when_where_and_against_what() -> None:
    """A reader can judge the figures without asking anybody."""
    text = document(
        SUMMARY, Circumstances("2026-11-30", "2 x86_64 cores, 24 GiB of memory", 0.14, "intellect-serve at abc", 3, 4)
    )
    assert "on 2026-11-30 on a machine with 2 x86_64 cores, 24 GiB of memory.\n" in text
    assert "intellect-serve at abc against vllm-router==0.1.17 and sglang-router==0.3.2; rounds: 3" in text
    assert "kept 0.1 cores busy" in text
    assert targets_table(SUMMARY) in text
