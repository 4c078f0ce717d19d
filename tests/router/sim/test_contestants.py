"""Policies and their settings are named in text, and a slip gets an answer that helps."""

import dataclasses
from random import Random

import pytest

from router.policy.interface import Policy
from router.sim.contestants import NAMES, ContestantError, check_name, default_settings, make_policy, settings_of


@pytest.mark.parametrize("name", NAMES)
def test_every_name_makes_a_policy(name: str) -> None:
    """With the settings that are shown as its defaults."""
    settings = default_settings(name)
    assert dataclasses.is_dataclass(settings)
    assert isinstance(make_policy(name, settings, Random(1)), Policy)


def test_settings_are_read_as_what_they_are() -> None:
    """Numbers, switches, words, and none where that is allowed."""
    given = (
        *("cache_aware.threshold=0.5", "cache_aware.balance_abs=32", "cache_aware.sessions=true"),
        *("dynamo.predicted_ttl_s=none", "cache_aware.fallback=" + default_settings("cache_aware_old_sglang").fallback),
    )
    found = settings_of(["cache_aware", "dynamo", "p2c"], given)
    assert list(found) == ["cache_aware", "dynamo", "p2c"]
    aware = found["cache_aware"]
    assert (aware.threshold, aware.balance_abs, aware.sessions) == (0.5, 32, True)
    assert aware.fallback is default_settings("cache_aware_old_sglang").fallback
    assert found["dynamo"].predicted_ttl_s is None
    assert settings_of(["cache_aware"], [])["cache_aware"] == default_settings("cache_aware")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("threshold=1", "threshold=1: is not POLICY.KEY=VALUE; write it like cache_aware.threshold=0.5"),
        ("cache_aware.threshold", "cache_aware.threshold: is not POLICY.KEY=VALUE"),
        ("cache_awar.threshold=1", "cache_awar: there is no such policy, did you mean cache_aware?; known are predicted,"),
        ("dynamo.temperature=1", "dynamo.temperature=1: dynamo does not run; add --policy dynamo"),
        ("cache_aware.treshold=1", "cache_aware.treshold=1: there is no such setting, did you mean threshold?; known are"),
        ("p2c.choices=3", "p2c.choices=3: there is no such setting; it has none"),
        ("cache_aware.threshold=high", "cache_aware.threshold=high: give a number; the default is 0.3"),
        ("cache_aware.threshold=nan", "cache_aware.threshold=nan: give a number; the default is 0.3"),
        ("cache_aware.balance_abs=1.5", "cache_aware.balance_abs=1.5: give a whole number; the default is 64"),
        ("cache_aware.sessions=yes", "cache_aware.sessions=yes: give true or false; the default is False"),
        ("cache_aware.fallback=any", "cache_aware.fallback=any: give one of "),
    ],
)
def test_a_setting_that_cannot_be_is_told(text: str, message: str) -> None:
    """What is wrong with it, and what there is instead."""
    with pytest.raises(ContestantError) as error:
        settings_of(["cache_aware", "p2c"], [text])
    assert str(error.value).startswith(message)


def test_a_name_that_is_not_known_is_told() -> None:
    """With the one that was probably meant."""
    assert check_name("oracle") == "oracle"
    with pytest.raises(ContestantError, match=r"least_loded: there is no such policy, did you mean least_loaded\?"):
        check_name("least_loded")
