"""Runs are repeatable, whatever the number of processes, and a run that fails says which it was."""

import dataclasses
from pathlib import Path

import pytest

from router.sim.contestants import NAMES, default_settings
from router.sim.experiment import Run, RunFailed, RunSpec, execute, execute_all, specs_of

SHORT = RunSpec(policy="least_loaded", workload="agents", seed=1, duration_s=6.0)
TIMES = ("decision_us", "decision_p99_us")


def repeatable(run: Run) -> dict[str, float]:
    return {key: value for key, value in run.figures.values.items() if key not in TIMES}


@pytest.mark.parametrize("policy", NAMES)
def test_every_policy_serves_a_workload(policy: str) -> None:
    """All requests end, and some of them well."""
    run = execute(dataclasses.replace(SHORT, policy=policy, duration_s=4.0, load=0.5))
    assert run.figures.requests > 5
    assert run.figures.values["unserved"] == 0
    assert run.figures.values["goodput_share"] > 0.5
    assert run.figures.values["decision_us"] > 0


def test_processes_change_nothing() -> None:
    """The same figures in the same order, and each run is reported once."""
    policies = {name: default_settings(name) for name in ("random", "p2c")}
    specs = specs_of(policies, ["agents"], [1, 2], SHORT)
    assert [(spec.seed, spec.policy) for spec in specs] == [(1, "random"), (1, "p2c"), (2, "random"), (2, "p2c")]
    seen: list[Run] = []
    alone = execute_all(specs, 1, seen.append)
    assert seen == alone
    together = execute_all(specs, 2, lambda run: None)
    assert [run.spec for run in together] == specs
    assert [repeatable(run) for run in together] == [repeatable(run) for run in alone]
    assert repeatable(alone[0]) != repeatable(alone[2])


def test_options_reach_the_fleet() -> None:
    """More replicas wait less; routers that do not share know less of each other's placements."""
    crowded = dataclasses.replace(SHORT, policy="predicted", workload="ladder_73", duration_s=15.0, load=2.0)
    few, many = (execute(dataclasses.replace(crowded, replicas=replicas)) for replicas in (2, 16))
    assert few.figures.values["ttft_p50_s"] > many.figures.values["ttft_p50_s"]
    shared, apart = (execute(dataclasses.replace(crowded, routers=4, sharing=sharing)) for sharing in (True, False))
    assert shared.figures.values["hit_rate"] > apart.figures.values["hit_rate"]


def test_a_trace_is_run_like_a_workload(tmp_path: Path) -> None:
    """On the fleet of traces, or with as many replicas as are asked for."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f'{{"t": {number / 10}, "prompt": "hello", "output_tokens": 5}}\n' for number in range(20)))
    spec = RunSpec(policy="p2c", workload=str(path), seed=1, is_trace=True)
    run = execute(spec)
    assert (run.figures.requests, run.figures.values["goodput_share"]) == (20, 1.0)
    assert execute(dataclasses.replace(spec, duration_s=1.0)).figures.requests == 10


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_fails_is_named(tmp_path: Path, processes: int) -> None:
    """Here a request that no replica could hold; the others are not waited for in vain."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 400000, "hash_ids": [1]}\n')
    specs = [RunSpec(policy="p2c", workload=str(path), seed=seed, is_trace=True) for seed in (1, 2)]
    with pytest.raises(RunFailed, match=rf"p2c on {path}, seed \d: "):
        execute_all(specs, processes, lambda run: None)


def test_ours_comes_with_its_queue() -> None:
    """Past saturation those with priority are served first; rivals, which place at once, let all wait alike."""
    crowded = dataclasses.replace(SHORT, workload="mixed_tenants", load=3.0, duration_s=15.0)
    ours, theirs = (execute(dataclasses.replace(crowded, policy=policy)).figures.tenants for policy in ("predicted", "p2c"))
    assert ours["chat"]["ttft_p99_s"] < 0.5 * ours["nightly"]["ttft_p99_s"]
    assert ours["chat"]["ttft_p99_s"] < 0.5 * theirs["chat"]["ttft_p99_s"]
