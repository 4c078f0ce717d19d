"""The command `intellect` as users run it: a process of its own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-P", "-m", "intellect")


def clean_environment(**variables: str) -> dict[str, str]:
    """Ours without INTELLECT_* settings, so that a developer's shell changes no test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INTELLECT_")}
    return {**kept, "NO_COLOR": "1", "COLUMNS": "120", **variables}


def run_intellect(
    *arguments: str, timeout_s: float = 60.0, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        env=clean_environment(**(variables or {})),
        check=False,
    )


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr of a command that failed; anything more, such as a traceback, fails the test."""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0].removeprefix("error: ")
