import subprocess
import sys
import time
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from intellect.cli import app, run
from intellect.replica_command import PRESETS
from server.presets import Preset
from tests.intellect.command import COMMAND, error_line, run_intellect

EVERY_COMMAND = (
    ("up",),
    ("router",),
    ("replica",),
    ("sim",),
    ("doctor",),
    ("checkpoint", "publish"),
    ("checkpoint", "ls"),
    ("checkpoint", "verify"),
    ("checkpoint", "swap"),
)


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_every_command_explains_itself(command: tuple[str, ...]) -> None:
    """--help shows examples and what the exit status means."""
    shown = CliRunner().invoke(app, [*command, "--help"]).output
    assert f"intellect {' '.join(command)}" in shown
    assert "Examples:" in shown
    assert "Exit status:" in shown


def test_help_names_exactly_the_commands_there_are() -> None:
    """Nothing is announced that does not work yet."""
    shown = CliRunner().invoke(app, ["--help"]).output
    names = {line.split()[0] for line in shown.partition("Commands:")[2].splitlines() if line.startswith("  ") and line.split()}
    there = {"up", "router", "replica", "checkpoint", "sim", "doctor"}
    assert names & there == there
    assert not names & {"demo", "train", "eval", "keys", "usage", "batch", "loadtest"}


def test_help_is_quick_and_needs_no_engine() -> None:
    """The command line answers at once, on a machine without vLLM too: neither it nor torch or httpx is imported."""
    heavy = ("vllm", "torch", "transformers", "httpx", "fastapi", "rich")
    code = (
        "import sys; from intellect.cli import run; run(['--help']); "
        f"sys.exit([name for name in {heavy!r} if name in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    fastest = min(_seconds_of_help() for _ in range(3))
    assert fastest < 0.5


def _seconds_of_help() -> float:
    begun = time.monotonic()
    subprocess.run([*COMMAND, "--help"], capture_output=True, check=True)
    return time.monotonic() - begun


def test_the_version_is_the_distributions() -> None:
    """A bug report can name what it is about."""
    done = run_intellect("--version")
    assert (done.returncode, done.stdout) == (0, f"intellect-serve {version('intellect-serve')}\n")


def test_the_help_of_replica_lists_every_preset() -> None:
    """A preset that exists can be found without reading the source."""
    assert PRESETS.split(", ") == [preset.value for preset in Preset]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nope"], "No such command 'nope'; see `intellect --help`"),
        (["up", "--qqq"], "No such option: --qqq; see `intellect up --help`"),
        (["up", "--port"], "Option '--port' requires an argument; see"),
        (["up", "--port", "x"], "--port x: "),
        (["up", "--port=70000"], "--port 70000: "),
        (["up", "--engine", "sim", "--port", "9000", "--admin-port", "0"], "--admin-port 0: "),
        (["up", "--engine", "tgi"], "--engine tgi: 'tgi' is not one of 'vllm', 'sim'; see `intellect up --help`"),
        (["up", "--policy", "best"], "--policy best: 'best' is not one of 'predicted'"),
        (["up", "stray"], "stray: unexpected argument; arguments for the engine go after `--`"),
        (["up", "--preset", "intellect3-wide-ep"], "--preset intellect3-wide-ep: not for the local stack"),
        (["up", "--engine", "sim", "--preset", "cpu"], "--preset cpu: only --engine vllm has presets"),
        (["up", "--replicas", "0"], "--replicas 0: must be 1 or more"),
        (["up", "--engine", "sim", "--port", "9000", "--admin-port", "9000"], "port and admin_port are both 9000"),
        (["up", "--engine", "sim", "--host", "0.0.0.0"], "host 0.0.0.0: without a key the router serves only this machine"),
        (["up", "--engine", "sim", "--require-keys"], "require_keys is set but there is no key"),
        (["router", "--replica", "ftp://x"], "replica 'ftp://x': "),
        (["router", "--health-interval", "0"], "health_interval_s 0"),
        (["replica"], "model is not set"),
        (["replica", "--preset", "nope", "--model", "a/b"], "preset is 'nope', but must be one of cpu"),
        (["replica", "--preset", "sim", "--host", "0.0.0.0"], "host is 0.0.0.0, reachable from other machines"),
        (["replica", "--preset", "sim", "--ep-rank", "1"], "--ep-group, --ep-rank, --ep-size, --ep-local-rank and"),
        (["checkpoint", "publish"], "Missing argument 'SRC_DIR'; see `intellect checkpoint publish --help`"),
        (["checkpoint", "verify", "--version", "v1"], "--version v1: needs --model NAME"),
        (["checkpoint", "swap", "v1", "--model", "m", "--strategy", "rolling"], "--strategy rolling: does not exist in this"),
        (["checkpoint", "swap", "v1", "--model", "m", "--strategy", "canary"], "--strategy canary: does not exist in this"),
        (["checkpoint", "swap", "v1", "--model", "m", "--admin", "localhost:1"], "--admin localhost:1: not an address"),
    ],
)  # fmt: skip
def test_wrong_use_gets_one_line_and_status_2(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the flag, the value and what to do; nothing has been started or written."""
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {expected}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("group", [(), ("checkpoint",)])
def test_a_command_left_out_shows_the_help(group: tuple[str, ...]) -> None:
    """As `--help` prints it, with the status of wrong use."""
    done, asked = run_intellect(*group), run_intellect(*group, "--help")
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout == asked.stdout
    assert "Commands:\n" in done.stdout


def test_only_strategies_that_exist_are_offered() -> None:
    """The others are refused with a reason of their own."""
    shown = run_intellect("checkpoint", "swap", "--help").stdout
    assert "in_place" in shown
    assert "rolling" not in shown
    assert "canary" not in shown


def test_a_reader_that_has_enough_is_no_error() -> None:
    """`intellect up --help | head -1` prints its line and no complaint."""
    code = f"{sys.executable} -P -m intellect up --help | head -1"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("Usage: ")
    assert done.stderr == ""


def test_a_refused_command_prints_no_traceback() -> None:
    """As a process too: one line, status 1."""
    done = run_intellect("checkpoint", "publish", "/", "--model", "m", "--version", "v1", "--store", "/nonexistent/store")
    assert done.returncode == 1
    assert "holds no config.json" in error_line(done)
