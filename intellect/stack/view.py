"""Shows the start of the stack: a live table on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from intellect.stack.failure import plain_line

_STYLES = {"ready": "green", "failed": "red", "waiting": "dim"}
_STYLE_OTHERWISE = "yellow"
_REPEAT_S = 15.0  # a plain line for a state that lasts
# Advice of the engine's libraries that nobody who waits for a start can use.
_NOISE = ("ulimit", "reserved_cpus")
_PLAIN_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    state: str
    seconds: float
    last_line: str  # of its log


class View(Protocol):
    def show(self, rows: Sequence[Row]) -> None:
        """How far each process is. Called several times a second while starting."""

    def line(self, text: str) -> None:
        """Something worth reading later."""

    def error(self, text: str) -> None: ...

    def end_start(self) -> None:
        """Nothing more to show; only lines follow. May be called twice."""


def make_view() -> View:
    console = Console(highlight=False, soft_wrap=True)
    return LiveView(console) if console.is_terminal else PlainView()


class LiveView:
    """A table that is redrawn in place, then leaves its last state on the screen."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False)
        self._has_ended = False

    def show(self, rows: Sequence[Row]) -> None:
        if self._has_ended:
            return
        if not self._live.is_started:
            self._live.start()
        self._live.update(self._table(rows), refresh=True)

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)

    def error(self, text: str) -> None:
        print(f"error: {text}", file=sys.stderr)  # noqa: T201 - the command's one line

    def end_start(self) -> None:
        self._has_ended = True
        self._live.stop()

    def _table(self, rows: Sequence[Row]) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False, expand=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, justify="right")
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for row in rows:
            style = _STYLES.get(row.state, _STYLE_OTHERWISE)
            line = "" if row.state == "ready" else plain_line(row.last_line)
            table.add_row(row.name, Text(row.state, style), f"{row.seconds:.0f} s", Text(line, "dim"))
        return table


class PlainView:
    """A line when a state changes, and now and then while it lasts. For logs and scripts."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[str, float]] = {}

    def show(self, rows: Sequence[Row]) -> None:
        now = time.monotonic()
        for row in rows:
            state, at = self._shown.get(row.name, ("waiting", now))
            if row.state == state and (state in ("waiting", "ready") or now - at < _REPEAT_S):
                continue
            self._shown[row.name] = (row.state, now)
            detail = f": {plain_line(row.last_line)[:_PLAIN_WIDTH]}" if row.state == state else ""
            self.line(f"{row.name} {row.state}, {row.seconds:.0f} s{detail}")

    def line(self, text: str) -> None:
        print(text, flush=True)  # noqa: T201 - this is what the command says

    def error(self, text: str) -> None:
        print(f"error: {text}", file=sys.stderr)  # noqa: T201 - the command's one line

    def end_start(self) -> None:
        pass


def sign_of_life(lines: Sequence[str]) -> str:
    """The last of these log lines that tells a reader how far the process is, or nothing."""
    return next((line for line in reversed(lines) if not any(word in line for word in _NOISE)), "")
