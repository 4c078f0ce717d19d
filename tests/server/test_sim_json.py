"""Minimal JSON for a schema."""

import json
import random
from typing import Any

import pytest

from server.sim_json import minimal_instance


@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        ({"type": "string"}, lambda value: isinstance(value, str) and value),
        ({"type": "string", "minLength": 10, "maxLength": 11}, lambda value: 10 <= len(value) <= 11),
        ({"type": "integer", "minimum": 5, "maximum": 7}, lambda value: 5 <= value <= 7),
        ({"type": "number", "exclusiveMinimum": 5, "exclusiveMaximum": 7}, lambda value: value == 6),
        ({"type": "boolean"}, lambda value: isinstance(value, bool)),
        ({"type": "null"}, lambda value: value is None),
        ({"type": ["null", "integer"]}, lambda value: isinstance(value, int)),
        ({"const": 3}, lambda value: value == 3),
        ({"enum": ["a", "b"]}, lambda value: value in ("a", "b")),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, lambda value: len(value) == 2),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, lambda value: isinstance(value, int)),
        ({"properties": {"a": {"type": "integer"}}}, lambda value: list(value) == ["a"]),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]}, lambda value: list(value) == ["b"]),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"const": 1}}}, lambda value: value == 1),
        ({}, lambda value: isinstance(value, str)),
    ],
)
def test_the_value_fits_the_schema(schema: dict[str, Any], fits: Any) -> None:
    """Each construct gets a value that it allows, and the value is JSON."""
    value = minimal_instance(schema, random.Random(1))
    assert fits(value), value
    assert json.loads(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#"}, "requires itself"),
        ({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}, "requires itself"),
        ({"$ref": "#/$defs/missing"}, "does not define"),
    ],
)
def test_a_schema_without_an_instance_is_refused(schema: dict[str, Any], reason: str) -> None:
    """Endless and dangling schemas raise with the reason."""
    with pytest.raises(ValueError, match=reason):
        minimal_instance(schema, random.Random(1))
