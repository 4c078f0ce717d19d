"""Every placement policy that can be run in the simulator, by name, and how its settings are given as text."""

import dataclasses
import difflib
import enum
import random
from collections.abc import Iterable, Mapping
from types import MappingProxyType, NoneType
from typing import Any, get_args, get_type_hints

from router.policy.cost import PredictedSettings
from router.policy.interface import Policy
from router.policy.predicted import Predicted
from router.sim.oracle import Oracle, OracleWeights
from router.sim.rivals.registry import RIVALS

PREDICTED = "predicted"
ORACLE = "oracle"  # sees what no policy may see
NAMES = (PREDICTED, *RIVALS, ORACLE)


class ContestantError(ValueError):
    """A name or a setting that cannot be used. The message says `<value>: cause; remedy`."""


def check_name(name: str) -> str:
    if name not in NAMES:
        raise ContestantError(f"{name}: there is no such policy{suggestion(name, NAMES)}; known are {', '.join(NAMES)}")
    return name


def suggestion(name: str, known: Iterable[str]) -> str:
    """`, did you mean ...?`, or nothing where no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {near[0]}?" if near else ""


def default_settings(name: str) -> Any:
    """A frozen dataclass."""
    if name == PREDICTED:
        return PredictedSettings()
    return OracleWeights() if name == ORACLE else RIVALS[name].defaults


def make_policy(name: str, settings: Any, rng: random.Random) -> Policy:
    """The oracle must be revealed to besides: `simulate(..., reveal_to=[oracle])`."""
    if name == PREDICTED:
        return Predicted(rng, settings)
    return Oracle(rng, settings) if name == ORACLE else RIVALS[name].make(rng, settings)


def settings_of(
    names: Iterable[str], given: Iterable[str], base: Mapping[str, Any] = MappingProxyType({})
) -> Mapping[str, Any]:
    """The settings of each of `names`, those of `base` or else its defaults, changed by each `policy.key=value` of `given`.

    Raises ContestantError.
    """
    settings = {name: base[name] if name in base else default_settings(check_name(name)) for name in names}
    for text in given:
        place, equals, value = text.partition("=")
        name, dot, key = place.partition(".")
        if not equals or not dot:
            raise ContestantError(f"{text}: is not POLICY.KEY=VALUE; write it like cache_aware.threshold=0.5")
        check_name(name)
        if name not in settings:
            raise ContestantError(f"{text}: {name} does not run; add --policy {name}")
        settings[name] = _changed(text, settings[name], key, value)
    return settings


def _changed(text: str, settings: Any, key: str, value: str) -> Any:
    fields = [field.name for field in dataclasses.fields(settings)]
    if key not in fields:
        known = f"known are {', '.join(fields)}" if fields else "it has none"
        raise ContestantError(f"{text}: there is no such setting{suggestion(key, fields)}; {known}")
    hint = get_type_hints(type(settings))[key]
    try:
        return dataclasses.replace(settings, **{key: _read(value, get_args(hint) or (hint,))})
    except ValueError as error:
        raise ContestantError(f"{text}: {error}; the default is {getattr(settings, key)}") from error


def _read(text: str, kinds: tuple[Any, ...]) -> object:
    """`text` as a value of the first of `kinds` that it can be."""
    for kind in kinds:
        if kind is NoneType and text == "none":
            return None
        if kind is bool and text in ("true", "false"):
            return text == "true"
        if kind is str or issubclass(kind, enum.Enum) or kind in (int, float):
            try:
                value: object = kind(text)
            except ValueError:
                continue
            if value == value:  # not a number that is none
                return value
    raise ValueError(f"give {' or '.join(_described(kind) for kind in kinds)}")


_WORDS: Mapping[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", NoneType: "none", str: "a word"}


def _described(kind: Any) -> str:
    if issubclass(kind, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in kind)
    return _WORDS.get(kind, "nothing, since it cannot be given as text")
