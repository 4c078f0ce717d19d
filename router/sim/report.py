"""Compares policies over the seeds of each workload: estimates, shares of the oracle's, differences to the best rival."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.sim.contestants import ORACLE, default_settings
from router.sim.experiment import Run
from router.sim.figures import METRICS
from router.sim.statistics import Estimate, estimate

# Of these a policy's value is told in parts of the oracle's, and its difference to the best rival's.
COMPARED = ("goodput_share", "ttft_p90_s", "output_tokens_per_s", "hit_rate")


@dataclass(frozen=True, slots=True)
class Difference:
    """This policy less the best of the others (the oracle left out), seed by seed. Below 0 is worse where more is better."""

    rival: str
    difference: Estimate


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy on one workload."""

    workload: str
    policy: str
    settings: Mapping[str, Any]
    seeds: tuple[int, ...]
    requests: Estimate
    wall_s: Estimate
    metrics: Mapping[str, Estimate]  # every key of METRICS
    of_oracle: Mapping[str, Estimate]  # of COMPARED; left out where the oracle did not run or has 0
    against_best: Mapping[str, Difference]  # of COMPARED; left out where nobody else ran
    tenants: Mapping[str, Mapping[str, Estimate]]


def summarise(runs: Sequence[Run]) -> list[Summary]:
    """One summary for each workload and policy, in the order in which they first come."""
    table: dict[str, dict[str, dict[int, Run]]] = {}
    for run in runs:
        table.setdefault(run.spec.workload, {}).setdefault(run.spec.policy, {})[run.spec.seed] = run
    return [_summary(policy, by_policy) for by_policy in table.values() for policy in by_policy]


def _summary(policy: str, by_policy: Mapping[str, Mapping[int, Run]]) -> Summary:
    own = by_policy[policy]
    seeds = tuple(own)
    spec = own[seeds[0]].spec
    tenants = {tenant for run in own.values() for tenant in run.figures.tenants}
    return Summary(
        workload=spec.workload,
        policy=policy,
        settings=dataclasses.asdict(default_settings(policy) if spec.settings is None else spec.settings),
        seeds=seeds,
        requests=estimate([run.figures.requests for run in own.values()]),
        wall_s=estimate([run.wall_s for run in own.values()]),
        metrics={key: estimate(_values(own, key)) for key in METRICS},
        of_oracle=_of_oracle(own, by_policy.get(ORACLE)),
        against_best=_against_best(policy, by_policy),
        tenants={tenant: _tenant(own, tenant) for tenant in sorted(tenants)},
    )


def _values(runs: Mapping[int, Run], key: str) -> list[float]:
    return [run.figures.values[key] for run in runs.values()]


def _of_oracle(own: Mapping[int, Run], oracle: Mapping[int, Run] | None) -> dict[str, Estimate]:
    shares = {}
    for key in COMPARED if oracle is not None else ():
        assert oracle is not None
        seeds = [seed for seed in own if seed in oracle]
        if seeds and all(oracle[seed].figures.values[key] > 0 for seed in seeds):
            shares[key] = estimate([own[seed].figures.values[key] / oracle[seed].figures.values[key] for seed in seeds])
    return shares


def _against_best(policy: str, by_policy: Mapping[str, Mapping[int, Run]]) -> dict[str, Difference]:
    own = by_policy[policy]
    rivals = [name for name, runs in by_policy.items() if name not in (policy, ORACLE) and runs.keys() == own.keys()]
    differences = {}
    for key in COMPARED if rivals else ():
        sign = 1.0 if METRICS[key].more_is_better else -1.0
        means = {name: sign * estimate(_values(by_policy[name], key)).mean for name in rivals}
        best = max(rivals, key=means.__getitem__)
        theirs = by_policy[best]
        pairs = [own[seed].figures.values[key] - theirs[seed].figures.values[key] for seed in own]
        differences[key] = Difference(best, estimate(pairs))
    return differences


def _tenant(own: Mapping[int, Run], tenant: str) -> dict[str, Estimate]:
    figures = [run.figures.tenants[tenant] for run in own.values() if tenant in run.figures.tenants]
    return {key: estimate([one[key] for one in figures]) for key in figures[0]}


def as_json(runs: Sequence[Run], summaries: Sequence[Summary]) -> dict[str, Any]:
    """Everything, in builtin types: `runs` one by one, and `summaries` of them. Base units, shares from 0 to 1."""
    return {
        "runs": [
            {
                "workload": run.spec.workload,
                "policy": run.spec.policy,
                "seed": run.spec.seed,
                "load": run.spec.load,
                "routers": run.spec.routers,
                "sharing": run.spec.sharing,
                "requests": run.figures.requests,
                "wall_s": run.wall_s,
                "figures": dict(run.figures.values),
                "tenants": {tenant: dict(figures) for tenant, figures in run.figures.tenants.items()},
            }
            for run in runs
        ],
        "summaries": [_summary_as_json(summary) for summary in summaries],
    }


def _summary_as_json(summary: Summary) -> dict[str, Any]:
    return {
        "workload": summary.workload,
        "policy": summary.policy,
        "settings": dict(summary.settings),
        "seeds": list(summary.seeds),
        "requests": summary.requests.mean,
        "wall_s": summary.wall_s.mean,
        "metrics": _estimates(summary.metrics),
        "of_oracle": _estimates(summary.of_oracle),
        "against_best": {
            key: {"rival": found.rival, **found.difference._asdict()} for key, found in summary.against_best.items()
        },
        "tenants": {tenant: _estimates(figures) for tenant, figures in summary.tenants.items()},
    }


def _estimates(values: Mapping[str, Estimate]) -> dict[str, dict[str, float | None]]:
    return {key: value._asdict() for key, value in values.items()}
