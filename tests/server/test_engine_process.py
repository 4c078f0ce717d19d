"""One engine process: its output, its end, and that nothing of it stays behind."""

import logging
import os
import signal
import sys
import threading

import psutil
import pytest

from server.engine_process import LINE_CHARACTERS_MAX, LINES_KEPT, LINES_WAITING_MAX, EngineProcess, LogForwarder
from server.presets import LaunchPlan
from tests.waiting import await_until, wait_until


def plan(code: str) -> LaunchPlan:
    return LaunchPlan(argv=(sys.executable, "-c", code), env={"ONLY": "this"}, start_timeout_s=10, stop_timeout_s=5)


async def test_output_is_logged_line_by_line_with_a_prefix(caplog: pytest.LogCaptureFixture) -> None:
    """What the engine writes to either stream stands in the agent's log at INFO; empty lines do not."""
    caplog.set_level(logging.INFO)
    process = await EngineProcess.start(plan("import os; os.write(1, b'one\\n\\ntw'); os.write(2, b'o\\r\\nthree \\xff')"))
    assert await process.wait() == 0
    assert process.last_lines() == ["one", "two", "three \ufffd"]
    await process.stop(0)
    engine = [record for record in caplog.records if record.name == "server.engine_process"]
    assert [record.getMessage() for record in engine] == ["engine: one", "engine: two", "engine: three \ufffd"]
    assert {record.levelno for record in engine} == {logging.INFO}


async def test_endless_lines_and_many_lines_take_bounded_memory() -> None:
    """A line without an end is cut, and only the last lines are kept for error reports."""
    code = f"print('x' * 1_000_000); [print(n) for n in range({LINES_KEPT + 50})]"
    process = await EngineProcess.start(plan(code))
    assert await process.wait() == 0
    lines = process.last_lines()
    await process.stop(0)
    assert len(lines) == LINES_KEPT
    assert lines[-1] == str(LINES_KEPT + 49)

    process = await EngineProcess.start(plan("print('x' * 1_000_000)"))
    assert await process.wait() == 0
    assert all(len(line) < LINE_CHARACTERS_MAX + 50 for line in process.last_lines())
    await process.stop(0)


def test_a_log_that_nobody_reads_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    """Lines beyond the queue are dropped and counted; the engine's pipe is emptied all the same."""
    caplog.set_level(logging.INFO)
    stuck, go_on = threading.Event(), threading.Event()

    class Stuck(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            stuck.set()
            go_on.wait(10)

    logger, handler = logging.getLogger("server.engine_process"), Stuck()
    logger.addHandler(handler)
    try:
        forwarder = LogForwarder()
        forwarder.forward(b"first")
        assert stuck.wait(5)
        for number in range(LINES_WAITING_MAX + 10):
            forwarder.forward(b"line %d" % number)
        assert forwarder.last_lines(1) == [f"line {LINES_WAITING_MAX + 9}"]
        go_on.set()
        wait_until(lambda: "10 lines dropped" in caplog.text, 5, "the note about dropped lines")
        forwarder.close()
    finally:
        go_on.set()
        logger.removeHandler(handler)


async def test_a_polite_engine_is_given_its_time() -> None:
    """SIGTERM first; what it does to finish is waited for."""
    code = (
        "import signal, time, sys; "
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), print('finished', flush=True), sys.exit(0))); "
        "print('up', flush=True); time.sleep(100)"
    )
    process = await EngineProcess.start(plan(code))
    await await_until(lambda: process.last_lines() == ["up"], 10, "the engine")
    await process.stop(10)
    assert process.last_lines() == ["up", "finished"]
    assert await process.wait() == 0
    await process.stop(10)  # stopping again is harmless


async def test_an_engine_that_ignores_sigterm_is_killed_with_its_children() -> None:
    """No orphan is left, even if nothing in it wants to end."""
    code = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "pid = os.fork() or os.setsid(); print(os.getpid(), flush=True); time.sleep(100)"
    )
    process = await EngineProcess.start(plan(code))
    await await_until(lambda: len(process.last_lines()) == 2, 10, "the engine and its child")
    pids = [int(line) for line in process.last_lines()]
    assert process.pid() in pids
    await process.stop(0.2)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert await process.wait() == 128 + signal.SIGKILL
    assert process.pid() is None


async def test_a_command_that_does_not_exist_ends_at_once() -> None:
    """The exit code and the output say so."""
    process = await EngineProcess.start(
        LaunchPlan(argv=("/no/such/engine",), env=os.environ, start_timeout_s=1, stop_timeout_s=1)
    )
    assert await process.wait() == 127
    assert "cannot start /no/such/engine" in process.last_lines()[0]
    await process.stop(0)
