"""Searches each rival's best settings: `python -m router.sim.search FILE` writes them as `rivals/tuned.toml` has them.

One setting for all workloads with reuse, each at about 80 % of saturation and past it, with one seed and short traces. Best is
the highest mean share of good requests; where that is equal to a tenth of a per cent, the TTFT p90 nearest to the oracle's.
"""

import argparse
import dataclasses
import enum
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from router.sim.contestants import ORACLE
from router.sim.experiment import Run, RunSpec, execute
from router.sim.rivals.registry import RIVALS
from router.sim.timing import H200_GLM
from router.sim.tuning import search
from router.sim.workloads.catalogue import SCENARIOS, WITH_REUSE

LOADS = (1.0, 1.5)
SEED = 101  # not one of those that policies are compared with
DURATION_SHARE = 0.5  # of a workload's own
BUDGET = 16  # tries for each rival
GOOD_DECIMALS, TIE = 3, 0.0005  # half of the last digit that counts
# What its operator measures on the hardware instead of searching it.
CALIBRATED: Mapping[str, Mapping[str, object]] = {
    "llmd_token_load": {"prefill_tokens_per_s": H200_GLM.prefill_tokens_per_s},
    "llmd_token_load_precise": {"prefill_tokens_per_s": H200_GLM.prefill_tokens_per_s},
}


class Found(NamedTuple):
    """Of one rival."""

    settings: Any
    value: float
    default_value: float


def specs(policy: str, settings: Any = None, workloads: Sequence[str] = WITH_REUSE) -> list[RunSpec]:
    """The runs that one try takes."""
    return [
        RunSpec(
            policy=policy,
            settings=settings,
            workload=workload,
            seed=SEED,
            load=load,
            duration_s=SCENARIOS[workload].duration_s * DURATION_SHARE,
        )
        for workload in workloads
        for load in LOADS
    ]


def value_of(runs: Sequence[Run], oracle_p90_s: Sequence[float]) -> float:
    """The mean goodput, and less than its last digit that counts for TTFT p90 against the oracle's in the same runs."""
    good = sum(run.figures.values["goodput_share"] for run in runs) / len(runs)
    nearness = [
        min(1.0, oracle / p90) if (p90 := run.figures.values["ttft_p90_s"]) > 0.0 else 1.0
        for run, oracle in zip(runs, oracle_p90_s, strict=True)
    ]
    return round(good, GOOD_DECIMALS) + TIE * sum(nearness) / len(nearness)


def find(name: str, oracle_p90_s: Sequence[float], budget: int, workloads: Sequence[str] = WITH_REUSE) -> Found:
    """The best settings of one rival that `budget` tries meet; the same each time."""

    def evaluate(settings: Any) -> float:
        return value_of([execute(spec) for spec in specs(name, settings, workloads)], oracle_p90_s)

    entry = RIVALS[name]
    start = dataclasses.replace(entry.defaults, **CALIBRATED.get(name, {}))
    settings, value = search(evaluate, start, entry.search, Random(f"{SEED} {name}"), budget)
    return Found(settings, value, evaluate(start))


def as_toml(found: Mapping[str, Found]) -> str:
    """A table for each rival, with what differs from its defaults."""
    lines = ["# Written by `python -m router.sim.search`: each rival's best settings over all workloads with reuse."]
    for name, (settings, value, default_value) in found.items():
        lines += ["", f"[{name}]  # mean goodput {value:.3f}, with its defaults {default_value:.3f}"]
        defaults = dataclasses.asdict(RIVALS[name].defaults)
        lines += [f"{key} = {_toml(given)}" for key, given in dataclasses.asdict(settings).items() if given != defaults[key]]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or isinstance(value, str):
        return f'"{value.value}"' if isinstance(value, enum.Enum) else f'"{str(value).lower()}"'
    return str(value)


def _oracle_p90_s() -> list[float]:
    return [execute(spec).figures.values["ttft_p90_s"] for spec in specs(ORACLE)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m router.sim.search", description=__doc__)
    parser.add_argument("file", type=Path, help="where to write the settings, e.g. router/sim/rivals/tuned.toml")
    parser.add_argument("--budget", type=int, default=BUDGET, help="tries for each rival [%(default)s]")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="rivals at the same time [%(default)s]")
    chosen = parser.parse_args(arguments)
    began = time.monotonic()
    oracle_p90_s = _oracle_p90_s()
    found: dict[str, Found] = {}
    with ProcessPoolExecutor(chosen.processes, mp_context=get_context("spawn")) as pool:
        searched = {name: entry for name, entry in RIVALS.items() if entry.search}
        futures = {pool.submit(partial(find, name, oracle_p90_s, chosen.budget)): name for name in searched}
        for future in as_completed(futures):
            name = futures[future]
            found[name] = future.result()
            sys.stderr.write(f"{time.monotonic() - began:.0f} s: {name} {found[name]}\n")
    chosen.file.write_text(as_toml({name: found[name] for name in searched}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
