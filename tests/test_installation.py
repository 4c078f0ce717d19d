"""What `make setup` installs, and what it says when it cannot. Nothing is installed here."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def install(folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs the installer in a copy of the files that it reads, where there is no .venv."""
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    shutil.copy(ROOT / "pyproject.toml", folder)
    return subprocess.run(
        ["bash", "requirements/install.sh"],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_make_alone_explains_the_targets() -> None:
    """A newcomer's first word is `make`."""
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("serve", "test", "check", "setup", "clean"):
        assert f"make {target} " in shown


def test_both_ports_of_a_stack_can_be_chosen() -> None:
    """Either may be taken; what the help shows is what would be used."""

    def make(*arguments: str, **variables: str) -> str:
        environment = {"PATH": os.environ["PATH"], **variables}
        return subprocess.run(
            ["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert "PORT=8000 ADMIN_PORT=9001" in make("ADMIN_PORT=9001")
    dry_run = ("--dry-run", "serve")
    assert "--port 9000 --admin-port 9001 " in make(*dry_run, "PORT=9000", "ADMIN_PORT=9001")
    assert "--port 9002 --admin-port 9001 " in make(
        *dry_run, "ADMIN_PORT=9001", INTELLECT_PORT="9002", INTELLECT_ADMIN_PORT="1"
    )


def test_a_machine_without_a_suitable_python_is_told_what_to_install(tmp_path: Path) -> None:
    """One line with the remedy, and no half-made environment."""
    done = install(tmp_path, PYTHON="/nonexistent/python", ACCELERATOR="cpu")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no Python 3.11, 3.12 or 3.13 found at PYTHON=/nonexistent/python; install one")
    assert not (tmp_path / ".venv").exists()


def test_an_unknown_accelerator_is_refused(tmp_path: Path) -> None:
    """A typo does not silently install for the CPU."""
    done = install(tmp_path, ACCELERATOR="rocm")
    assert (done.returncode, done.stderr) == (1, "error: ACCELERATOR rocm: unknown; use cpu or cuda\n")


def test_an_environment_for_something_else_is_not_kept(tmp_path: Path) -> None:
    """The CPU's and CUDA's engines share files, so one cannot be installed over the other."""
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".kind").write_text(f"cuda {tmp_path}\n")
    install(tmp_path, PYTHON="/nonexistent/python", ACCELERATOR="cpu")
    assert not (tmp_path / ".venv").exists()


def test_versions_are_pinned_exactly_and_for_every_machine() -> None:
    """The same set on a laptop, in CI and on a GPU node; no address that one of them cannot reach."""
    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert len(pins) > 100
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9.-]+==[0-9a-z.]+", pin)] == []
    assert pins == sorted(pins)
    pinned = {pin.partition("==")[0] for pin in pins}
    assert {"torch", "transformers", "fastapi", "uvicorn", "httptools", "msgspec", "typer", "ruff", "mypy", "pytest"} <= pinned


@pytest.mark.parametrize("file", ["constraints.txt", "overrides-cpu.txt", "overrides-cuda.txt", "install.sh", "refresh.sh"])
def test_no_file_names_a_host(file: str) -> None:
    """Where packages come from is the machine's configuration, not ours."""
    assert "://" not in (ROOT / "requirements" / file).read_text()
