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
    tables = tomllib.loads(resources.files("router.sim.rivals").joinpath(FILE).read_text(encoding="utf-8"))
    given = [f"{name}.{key}={_text(value)}" for name, changes in tables.items() for key, value in changes.items()]
    return settings_of(RIVALS, given)


def _text(value: object) -> str:
    """As `--setting` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
