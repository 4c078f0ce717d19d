"""Why a process does not start, in one line, from what it said about itself. Pure."""

import re
from collections.abc import Sequence

# How an agent tells the end of its engine, and a member of the stack its own.
_END = re.compile(
    r"(?:\bIt |The process |^it )"
    r"((?:exited with code|ended with status) -?\d+"
    r"|(?:ran but )?did not answer (?:within|for) [\d.e+]+ s"
    r"|could not be started: .+?)"
    r"(?:\.(?:\s|$)|$)"
)
# What an agent, and vLLM below it, put before each line: time, level, logger, process.
_PREFIX = re.compile(
    r"^(?:\S+ [\d:,.]+ [A-Z]+ [\w.]+: )?(?:engine: )?(?:\(\w+ pid=\d+\) )?(?:[A-Z]+ [\d-]+ [\d:]+ )?(?:\[[\w.:]+\] )?"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f]")
# `SomeError: why`, or `prog: error: why`; the program's name tells nothing.
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Exit|Interrupt)(?::.*)?)$")
_COMPLAINT = re.compile(r"\berror: +(.+)$", re.IGNORECASE)
_REFERENCE = "root cause above"
_LENGTH_MAX = 300


def plain_line(line: str) -> str:
    """A line of a log without colours and without what stands before its text."""
    return _PREFIX.sub("", _ESCAPES.sub("", line)).strip()


def tells_failure(reason: str | None) -> bool:
    """Whether this reason for not being ready is a failure, and not just `it is loading`."""
    return reason is not None and _END.search(reason) is not None


def failure_line(reason: str, log_lines: Sequence[str], *, of_engine: bool) -> str:
    """What happened and the last line that says why: `the engine exited with code 2: unrecognized arguments: --foo 3`.

    `reason` is the last one that told of a failure. Its own lines are asked first, then `log_lines`.
    """
    end = _END.search(reason)
    if end is None:
        return _shortened(" ".join(reason.split()))
    what = f"{'the engine' if of_engine else 'it'} {end[1]}"
    quoted = reason[end.end() :].splitlines()[1:]
    why = _complaint(quoted) or _complaint(log_lines) or _last(quoted) or _last(log_lines)
    return what if why is None else f"{what}: {_shortened(why)}"


def _complaint(lines: Sequence[str]) -> str | None:
    for line in map(plain_line, reversed(lines)):
        if _REFERENCE in line:
            continue
        for pattern in (_EXCEPTION, _COMPLAINT):
            if found := pattern.search(line):
                return found[1]
    return None


def _last(lines: Sequence[str]) -> str | None:
    return next((text for text in map(plain_line, reversed(lines)) if text), None)


def _shortened(text: str) -> str:
    return text if len(text) <= _LENGTH_MAX else f"{text[:_LENGTH_MAX]}..."
