"""Arguments that several commands take, and checks on them."""

from pathlib import Path
from typing import Annotated

import typer

from intellect.problem import UsageProblem

# The variables are the router's own; a flag wins.
Port = Annotated[int, typer.Option(min=1, max=65535, envvar="INTELLECT_PORT", help="Public port.")]
AdminPort = Annotated[
    int, typer.Option(min=1, max=65535, envvar="INTELLECT_ADMIN_PORT", help="Admin API and metrics, on 127.0.0.1.")
]


def engine_arguments(given: list[str] | None) -> tuple[str, ...]:
    """What stands after `--`. A stray word before it looks the same to the parser, so the first must be an option."""
    if given and not given[0].startswith("-"):
        raise UsageProblem(f"{given[0]}: unexpected argument; arguments for the engine go after `--`, options first")
    return tuple(given or ())


def existing_folder(flag: str, path: Path) -> Path:
    folder = path.expanduser()
    if not folder.exists():
        raise UsageProblem(f"{flag} {path}: does not exist; check the path")
    if not folder.is_dir():
        raise UsageProblem(f"{flag} {path}: is a file; give a folder")
    return folder
