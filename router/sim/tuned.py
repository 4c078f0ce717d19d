"""The best settings of each rival, as the search has found them: `rivals/tuned.toml`."""

import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from router.sim.contestants import settings_of
from router.sim.rivals.registry import RIVALS

FILE = "tuned.toml"  # beside the rivals; a table for each, with the settings that differ from its defaults


def tuned_settings() -> Mapping[str, Any]:
    """The settings of every rival by its name. Raises ContestantError for a rival or a setting that does not exist."""
    return read_settings(resources.files("router.sim.rivals").joinpath(FILE).read_text(encoding="utf-8"))


def read_settings(text: str) -> Mapping[str, Any]:
    """As `tuned_settings`, of such a file's text."""
    tables = tomllib.loads(text)
    return settings_of(RIVALS, [f"{name}.{key}={_text(value)}" for name, own in tables.items() for key, value in own.items()])


def _text(value: object) -> str:
    """As `--setting` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
