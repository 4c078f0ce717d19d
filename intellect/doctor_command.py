"""`intellect doctor`: what this machine can run, and what to do about the rest."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from intellect.arguments import AdminPort, Port
from intellect.help_text import epilog
from intellect.places import STATE_DIR_DEFAULT, places

if TYPE_CHECKING:
    from intellect.diagnosis import Check

EPILOG = epilog(
    "intellect doctor",
    "intellect doctor --quick --json",
    exit_status="0 nothing failed (warnings are allowed), 1 something failed, 2 wrong use",
)


def doctor(
    port: Port = 8000,
    admin_port: AdminPort = 8001,
    state_dir: Annotated[Path, typer.Option(help="Where `intellect up` keeps its things.")] = STATE_DIR_DEFAULT,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the engine's import, which takes up to a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list for scripts.")] = False,
) -> int:
    """Check the machine: Python, processors, memory, disk, GPU, ports, engine, default model."""
    from intellect.diagnosis import Verdict, diagnose
    from intellect.examination import examine

    checks = diagnose(examine(places(state_dir), ports=(port, admin_port), imports_engine=not quick))
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        _print_table(checks)
    return 1 if any(check.verdict is Verdict.FAIL for check in checks) else 0


def _print_table(checks: "list[Check]") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from intellect.diagnosis import Verdict

    styles = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for check in checks:
        found = Text(check.found)
        if check.remedy:
            found.append(f"\n-> {check.remedy}", "bold")
        table.add_row(Text(check.verdict, styles[check.verdict]), check.name, found)
    Console(highlight=False).print(table)
