"""The figures of a run are what one would compute by hand from its records."""

import pytest

from router.sim.figures import METRICS, figures_of
from router.sim.result import RequestOutcome
from tests.router.sim.records import rank, record, result


def test_goodput_counts_what_met_both_targets() -> None:
    """A late first token, slow further ones, and a refusal are no good; a single token has no distance to keep."""
    figures = figures_of(
        result(
            record(0),
            record(1, first_token_at=2.5, ended_at=3.0),
            record(2, itl_mean_s=0.2),
            record(3, itl_mean_s=None, output_tokens=1),
            record(4, outcome=RequestOutcome.REFUSED, first_token_at=None, replica=None, itl_mean_s=None),
        ),
        itl_target_s=0.1,
    )
    assert figures.requests == 5
    assert figures.values["goodput_share"] == pytest.approx(2 / 5)
    assert figures.values["goodput_rps"] == pytest.approx(2 / 10)
    assert (figures.values["refused"], figures.values["unserved"]) == (1, 0)
    assert set(figures.values) == set(METRICS)


def test_throughput_counts_what_was_made_before_arrivals_stopped() -> None:
    """The long tail of a run does not water down its rate."""
    figures = figures_of(
        result(
            record(0, first_token_at=1.0, ended_at=9.0, output_tokens=30),
            record(1, first_token_at=8.0, ended_at=12.0, output_tokens=40),  # half of it by 10 s
            record(2, first_token_at=11.0, ended_at=20.0, output_tokens=90),
        ),
        itl_target_s=0.1,
    )
    assert figures.values["output_tokens_per_s"] == pytest.approx((30 + 20) / 10)
    assert figures.values["requests_per_s"] == pytest.approx(1 / 10)
    assert figures.values["makespan_s"] == 20.0


def test_waits_of_those_never_served_count_to_the_end() -> None:
    """A policy does not look fast by leaving requests in the queue; the refused did not wait."""
    figures = figures_of(
        result(
            record(0, arrives_at=0.0, first_token_at=1.0),
            record(1, arrives_at=1.0, first_token_at=4.0, ended_at=5.0),
            record(2, arrives_at=2.0, first_token_at=None, ended_at=11.0, outcome=RequestOutcome.UNFINISHED, itl_mean_s=None),
            record(3, first_token_at=None, outcome=RequestOutcome.REFUSED, itl_mean_s=None),
        ),
        itl_target_s=0.1,
    )
    assert figures.values["ttft_p50_s"] == pytest.approx(3.0)
    assert figures.values["ttft_p90_s"] == pytest.approx(3.0 + 0.8 * 6.0)
    assert figures.values["unserved"] == 1


def test_hits_load_and_hot_spots() -> None:
    """Shares of tokens, of samples over time, and of requests."""
    figures = figures_of(
        result(
            record(0, prompt_tokens=100, cached_tokens=50),
            record(1, prompt_tokens=300, cached_tokens=250),
            record(2, prompt_tokens=100, cached_tokens=0, replica="r1"),
            record(3, prompt_tokens=900, replica=None, outcome=RequestOutcome.REFUSED, first_token_at=None),
            # An idle second and what comes after arrivals stopped do not count as uneven.
            ranks=(rank("r0", [0, 3, 3] + [2] * 8 + [9] * 9, 2), rank("r1", [1, 1, 1] + [2] * 8 + [0] * 9, 3)),
            decision_ns=(10_000, 30_000),
        ),
        itl_target_s=0.1,
    )
    assert figures.values["hit_rate"] == pytest.approx(300 / 500)
    assert figures.values["load_cv"] == pytest.approx((0.5 + 0.5) / 10)
    assert figures.values["hot_spot"] == pytest.approx(2 / 3 * 2)
    assert figures.values["preemptions"] == 5
    assert figures.values["decision_us"] == pytest.approx(20.0)


def test_fairness_is_measured_by_what_each_is_due() -> None:
    """A tenant that asks for little and gets it is treated fairly; two that ask alike and get unlike are not."""
    little = [record(0, tenant="small")]
    even = [record(number, tenant=tenant) for number, tenant in enumerate(("large",) * 9, 1)]
    assert figures_of(result(*little, *even), itl_target_s=0.1).values["jain"] == pytest.approx(1.0)
    served = [record(number, tenant="one") for number in range(4)]
    starved = [record(number, tenant="other", first_token_at=11.0, ended_at=12.0) for number in range(4, 8)]
    unfair = figures_of(result(*served, *starved), itl_target_s=0.1)
    assert unfair.values["jain"] == pytest.approx(0.5)
    assert unfair.tenants["other"]["tokens"] == 0
    assert unfair.tenants["one"] == {"requests": 4.0, "goodput_share": 1.0, "ttft_p99_s": 1.0, "tokens": 440.0}
    assert unfair.tenants["other"]["ttft_p99_s"] == pytest.approx(11.0)


def test_one_tenant_is_always_fair() -> None:
    """There is nobody to be unfair to."""
    assert figures_of(result(record(0, first_token_at=11.0, ended_at=12.0)), itl_target_s=0.1).values["jain"] == 1.0
