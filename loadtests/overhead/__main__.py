"""`make bench`: measures, prints, writes docs/benchmarks.md. Runs measurements one at a time, routers taking turns."""

import argparse
import json
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import NoReturn

import typer

from intellect.machine import read_machine
from intellect.problem import Problem
from loadtests.overhead.disturbance import cores_lost, read
from loadtests.overhead.document import Circumstances, document
from loadtests.overhead.figures import Sample, Stage, summarize
from loadtests.overhead.measurements import Bench
from loadtests.overhead.processes import raise_descriptor_limit
from loadtests.overhead.report import LABELS, TARGETS, figures_table, judge, ratios_table, targets_table
from loadtests.overhead.rivals import install_rivals
from loadtests.overhead.routers import ROUTERS, RouterName
from loadtests.overhead.upstreams import program
from loadtests.overhead.wrk import Wrk

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
EXIT_INTERRUPTED = 130  # 128 + SIGINT
_GIT_TIMEOUT_S = 10.0
_CORES_LOST_MAX = 0.2


def main() -> None:
    options = _parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        _run(options)
    except Problem as problem:
        typer.echo(f"error: {problem}", err=True)
        sys.exit(problem.exit_status)
    except KeyboardInterrupt:
        typer.echo("interrupted: everything that was started has ended, nothing was written", err=True)
        sys.exit(EXIT_INTERRUPTED)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.overhead",
        description="What a router costs, ours and others in the same run. Needs nginx and wrk.",
        epilog="Exit status: 0 measured (a MISS is a result), 1 it could not measure, 2 wrong use, 130 interrupted.",
    )
    parser.add_argument("--seconds", type=int, default=4, help="length of each measurement [4]")
    parser.add_argument("--rounds", type=int, default=3, help="times that each is repeated, routers taking turns [3]")
    parser.add_argument(
        "--routers",
        nargs="+",
        choices=[name.value for name in RouterName],
        default=[*RouterName],
        metavar="ROUTER",
        help=f"some of {', '.join(RouterName)} [all]",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[stage.value for stage in Stage],
        default=[*Stage],
        metavar="PART",
        help=f"some of {', '.join(Stage)} [all]",
    )
    parser.add_argument("--source", type=Path, default=ROOT, help="checkout whose router is measured [this one]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample and the verdicts there")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the document there [docs/benchmarks.md after a whole run]"
    )
    options = parser.parse_args(arguments)
    for name in ("seconds", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: must be at least 1")
    if not (options.source / "router").is_dir():
        parser.error(f"--source {options.source}: no checkout of intellect-serve; name the folder that holds router/")
    return options


def _run(options: argparse.Namespace) -> None:
    routers = [name for name in RouterName if name in options.routers]
    stages = [stage for stage in Stage if stage in options.only]
    program("nginx")
    program("wrk")
    raise_descriptor_limit()
    rivals = ROOT / ".bench-venv"
    if any(not ROUTERS[name].is_ours for name in routers):
        typer.echo(f"other routers: {rivals.name}", err=True)
        install_rivals(rivals)
    samples: list[Sample] = []
    start = read()
    with tempfile.TemporaryDirectory(prefix="intellect-bench-") as folder:
        bench = Bench(Path(folder), options.source.resolve(), rivals, Wrk(Path(folder)), options.seconds)
        for round_number in range(1, options.rounds + 1):
            for stage in stages:
                for name in routers:
                    if stage in ROUTERS[name].stages:
                        figures = bench.measure(stage, ROUTERS[name], round_number)
                        samples += [Sample(name, round_number, figure.metric, figure.value) for figure in figures]
                        found = "; ".join(f"{LABELS[figure.metric]}: {figure.value:.1f}" for figure in figures)
                        typer.echo(f"round {round_number} of {options.rounds}, {ROUTERS[name].title}: {found}", err=True)
    is_whole = routers == [*RouterName] and stages == [*Stage]
    lost = cores_lost(start, read())
    if lost > _CORES_LOST_MAX:
        typer.echo(f"warning: other programs kept {lost:.1f} cores busy; measure again on a quiet machine", err=True)
    _report(samples, options, lost, is_whole=is_whole)


def _report(samples: Sequence[Sample], options: argparse.Namespace, lost: float, *, is_whole: bool) -> None:
    summary = summarize(samples)
    circumstances = Circumstances(
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        machine=_machine(),
        cores_lost=round(lost, 2),
        version=_version(options.source),
        rounds=options.rounds,
        seconds=options.seconds,
    )
    typer.echo("\n\n".join(filter(None, (figures_table(summary), ratios_table(summary), targets_table(summary)))))
    output = options.output or (DOCUMENT if is_whole else None)
    if output is not None:
        output.write_text(document(summary, circumstances))
        typer.echo(f"\nwritten to {output}", err=True)
    if options.json is not None:
        judged = [(target, judge(target, summary)) for target in TARGETS]
        verdicts = [{**asdict(target), "verdict": found[0], "found": found[1]} for target, found in judged if found is not None]
        written = {**asdict(circumstances), "samples": [asdict(sample) for sample in samples], "verdicts": verdicts}
        options.json.write_text(json.dumps(written, indent=1) + "\n")


def _machine() -> str:
    machine = read_machine()
    memory = round(machine.memory_bytes / 2**30)
    return f"{len(machine.cores)} {platform.machine()} cores, {memory} GiB of memory, Python {platform.python_version()}"


def _version(source: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(source), "describe", "--always", "--dirty= with changes"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_GIT_TIMEOUT_S,
        check=False,
    )
    return f"intellect-serve at {done.stdout.strip()}" if done.returncode == 0 else "intellect-serve"


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
