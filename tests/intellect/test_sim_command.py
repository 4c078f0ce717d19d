"""`intellect sim` compares policies in seconds, and tells a wrong use before the first run."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from intellect.cli import run
from router.sim.contestants import NAMES
from router.sim.figures import METRICS
from router.sim.workloads.catalogue import SCENARIOS
from tests.intellect.command import COMMAND, clean_environment, error_line, run_intellect
from tests.waiting import wait_until

QUICK = ("--workload", "agents", "--duration", "5", "--processes", "1")


def test_a_comparison_prints_a_table_and_writes_files(tmp_path: Path) -> None:
    """For people, for scripts, and for the eye; progress goes to stderr."""
    table, page = tmp_path / "result.json", tmp_path / "result.html"
    done = run_intellect(
        *("sim", "--policy", "p2c", "--policy", "cache_aware", "--setting", "cache_aware.threshold=0.4"),
        *(*QUICK, "--seeds", "1,2", "--json", str(table), "--plot", str(page)),
    )
    assert done.returncode == 0, done.stderr
    title, head, *rows = done.stdout.splitlines()
    assert title.startswith("agents: ")
    assert "2 seeds" in title
    assert "goodput %" in head
    assert {row.split()[0] for row in rows} == {"p2c", "cache_aware"}
    assert len(done.stderr.splitlines()) == 4
    assert "4/4 " in done.stderr.splitlines()[-1]
    document = json.loads(table.read_text())
    assert [(one["policy"], one["seed"]) for one in document["runs"]] == [
        *(("p2c", 1), ("cache_aware", 1), ("p2c", 2), ("cache_aware", 2)),
    ]
    assert set(document["runs"][0]["figures"]) == set(METRICS)
    assert document["summaries"][1]["settings"]["threshold"] == 0.4
    assert "<svg" in page.read_text()


def test_a_trace_is_played(tmp_path: Path) -> None:
    """Recorded traffic instead of a workload."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"t": 0, "prompt": "hello", "output_tokens": 5}\n')
    done = run_intellect("sim", "--policy", "random", "--trace", str(path), "--replicas", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{path}: 1 requests, 1 seed")


def test_the_list_names_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Policies with their settings, workloads with what they are."""
    assert run(["sim", "--list"]) == 0
    words = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert {*NAMES, *SCENARIOS} <= words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--workload is missing: give one or more of all, ladder_73, "),
        (("--workload", "agent"), "--workload agent: there is no such workload, did you mean agents?; known are "),
        (("--workload", "agents", "--policy", "orcale"), "--policy orcale: there is no such policy, did you mean oracle?"),
        (("--workload", "agents", "--seeds", "1,x"), "--seeds 1,x: is no list of whole numbers; write it like 1,2,3"),
        (("--workload", "agents", "--load", "0"), "--load 0: must be a number above 0"),
        (("--workload", "agents", "--load", "nan"), "--load nan: must be a number above 0"),
        (("--workload", "agents", "--duration", "-1"), "--duration -1: must be a number above 0"),
        (("--workload", "agents", "--sharing", "maybe"), "--sharing maybe: must be on or off"),
        (("--workload", "agents", "--events", "1"), "--events 1: must be on or off"),
        (("--workload", "agents", "--setting", "x"), "--setting x: is not POLICY.KEY=VALUE"),
        (("--workload", "agents", "--plot", "a.pdf"), "--plot a.pdf: is neither .html nor .png; name the file so"),
        (("--workload", "agents", "--json", "no/such/a.json"), "--json no/such/a.json: its folder does not exist"),
        (("--workload", "agents", "--json", "/"), "--json /: is a folder; name a file"),
        (("--trace", "no.jsonl"), "--trace no.jsonl: does not exist; check the path"),
        (("--workload", "agents", "--replicas", "0"), "--replicas 0: Input should be greater than or equal to 1"),
    ],
)
def test_wrong_use_is_told_before_anything_runs(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line: flag, value, cause, remedy; exit status 2."""
    assert run(["sim", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: {message}")
    assert len(shown.err.splitlines()) == 1


def test_a_run_that_fails_ends_with_one_line(tmp_path: Path) -> None:
    """Status 1: it was asked rightly and did not work."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"t": 0, "prompt": "hello", "output_tokens": 400000}\n')
    done = run_intellect("sim", "--policy", "random", "--trace", str(path))
    assert done.returncode == 1
    assert error_line(done).startswith(f"random on {path}, seed 1: ")


def test_an_interrupt_ends_all_processes_quietly() -> None:
    """Ctrl-C in a terminal reaches the workers too; nobody prints a traceback, nobody stays behind."""
    arguments = ("sim", "--workload", "ladder_73", "--seeds", "1,2,3,4", "--processes", "2")
    # A shell starts what runs in the background with Ctrl-C ignored, and a child inherits that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
        start_new_session=True,
    )
    signal.signal(signal.SIGINT, before)
    with process:
        assert process.stderr is not None
        first = process.stderr.readline()  # a run has ended, so that workers are at work
        assert first.startswith("1/")
        os.killpg(process.pid, signal.SIGINT)
        rest, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert rest == ""
    assert "Traceback" not in errors
    wait_until(lambda: not _alive(process.pid), 10, "the workers' end")


def _alive(group: int) -> list[psutil.Process]:
    """Processes of a group that still run; one that has ended may wait to be noticed by its parent."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(one.pid) == group and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found
