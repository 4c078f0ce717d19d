"""Lays out the versions of a store as lines of text. Pure."""

from collections.abc import Mapping, Sequence

_COLUMNS = ("model", "version", "parent", "step", "size", "tensors", "published")
_RIGHT = frozenset({"step", "size", "tensors"})
# Left out in this order where the lines would be too long; a model and a version are needed to name what is there.
_DISPENSABLE = ("tensors", "parent", "step", "size", "published")
_GAP = "  "


def version_table(rows: Sequence[Mapping[str, str]], width: int | None) -> list[str]:
    """A header and a line for each row, nothing cut off; `width` is the most characters wanted in a line, None for any.

    Rows map columns to their text; columns may be absent. Lines get longer than `width` only where leaving out other
    columns is not enough.
    """
    columns = list(_COLUMNS)
    lines = _lines(rows, columns)
    for column in _DISPENSABLE:
        if width is None or max(map(len, lines)) <= width:
            break
        columns.remove(column)
        lines = _lines(rows, columns)
    return lines


def _lines(rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> list[str]:
    table = [list(columns), *([row.get(column, "") for column in columns] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    return [
        _GAP.join(
            cell.rjust(width) if column in _RIGHT else cell.ljust(width)
            for column, cell, width in zip(columns, cells, widths, strict=True)
        ).rstrip()
        for cells in table
    ]
