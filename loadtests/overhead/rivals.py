"""The other routers, from PyPI, in a virtual environment of their own: their dependencies never meet ours."""

import shutil
import subprocess
import sys
from pathlib import Path

from intellect.problem import Problem
from loadtests.overhead.routers import RIVALS

_TIMEOUT_S = 600.0


def install_rivals(folder: Path) -> None:
    """Makes the environment, or does nothing if it already holds these versions.

    Raises:
        Problem: uv is not there, or it could not install.
    """
    stamp = folder / "installed.txt"
    if stamp.exists() and stamp.read_text().split() == list(RIVALS):
        return
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        raise Problem(f"{uv}: not found, it installs the other routers; run `make setup`, or name routers: --routers ours")
    shutil.rmtree(folder, ignore_errors=True)
    _run([str(uv), "venv", "--quiet", "--python", sys.executable, str(folder)])
    (folder / ".gitignore").write_text("*\n")
    _run([str(uv), "pip", "install", "--quiet", "--python", str(folder / "bin/python"), *RIVALS])
    stamp.write_text("\n".join(RIVALS) + "\n")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Problem(f"{' '.join(command)}: not done after {_TIMEOUT_S:g} s; is the package index in reach?") from None
    if done.returncode != 0:
        raise Problem(f"{' '.join(command)} failed: {' '.join(done.stderr.split())[-500:]}")
