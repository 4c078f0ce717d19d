"""A comparison says who is better, by how much, and how sure that is."""

import json

import pytest

from router.sim.report import Summary, as_json, summarise
from router.sim.report_table import tables
from tests.router.sim.records import run

RUNS = [
    run("oracle", 1, goodput_share=1.0, ttft_p90_s=0.5),
    run("oracle", 2, goodput_share=0.8, ttft_p90_s=0.5),
    run("predicted", 1, goodput_share=0.9, ttft_p90_s=0.6),
    run("predicted", 2, goodput_share=0.8, ttft_p90_s=0.7),
    run("p2c", 1, goodput_share=0.6, ttft_p90_s=0.4),
    run("p2c", 2, goodput_share=0.7, ttft_p90_s=0.4),
    run("random", 1, goodput_share=0.5, ttft_p90_s=9.0),
    run("random", 2, goodput_share=0.5, ttft_p90_s=9.0),
]


def summary_of(policy: str) -> Summary:
    return next(summary for summary in summarise(RUNS) if summary.policy == policy)


def test_means_and_shares_are_taken_over_seeds() -> None:
    """A share of the oracle's is one of the same seed."""
    found = summary_of("predicted")
    assert found.seeds == (1, 2)
    assert found.metrics["goodput_share"].mean == pytest.approx(0.85)
    assert found.metrics["goodput_share"].ci95 == pytest.approx(12.706 * 0.05)
    assert found.of_oracle["goodput_share"].mean == pytest.approx((0.9 + 1.0) / 2)
    assert found.of_oracle["ttft_p90_s"].mean == pytest.approx((1.2 + 1.4) / 2)


def test_a_policy_is_held_against_the_best_other_seed_by_seed() -> None:
    """The best other is chosen for each figure; the oracle is none."""
    found = summary_of("predicted").against_best
    assert found["goodput_share"].rival == "p2c"
    assert found["goodput_share"].difference.mean == pytest.approx((0.3 + 0.1) / 2)
    assert found["goodput_share"].difference.ci95 == pytest.approx(12.706 * 0.1)
    assert found["ttft_p90_s"].rival == "p2c"
    assert found["ttft_p90_s"].difference.mean == pytest.approx(0.25)
    assert summary_of("p2c").against_best["goodput_share"].rival == "predicted"
    assert summary_of("oracle").against_best["goodput_share"].rival == "predicted"


def test_what_cannot_be_compared_is_left_out() -> None:
    """Without an oracle, without rivals, or where the oracle has nothing, there is no number instead of a wrong one."""
    (alone,) = summarise([run("predicted", 1)])
    assert alone.of_oracle == {}
    assert alone.against_best == {}
    assert alone.metrics["goodput_share"] == (1.0, None)
    none = summarise([run("oracle", 1, hit_rate=0.0), run("p2c", 1, hit_rate=0.0)])[1]
    assert "hit_rate" not in none.of_oracle
    assert none.of_oracle["goodput_share"].mean == 1.0


def test_json_holds_every_run_and_summary() -> None:
    """A script finds all figures by name, and the settings they came from."""
    document = json.loads(json.dumps(as_json(RUNS, summarise(RUNS))))
    assert len(document["runs"]) == 8
    assert document["runs"][2]["figures"]["ttft_p90_s"] == 0.6
    assert document["runs"][2]["seed"] == 1
    best = next(summary for summary in document["summaries"] if summary["policy"] == "predicted")
    assert best["metrics"]["goodput_share"]["mean"] == pytest.approx(0.85)
    assert best["against_best"]["goodput_share"]["rival"] == "p2c"
    assert best["settings"]


def test_the_table_ranks_by_goodput() -> None:
    """The best stands first; its share of the oracle's, and its lead with how sure it is, beside it."""
    title, head, *rows = tables(summarise(RUNS)).splitlines()
    assert title == "agents: 100 requests, 2 seeds"
    assert head.split("  ")[0] == "policy"
    assert [row.split()[0] for row in rows] == ["oracle", "predicted", "p2c", "random"]
    assert rows[1].split()[1:4] == ["85.0±63.5", "0.950", "+20.0±127.1"]


def test_a_narrow_terminal_gets_fewer_columns() -> None:
    """Lines are not broken; the last columns go first."""
    wide, narrow = (tables(summarise(RUNS), width).splitlines() for width in (None, 60))
    assert max(map(len, narrow)) <= 60
    assert all(full.startswith(short) for full, short in zip(wide, narrow, strict=True))
