"""Typed reading of a decoded JSON object, with the error wording of vLLM's request models."""

from collections.abc import Mapping
from typing import Any

from server.sim_errors import ApiError

_INT64_MAX = 2**63 - 1


class Fields:
    """One JSON object. Absent and null both give the default; every other wrong type raises ApiError 400."""

    def __init__(self, values: Mapping[str, Any], path: str = "body") -> None:
        self._values = values
        self._path = path

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None) -> int | None:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.invalid(name, "int_type", "Input should be a valid integer")
        if not -_INT64_MAX - 1 <= value <= _INT64_MAX:
            raise self.invalid(name, "less_than_equal", f"Input should be less than or equal to {_INT64_MAX}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.invalid(name, "float_type", "Input should be a valid number")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.invalid(name, "bool_type", "Input should be a valid boolean")
        return value

    def text(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.invalid(name, "string_type", "Input should be a valid string")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self._values.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.invalid(name, "dict_type", "Input should be a valid dictionary")
        return value

    def items(self, name: str) -> list[Any]:
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.invalid(name, "list_type", "Input should be a valid list")
        return value

    def invalid(self, name: str, kind: str, message: str) -> ApiError:
        """The error of this field; for a missing one, `input` shows the whole object."""
        value = self._values if kind == "missing" else self._values.get(name)
        return ApiError.invalid_body(kind, f"{self._path}.{name}", message, value)
