"""The real router in front of replicas that fail all the time, under every kind of request and client at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# To start, to settle and to judge.
_BESIDES_S = 120


def soak(minutes: float, faults_per_second: float, seed: int, folder: Path) -> None:
    """Runs a soak to its end; the report is shown if an invariant was broken."""
    results = folder / "soak.json"
    command = [sys.executable, "-m", "loadtests.soak", "--minutes", str(minutes), "--faults-per-second", str(faults_per_second)]
    command += ["--seed", str(seed), "--json", str(results), "--logs", str(folder / "logs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 * minutes + _BESIDES_S, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads(results.read_text())
    assert found["violations"] == []
    # So that "no violation" says something.
    assert sum(found["faults"].values()) > 30 * minutes * faults_per_second
    assert found["outcomes"]["completed"] > 200 * minutes
    assert found["continuations"]["continued"] > 0


@pytest.mark.timeout(60 + _BESIDES_S + 30)
def test_a_minute_of_faults_breaks_no_promise(tmp_path: Path) -> None:
    """Whatever fails, each request ends once, each answer is right or says that it is not, nobody hangs, nothing leaks."""
    soak(1, 2, 1, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(300 + _BESIDES_S + 30)
def test_five_minutes_of_faults_break_no_promise(tmp_path: Path) -> None:
    """The same for so long that memory must have become flat."""
    soak(5, 1, 2, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("--minutes", "0"), "--minutes 0.0: must be at least"),
        (("--faults-per-second", "0"), "--faults-per-second 0.0: must be at least"),
        (("--replicas", "1"), "--replicas 1: must be at least 2"),
        (("--logs", str(ROOT / "loadtests")), "name an empty or a new folder"),
    ],
)
def test_wrong_use_names_the_option_and_what_would_do(arguments: tuple[str, ...], shown: str) -> None:
    """Exit status 2, and nothing is started."""
    command = [sys.executable, "-m", "loadtests.soak", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert shown in done.stderr.replace("\n", " ")
