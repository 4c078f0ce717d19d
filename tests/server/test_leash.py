"""The leash: whatever ends the starter, the leash or the command, nothing that the command started is left."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import server.leash
from tests.waiting import wait_until

LEASH = [sys.executable, "-I", "-S", server.leash.__file__]
# The end of everything must come this much after the grace at most.
SLACK_S = 8.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finding daemons needs Linux")

# Starts a child in its group, one in a new session, and a daemon (forked twice, in a new session); writes all pids to the
# file in its first argument. With a second argument it ignores SIGTERM, and so do they.
FAMILY = """
import json, os, signal, sys, time
if len(sys.argv) > 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1] + ".term", "w").close(), os._exit(3)))
reader, writer = os.pipe()
def rest():
    os.write(writer, b"%d " % os.getpid())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
if os.fork() == 0:
    rest()
if os.fork() == 0:
    os.setsid()
    rest()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        rest()
    os._exit(0)
pids = [os.getpid()]
while len(pids) < 4:
    pids += [int(pid) for pid in os.read(reader, 100).split()]
with open(sys.argv[1] + ".new", "w") as file:
    json.dump(pids, file)
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(1000)
"""


class Family:
    """A command with descendants, under a leash whose starter is a process of its own."""

    def __init__(self, folder: Path, *, grace_s: float, stubborn: bool) -> None:
        self.pids_file = folder / "pids"
        command = [sys.executable, "-c", FAMILY, str(self.pids_file), *(["stubborn"] if stubborn else [])]
        leash = [*LEASH, "--grace-s", str(grace_s), "--", *command]
        # As a shell starts what it puts into the background: ignoring SIGINT.
        ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
        code = f"{ignore}; import subprocess as s; p = s.Popen({leash!r}, stdin=s.PIPE); print(p.pid, flush=True); p.wait()"
        self.starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert self.starter.stdout is not None
        self.outer = psutil.Process(int(self.starter.stdout.readline()))
        wait_until(self.pids_file.exists, 10, "the family")
        self.members = [psutil.Process(pid) for pid in json.loads(self.pids_file.read_text())]
        (self.inner,) = self.outer.children()

    @property
    def command(self) -> psutil.Process:
        return self.members[0]

    def everyone(self) -> list[psutil.Process]:
        return [self.outer, self.inner, *self.members]

    def assert_gone(self, timeout_s: float) -> None:
        wait_until(lambda: not any(is_alive(one) for one in self.everyone()), timeout_s, "the end of everyone")

    def was_asked_to_stop(self) -> bool:
        return Path(f"{self.pids_file}.term").exists()

    def clean_up(self) -> None:
        for process in self.everyone():
            if is_alive(process):
                process.kill()
        self.starter.kill()
        self.starter.communicate()


def is_alive(process: psutil.Process) -> bool:
    """Not counting what only waits for the system's first process to notice its end."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def family(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Family]:
    family = Family(tmp_path, **{"grace_s": 0.5, "stubborn": False, **getattr(request, "param", {})})
    yield family
    family.clean_up()


def test_kill_9_of_the_starter_ends_everyone(family: Family) -> None:
    """The command is asked to stop; its daemons and those that ignore SIGTERM go with it."""
    assert all(is_alive(one) for one in family.everyone())
    family.starter.kill()
    family.assert_gone(0.5 + SLACK_S)
    assert family.was_asked_to_stop()


@pytest.mark.parametrize("family", [{"stubborn": True}], indirect=True)
def test_a_command_that_ignores_sigterm_is_killed_after_the_grace(family: Family) -> None:
    """No process can stay by ignoring signals."""
    family.starter.kill()
    family.assert_gone(0.5 + SLACK_S)


@pytest.mark.parametrize("family", [{"grace_s": 60.0, "stubborn": True}], indirect=True)
@pytest.mark.parametrize("half", ["outer", "inner"])
def test_kill_9_of_either_half_of_the_leash_ends_everyone_at_once(family: Family, half: str) -> None:
    """The leash itself may be killed too, and no grace is given then."""
    (family.outer if half == "outer" else family.inner).kill()
    family.assert_gone(SLACK_S)


# A command whose child, made by multiprocessing, has a segment of shared memory that only their resource tracker removes.
# Writes the segment's name and the pids of the three into the file in its first argument.
SHARES = """
import json, multiprocessing, os, sys, time
from multiprocessing import resource_tracker, shared_memory
def share(path, command):
    memory = shared_memory.SharedMemory(create=True, size=4096)
    with open(path + ".new", "w") as file:
        json.dump([memory.name, command, os.getpid(), resource_tracker._resource_tracker._pid or os.getppid()], file)
    os.rename(path + ".new", path)
    time.sleep(1000)
if __name__ == "__main__":
    resource_tracker.ensure_running()
    context = multiprocessing.get_context("fork")
    context.Process(target=share, args=(sys.argv[1], os.getpid())).start()
    time.sleep(1000)
"""


