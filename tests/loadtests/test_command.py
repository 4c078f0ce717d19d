"""`python -m loadtests.overhead` as its users call it wrongly, or on a machine that lacks something."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtests.overhead", *arguments]
    env = None if path is None else {"PATH": path}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, env=env)


def test_a_missing_program_is_named_with_its_remedy() -> None:
    """Nothing is started, and the user can copy the command that installs it."""
    done = run("--routers", "ours", path="/nonexistent")
    assert done.returncode == 1
    assert "apt-get install" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("--seconds", "0"), "--seconds 0: must be at least 1"),
        (("--rounds", "-1"), "--rounds -1: must be at least 1"),
        (("--source", "/nonexistent"), "--source /nonexistent: no checkout"),
        (("--routers", "nginx"), "'ours', 'vllm-router'"),
        (("--only", "speed"), "'requests', 'chunks'"),
    ],
)
def test_wrong_use_names_the_option_and_what_would_do(arguments: tuple[str, ...], shown: str) -> None:
    """Exit status 2, and nothing is measured."""
    done = run(*arguments)
    assert done.returncode == 2
    assert shown in done.stderr
