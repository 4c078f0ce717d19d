"""`python -m loadtests.placement` as its users call it wrongly."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ((), "CHECK"),
        (("speed",), "calibrate"),
        (("http-order", "--seconds", "0"), "--seconds 0.0: must be at least 1"),
        (("real-rank", "--rounds", "0"), "--rounds 0: must be at least 1"),
        (("calibrate", "--rates", "4", "-1"), "--rates 4 -1: each must be above 0"),
        (("real-rank", "--model", "/nonexistent"), "--model /nonexistent: no folder"),
        (("real-rank", "--timing", "/nonexistent"), "--timing /nonexistent: no file"),
    ],
)
def test_wrong_use_names_the_option_and_what_would_do(arguments: tuple[str, ...], shown: str) -> None:
    """Exit status 2, and nothing is started."""
    command = [sys.executable, "-m", "loadtests.placement", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert shown in done.stderr
