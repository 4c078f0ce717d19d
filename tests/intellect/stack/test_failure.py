import pytest

from intellect.stack.failure import failure_line, tells_failure

AGENT = "the engine is started again in 0.8 s. "
QUOTE = "Its last lines were:\n"
ENGINE_LINES = [
    "(APIServer pid=7)   File 'x.py', line 1, in main",
    "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
]
LOG_LINES = [
    "2026-11-30 17:52:47,072 INFO server.engine_process: engine: (EngineCore pid=9) ERROR 11-30 17:52:47 [core.py:9] "
    "ValueError: No available memory for the cache blocks.",
    *(f"2026-11-30 17:52:47,072 INFO server.engine_process: engine: {line}" for line in ENGINE_LINES),
]


@pytest.mark.parametrize(
    ("reason", "log", "expected"),
    [
        (
            f"{AGENT}It exited with code 2. {QUOTE}usage: x\n[--y]\npython -m x: error: unrecognized arguments: --foo 3",
            [],
            "the engine exited with code 2: unrecognized arguments: --foo 3",
        ),
        (
            "the engine failed 5 times in a row. It exited with code 1. " + QUOTE + "\n".join(ENGINE_LINES),
            LOG_LINES,
            "the engine exited with code 1: ValueError: No available memory for the cache blocks.",
        ),
        (AGENT + "It exited with code -9. It wrote nothing.", [], "the engine exited with code -9"),
        (f"{AGENT}It exited with code 1. {QUOTE}first\nlast", [], "the engine exited with code 1: last"),
        (f"{AGENT}It ran but did not answer for 60 s. It wrote nothing.", [], "the engine ran but did not answer for 60 s"),
        (f"{AGENT}It did not answer within 1.5 s. {QUOTE}loading", [], "the engine did not answer within 1.5 s: loading"),
        (AGENT + "The process could not be started: no such file.", [], "the engine could not be started: no such file"),
        ("the checkpoint is\n  gone", LOG_LINES, "the checkpoint is gone"),
    ],
)  # fmt: skip
def test_the_cause_of_a_failed_start_is_one_line(reason: str, log: list[str], expected: str) -> None:
    """What happened, then the last line that says why; a line that only points at another is passed over."""
    assert failure_line(reason, log, of_engine=True) == expected


def test_the_end_of_the_process_itself_is_told_from_its_engines() -> None:
    """The agent or the router ended, and its log says why."""
    lines = ["starting", "error: --port 1: in use by nginx"]
    assert failure_line("it ended with status 2", lines, of_engine=False) == "it ended with status 2: --port 1: in use by nginx"


@pytest.mark.parametrize("reason", [None, "the engine is loading", "the engine has not been started yet", "no answer yet"])
def test_loading_is_no_failure(reason: str | None) -> None:
    """It must not take the place of what went wrong before."""
    assert not tells_failure(reason)
    assert tells_failure(AGENT + "It exited with code 2. It wrote nothing.")
