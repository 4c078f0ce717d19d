"""Runs a command that cannot outlive whoever started it:

    python -I -S leash.py [--grace-s SECONDS] -- COMMAND [ARGUMENT...]

The starter gives a pipe as stdin and keeps its write end. When that end closes, because the starter closed it or died of
anything (kill -9 included), the command gets SIGTERM and, after the grace, everything it ever started gets SIGKILL.
SIGTERM, SIGINT and SIGHUP are forwarded to the command alone, so that it can end its own children in its own order. When
the command exits, whatever it left behind is killed, and its exit code (128 + signal number if a signal ended it) becomes
the leash's own. Python's resource trackers are killed last: left alone for a moment, they remove the shared memory of the
processes that were killed, which nobody else does.

Two processes hold the command, outer -> inner -> command, and both do the same: watch a pipe above, a child below. If the
inner one is killed, the outer one ends the rest; if the outer one is killed, the inner one sees its pipe close and kills
at once. On Linux both adopt orphaned descendants (PR_SET_CHILD_SUBREAPER), so daemons and new sessions are found too, and
the command asks for SIGKILL when the inner process dies (PR_SET_PDEATHSIG). Elsewhere the command's process group is
what is killed.

Standard library only, isolated from the environment (-I -S): it must start fast and run when everything else is broken.
"""

import argparse
import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

GRACE_S_DEFAULT = 10.0

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WATCHED = (*_FORWARDED, signal.SIGCHLD)
# How long killed processes may take to disappear; one in an uninterruptible system call can take forever.
_KILL_S_MAX = 5.0
_KILL_POLL_S = 0.02
# How long a resource tracker may take to clean up after the last of the others, its clients among them, is gone.
_TRACKER_S_MAX = 2.0
_TRACKER_MARK = b"multiprocessing.resource_tracker"

# From <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

Prctl = Callable[[int, int], bool]


def main(arguments: list[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    if not arguments[split + 1 :]:
        sys.exit("leash: usage: leash.py [--grace-s SECONDS] -- COMMAND [ARGUMENT...]")
    parser = argparse.ArgumentParser(prog="leash.py", description="Runs a command that cannot outlive its starter.")
    parser.add_argument("--grace-s", type=float, default=GRACE_S_DEFAULT, help="seconds between SIGTERM and SIGKILL")
    grace_s: float = parser.parse_args(arguments[:split]).grace_s
    with contextlib.suppress(OSError):
        # Out of the terminal's foreground group: Ctrl-C is for the starter, which then ends us in its own order.
        os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)  # until hold() can take them
    prctl = _load_prctl()
    adopts = prctl(_PR_SET_CHILD_SUBREAPER, 1)
    lifeline, anchor = os.pipe()
    inner = os.fork()
    if inner == 0:
        os.close(anchor)
        os._exit(_run_inner(arguments[split + 1 :], lifeline, prctl))
    os.close(lifeline)
    return hold(inner, lifeline=0, grace_s=grace_s, end=lambda: os.close(anchor), adopts=adopts)


def _run_inner(command: list[str], lifeline: int, prctl: Prctl) -> int:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    holder = os.getpid()
    adopts = prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        _execute(command, holder, prctl)
    with contextlib.suppress(OSError):
        os.setpgid(child, child)  # the child does the same; whoever comes first, the group exists from here on
    # The grace was the outer process's to give. Its pipe closes when that is over or when it was killed: no more waiting.
    return hold(child, lifeline=lifeline, grace_s=0.0, end=lambda: _send(child, signal.SIGKILL), adopts=adopts)


def _execute(command: list[str], holder: int, prctl: Prctl) -> NoReturn:
    try:
        os.setpgid(0, 0)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != holder:
            os._exit(128 + signal.SIGKILL)  # it died before the request above took effect
        # An ignored signal survives exec: Python ignores SIGPIPE, and a shell has the commands it puts into the background
        # ignore SIGINT, which the command must take if we forward it.
        for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"leash: cannot start {command[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def hold(child: int, *, lifeline: int, grace_s: float, end: Callable[[], None], adopts: bool) -> int:
    """Waits until `child` exits, or until `grace_s` after the end of `lifeline`; then ends what is left.

    Returns the child's exit code. `end` must make the child, which still runs then, exit at once. `adopts`: orphaned
    descendants become children of this process. Expects the watched signals to be blocked, and unblocks them.
    """
    with _signal_pipe() as signals:
        code = _wait(child, lifeline, grace_s, signals)
        give_up_at = time.monotonic() + _KILL_S_MAX
        if code is None:
            end()
        while code is None and time.monotonic() < give_up_at:
            time.sleep(_KILL_POLL_S)
            code = _reap(child)
        if adopts:
            _end_descendants(give_up_at)
        else:
            _kill_group(child)
    return 128 + signal.SIGKILL if code is None else code


def _end_descendants(give_up_at: float) -> None:
    """Kills everything below this process: resource trackers after the rest, if they have not ended by themselves."""
    trackers_end_at: float | None = None
    # A process can fork while we look, so one round is not enough.
    while (left := _descendants(os.getpid())) and (now := time.monotonic()) < give_up_at:
        others = [pid for pid in left if not _is_tracker(pid)]
        if not others and trackers_end_at is None:
            trackers_end_at = now + _TRACKER_S_MAX
        for pid in left if trackers_end_at is not None and now >= trackers_end_at else others:
            _send(pid, signal.SIGKILL)
        time.sleep(_KILL_POLL_S)
        _reap(None)


def _is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return _TRACKER_MARK in file.read()
    except OSError:
        return False  # it ended while we looked


def _wait(child: int, lifeline: int, grace_s: float, signals: int) -> int | None:
    """Forwards signals until the child exits (its code) or the grace is over (None)."""
    sources = [lifeline, signals]
    end_at: float | None = None
    while end_at is None or time.monotonic() < end_at:
        timeout = None if end_at is None else max(0.0, end_at - time.monotonic())
        readable, _, _ = select.select(sources, [], [], timeout)
        if signals in readable:
            for number in os.read(signals, 512):
                if number != signal.SIGCHLD:
                    _send(child, number)
        if lifeline in readable and _has_ended(lifeline):
            sources.remove(lifeline)
            end_at = time.monotonic() + grace_s
            _send(child, signal.SIGTERM)
        if (code := _reap(child)) is not None:
            return code
    return None


def _has_ended(lifeline: int) -> bool:
    try:
        return not os.read(lifeline, 4096)
    except OSError:
        return True  # a socket pair whose other end died is reset


@contextlib.contextmanager
def _signal_pipe() -> Iterator[int]:
    """A descriptor from which the numbers of arriving watched signals can be read."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _WATCHED:
        # Only a Python-level handler makes the interpreter write to the pipe.
        signal.signal(number, lambda _number, _frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(-1)
        os.close(reader)
        os.close(writer)


def _reap(child: int | None) -> int | None:
    """Collects every ended child (adopted ones too); the exit code of `child` if it was among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            code = 128 - code if code < 0 else code


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _descendants(root: int) -> list[int]:
    """Every process below `root`, from /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := _parent_of(name)) is not None:
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    frontier = [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def _parent_of(pid: str) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # "pid (name) state ppid ..."; the name may hold spaces and parentheses.
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return None  # it ended while we looked


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _load_prctl() -> Prctl:
    """prctl(option, argument) -> whether it worked; always False where the system has none."""
    if not sys.platform.startswith("linux"):
        return lambda _option, _argument: False
    libc = ctypes.CDLL(None, use_errno=True)
    return lambda option, argument: bool(libc.prctl(option, argument, 0, 0, 0) == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
