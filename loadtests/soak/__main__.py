"""`make soak`: starts everything, prints a table, exits with 1 if an invariant was broken."""

import argparse
import asyncio
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import typer

from intellect.problem import EXIT_FAILURE, Problem
from loadtests.soak.report import summary, text
from loadtests.soak.run import Plan, soak

EXIT_INTERRUPTED = 130  # 128 + SIGINT


def main() -> None:
    options = _parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, _interrupt)
    plan = Plan(
        minutes=options.minutes,
        faults_per_second=options.faults_per_second,
        replicas=options.replicas,
        clients=options.clients,
        seed=options.seed,
    )
    folder = options.logs or Path(tempfile.mkdtemp(prefix="intellect-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        results = asyncio.run(soak(plan, folder, _tell))
    except Problem as problem:
        typer.echo(f"error: {problem}", err=True)
        sys.exit(problem.exit_status)
    except KeyboardInterrupt:
        typer.echo("interrupted: everything that was started has ended", err=True)
        sys.exit(EXIT_INTERRUPTED)
    typer.echo(text(results))
    if options.json is not None:
        options.json.write_text(json.dumps(summary(results), indent=1) + "\n")
    if results.violations:
        typer.echo(f"the logs are in {folder}", err=True)
        sys.exit(EXIT_FAILURE)
    if options.logs is None:
        shutil.rmtree(folder)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.soak",
        description="Mixed load on the router while its replicas, simulated engines, fail at random.",
        epilog="Exit status: 0 every invariant held, 1 one was broken or it could not run, 2 wrong use, 130 interrupted.",
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="length of the load [20]")
    parser.add_argument("--faults-per-second", type=float, default=1.0, help="[1]")
    parser.add_argument("--replicas", type=int, default=3, help="engines that faults meet; one more meets none [3]")
    parser.add_argument("--clients", type=int, default=24, help="that ask at the same time [24]")
    parser.add_argument("--seed", type=int, default=1, help="of requests, clients and faults [1]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures, samples and violations there")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the processes' logs there [only those of a failure]")
    options = parser.parse_args(arguments)
    for name, least in (("minutes", 0.05), ("faults_per_second", 0.01), ("replicas", 2), ("clients", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least {least}")
    if options.logs is not None and options.logs.exists() and any(options.logs.iterdir()):
        parser.error(f"--logs {options.logs}: holds files, which would be taken for this run's; name an empty or a new folder")
    return options


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
