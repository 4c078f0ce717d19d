"""The settings that the search has found can be loaded, and the search finds what is better."""

import dataclasses

import pytest

from router.sim.contestants import ContestantError
from router.sim.experiment import Run, RunSpec
from router.sim.figures import METRICS, RunFigures
from router.sim.rivals.registry import RIVALS
from router.sim.rivals.sticky import StickySettings
from router.sim.search import Found, as_toml, find, specs, value_of
from router.sim.tuned import read_settings, tuned_settings


def run(good: float, p90_s: float) -> Run:
    values = {**dict.fromkeys(METRICS, 0.0), "goodput_share": good, "ttft_p90_s": p90_s}
    return Run(RunSpec(policy="p2c", workload="agents", seed=1), RunFigures(values, {}, 1), 0.0)


def test_every_rival_has_its_best_settings() -> None:
    """The file names only rivals and settings that exist, and changes some."""
    tuned = tuned_settings()
    assert tuned.keys() == RIVALS.keys()
    for name, settings in tuned.items():
        assert type(settings) is RIVALS[name].settings
    assert tuned["cache_aware"] != RIVALS["cache_aware"].defaults


@pytest.mark.parametrize("text", ["[nobody]\nx = 1\n", "[sticky_least_loaded]\nnothing = 1\n"])
def test_an_unknown_name_in_the_file_is_an_error(text: str) -> None:
    with pytest.raises(ContestantError, match="there is no such"):
        read_settings(text)


def test_what_is_written_is_read_back() -> None:
    """Numbers, switches, words and none."""
    changed = {
        "cache_aware": dataclasses.replace(RIVALS["cache_aware_old_sglang"].defaults, sessions=True, threshold=0.2),
        "smetric": dataclasses.replace(RIVALS["smetric"].defaults, attention_crossover_tokens=7000.0),
        "sticky_least_loaded": StickySettings(),
    }
    text = as_toml({name: Found(settings, 0.9, 0.8) for name, settings in changed.items()})
    read = read_settings(text)
    assert {name: read[name] for name in changed} == changed


def test_goodput_counts_first_and_then_the_first_token() -> None:
    """A tenth of a per cent more of good requests is worth more than any TTFT."""
    assert value_of([run(0.951, 9.0)], [0.1]) > value_of([run(0.950, 0.1)], [0.1])
    assert value_of([run(0.951, 0.2)], [0.1]) > value_of([run(0.951, 0.3)], [0.1])
    assert value_of([run(1.0, 0.0)], [0.1]) == value_of([run(1.0, 0.1)], [0.1])


def test_the_search_is_repeatable_and_no_worse_than_the_defaults() -> None:
    """On one workload here; each try runs it at both loads."""
    workloads = ("agents_crowded",)
    assert len(specs("aibrix", workloads=workloads)) == 2
    found = find("aibrix", [0.3, 2.0], 3, workloads)
    assert found == find("aibrix", [0.3, 2.0], 3, workloads)
    assert found.value >= found.default_value
