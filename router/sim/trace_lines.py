"""The lines of a trace file: read, and complained about with their place and a remedy."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_intdigest

TOKENS_MAX = 10_000_000  # beyond what any model takes or gives; a slip must not fill the memory


class TraceError(ValueError):
    """A trace file that cannot be used. One line: file, line, field, value, remedy."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file, and the way to complain about it."""

    path: Path
    number: int
    fields: Mapping[str, object]

    def error(self, field: str, remedy: str) -> TraceError:
        if field not in self.fields:
            return TraceError(f"{self.path}, line {self.number}: {field} is missing; {remedy}")
        value = json.dumps(self.fields[field])
        shown = value if len(value) <= 60 else value[:57] + "..."
        return TraceError(f"{self.path}, line {self.number}: {field} is {shown}; {remedy}")

    def seconds(self, field: str) -> float:
        value = self.fields.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise self.error(field, "give a number, 0 or more")
        return float(value)

    def tokens(self, field: str) -> int:
        value = self.fields.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= TOKENS_MAX:
            raise self.error(field, f"give a whole number of tokens, 1 to {TOKENS_MAX}")
        return value

    def size(self, field: str) -> int:
        value = self.fields.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= TOKENS_MAX * 100:
            raise self.error(field, f"give a whole number of bytes, 0 to {TOKENS_MAX * 100}")
        return value

    def optional_tokens(self, field: str) -> int | None:
        return None if self.fields.get(field) is None else self.tokens(field)

    def text(self, field: str, default: str) -> str:
        value = self.fields.get(field)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(field, "give a string, or leave it out")
        return value

    def hashes(self, field: str) -> list[int]:
        value = self.fields.get(field)
        if not isinstance(value, list):
            raise self.error(field, "give a list of whole numbers or strings")
        hashes = []
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int | str):
                raise self.error(field, f"its element {json.dumps(item)} is neither a whole number nor a string")
            hashes.append(xxh3_64_intdigest(str(item).encode()))
        return hashes


def lines_of(path: Path) -> Iterator[Line]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TraceError(f"{path}: does not exist; check the path") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is not UTF-8 at byte {error.start}; give a file of JSON lines, not compressed") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}); give a file of JSON lines") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: is not JSON ({error}); write one JSON object per line") from error
        if not isinstance(fields, dict):
            raise TraceError(f"{path}, line {number}: is no JSON object; write one object per line")
        yield Line(path, number, fields)
