"""A minimal JSON value that fits a JSON schema: what the simulated engine answers to response_format and tool calls."""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.sim_text import token_text, word_token

_MAX_DEPTH = 32  # a schema that requires itself has no finite instance


_QUOTED = re.compile(r"""(?<!\w)(['"`])(.{1,80}?)\1(?!\w)""")
_NUMBER = re.compile(r"(?<![\w.-])-?\d{1,15}(?![\w.])")


@dataclass(frozen=True, slots=True)
class Said:
    """What a text names that an obedient model would copy: quoted words and whole numbers, in their order."""

    quotes: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()


NOTHING_SAID = Said()


def what_is_said(text: str) -> Said:
    quotes = tuple(match[2] for match in _QUOTED.finditer(text))
    return Said(quotes, tuple(int(number) for number in _NUMBER.findall(text)))


def minimal_instance(schema: Mapping[str, Any], rng: random.Random, said: Said = NOTHING_SAID) -> object:
    """A value with only what the schema requires (all properties where nothing is required).

    Free strings and integers are the first that `said` holds and the schema allows, else made up.

    Patterns and formats are not honoured.

    Raises:
        ValueError: the schema requires itself without end, or refers to what it does not hold.
    """
    return _build(schema, schema, rng, said, 0)


def _build(schema: Any, root: Mapping[str, Any], rng: random.Random, said: Said, depth: int) -> object:
    if depth > _MAX_DEPTH:
        raise ValueError(f"the JSON schema is nested more than {_MAX_DEPTH} deep or requires itself")
    if not isinstance(schema, Mapping):
        return _word(rng)  # true, {} and the like allow anything
    if "$ref" in schema:
        return _build(_resolve(schema["$ref"], root), root, rng, said, depth + 1)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return rng.choice(list(schema["enum"]))
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _build(schema[key][0], root, rng, said, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((name for name in kind if name != "null"), "null")
    match kind or ("object" if "properties" in schema else "string"):
        case "object":
            properties = schema.get("properties") or {}
            names = schema.get("required") or properties
            return {name: _build(properties.get(name, {}), root, rng, said, depth + 1) for name in names}
        case "array":
            item = schema.get("items", {})
            return [_build(item, root, rng, said, depth + 1) for _ in range(schema.get("minItems", 1))]
        case "integer" | "number":
            return _number(schema, rng, said)
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case _:
            return _string(schema, rng, said)


def _resolve(reference: str, root: Mapping[str, Any]) -> object:
    node: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        if not part:
            continue
        if not isinstance(node, Mapping) or part not in node:
            raise ValueError(f"the JSON schema refers to {reference!r}, which it does not define")
        node = node[part]
    return node


def _number(schema: Mapping[str, Any], rng: random.Random, said: Said) -> int:
    low = int(schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1))
    high = int(schema.get("maximum", schema.get("exclusiveMaximum", low + 100) - 1))
    high = max(low, high)
    fitting = [number for number in said.numbers if low <= number <= high]
    return fitting[0] if fitting else rng.randint(low, high)


def _string(schema: Mapping[str, Any], rng: random.Random, said: Said) -> str:
    text = said.quotes[0] if said.quotes else _word(rng)
    while len(text) < schema.get("minLength", 0):
        text += _word(rng)
    return text[: schema.get("maxLength", len(text))]


def _word(rng: random.Random) -> str:
    return token_text(word_token(rng.getrandbits(32), first=True)).rstrip(".")