@pytest.mark.parametrize("victim", ["command", "inner", "outer", "lifeline"])
def test_kill_9_leaves_no_shared_memory(tmp_path: Path, victim: str) -> None:
    """Python's resource trackers outlive those whose segments they remove, and then end too."""
    facts = tmp_path / "facts"
    leash = [*LEASH, "--grace-s", "0.2", "--", sys.executable, "-c", SHARES, str(facts)]
    with subprocess.Popen(leash, stdin=subprocess.PIPE) as outer:
        try:
            wait_until(facts.exists, 20, "the shared memory")
            name, command, *pids = json.loads(facts.read_text())
            processes = [psutil.Process(pid) for pid in (command, *pids)]
            segment = Path("/dev/shm") / name
            assert segment.exists()
            assert "multiprocessing.resource_tracker" in processes[-1].cmdline()[-1]
            match victim:
                case "command":
                    processes[0].kill()
                case "inner":
                    psutil.Process(outer.pid).children()[0].kill()
                case "outer":
                    outer.kill()
                case "lifeline":
                    assert outer.stdin is not None
                    outer.stdin.close()
            wait_until(lambda: not segment.exists(), SLACK_S, "the end of the shared memory")
            wait_until(lambda: not any(map(is_alive, processes)), SLACK_S, "the end of everyone")
        finally:
            outer.kill()


TRACKER = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)  # multiprocessing.resource_tracker"
)


def test_a_resource_tracker_that_hangs_is_killed(tmp_path: Path) -> None:
    """It has a moment, not for ever."""
    pid_file = tmp_path / "pid"
    code = (
        "import os, subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[2]]); "
        "open(sys.argv[1], 'w').write(str(p.pid))"
    )
    assert run("--", sys.executable, "-c", code, str(pid_file), TRACKER).returncode == 0
    assert not psutil.pid_exists(int(pid_file.read_text()))


def test_kill_9_of_the_command_takes_its_descendants_along(family: Family) -> None:
    """What a crashed engine leaves behind does not hold its port or its memory."""
    family.command.kill()
    family.assert_gone(SLACK_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("family", [{"grace_s": 60.0}], indirect=True)
def test_signals_reach_the_command(family: Family, number: signal.Signals) -> None:
    """A polite stop is the command's own to perform; the leash ends when it has."""
    family.outer.send_signal(number)
    family.assert_gone(SLACK_S)
    assert family.was_asked_to_stop() == (number is signal.SIGTERM)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # A pipe that stays open until the leash has ended.
    reader, writer = os.pipe()
    try:
        return subprocess.run([*LEASH, *arguments], stdin=reader, capture_output=True, text=True, timeout=20)
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -TERM $$"], 128 + 15),
        (["sh", "-c", "kill -KILL $$"], 128 + 9),
        (["/no/such/program"], 127),
        (["/"], 126),
        (["sh", "-c", 'test "$1" = -- && exit 5', "sh", "--"], 5),
    ],
)
def test_the_exit_code_is_the_commands_own(command: list[str], code: int) -> None:
    """A supervisor learns how the command ended, as from a shell."""
    assert run("--", *command).returncode == code


def test_a_command_that_cannot_start_is_named() -> None:
    """The one line on stderr says which program and why."""
    assert run("--", "/no/such/program").stderr == "leash: cannot start /no/such/program: No such file or directory\n"


@pytest.mark.parametrize("arguments", [[], ["--"], ["true"], ["--grace-s", "1"], ["--grace-s", "x", "--", "true"]])
def test_wrong_arguments_are_a_usage_error(arguments: list[str]) -> None:
    """Nothing is started, and the usage line is shown."""
    result = run(*arguments)
    assert result.returncode in (1, 2)
    assert "usage" in result.stderr


def test_the_command_has_a_group_of_its_own_and_a_clean_start() -> None:
    """It reads nothing from the lifeline, and the leash's signal settings do not reach it."""
    code = (
        "import os, signal, sys; "
        "print(os.getpgid(0) == os.getpid(), sys.stdin.read() == '', signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "
        "len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    )
    assert run("--", sys.executable, "-c", code).stdout == "True True True 0\n"
