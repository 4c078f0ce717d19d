from pathlib import Path

import pytest

from intellect.stack.process import last_lines, lines_of_last_run, shorten_log
from intellect.stack.view import PlainView, Row, sign_of_life


def test_plain_progress_is_a_line_for_each_change(capsys: pytest.CaptureFixture[str]) -> None:
    """A log of `intellect up` stays readable: nothing is repeated while nothing changes."""
    view = PlainView()
    engine = "2026-11-30 16:34:50,171 INFO server.engine_process: engine: (Worker pid=9) INFO 11-30 16:34:50 [x.py:2] loading"
    for seconds in (0.0, 0.25, 0.5):
        view.show(
            [Row("router", "ready", 1.0, ""), Row("replica-0", "starting", seconds, engine), Row("replica-1", "waiting", 0, "")]
        )
    view.show([Row("replica-0", "ready", 61.6, engine)])
    view.end_start()
    assert capsys.readouterr().out.splitlines() == [
        "router ready, 1 s",
        "replica-0 starting, 0 s",
        "replica-0 ready, 62 s",
    ]


def test_advice_of_libraries_is_no_progress() -> None:
    """What nobody can use while waiting is passed over."""
    loading, advice = "loading weights", ["WARNING reserved_cpus is not set", "Found ulimit of 1024 and failed to increase it"]
    assert sign_of_life([loading, *advice]) == loading
    assert sign_of_life(advice) == ""


def test_a_cause_is_not_looked_for_in_an_earlier_run(tmp_path: Path) -> None:
    """A log goes on over several runs."""
    log = tmp_path / "x.log"
    log.write_text("---- x started at 1 ----\nerror: old\n---- x started at 2 ----\nerror: new\n")
    assert lines_of_last_run(log, 200) == ["error: new"]
    log.write_text("error: without a mark\n")
    assert lines_of_last_run(log, 200) == ["error: without a mark"]


def test_a_log_that_has_grown_keeps_its_end(tmp_path: Path) -> None:
    """Logs do not fill the disk over many runs, and no line is cut in two."""
    log = tmp_path / "x.log"
    log.write_text("".join(f"line {number:07d}\n" for number in range(700_000)))
    shorten_log(log)
    lines = log.read_text().splitlines()
    assert lines[-1] == "line 0699999"
    assert lines[0].startswith("line ")
    assert log.stat().st_size <= 1 << 20
    shorten_log(log)
    assert log.read_text().splitlines() == lines


def test_the_last_lines_skip_empty_ones(tmp_path: Path) -> None:
    """What a failed process said last is shown, however it ends its output."""
    log = tmp_path / "x.log"
    assert last_lines(log, 3) == []
    log.write_bytes(b"first\nsecond\n\xff third \n\n\n")
    assert last_lines(log, 2) == ["second", "\ufffd third"]
