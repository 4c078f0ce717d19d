"""`make placement`: holds the simulator against real engines and against the real router over HTTP."""

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer

from intellect.problem import EXIT_FAILURE, Problem
from loadtests.overhead.disturbance import cores_lost, read
from loadtests.placement import calibrate, http_order, real_rank
from loadtests.placement.client import PlayFailed
from router.policy.catalogue import PolicyName

ROOT = Path(__file__).resolve().parents[2]
EXIT_INTERRUPTED = 130  # 128 + SIGINT
_MODEL_TIMEOUT_S = 300.0


def main() -> None:
    options = _parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, _interrupt)
    folder = options.logs or Path(tempfile.mkdtemp(prefix="intellect-placement-"))
    folder.mkdir(parents=True, exist_ok=True)
    load, start = os.getloadavg()[0], read()
    try:
        found, shown = _COMMANDS[options.command](options, folder)
    except (Problem, PlayFailed, ValueError) as error:
        typer.echo(f"error: {error}; the logs are in {folder}", err=True)
        sys.exit(error.exit_status if isinstance(error, Problem) else EXIT_FAILURE)
    except KeyboardInterrupt:
        typer.echo("interrupted: everything that was started has ended", err=True)
        sys.exit(EXIT_INTERRUPTED)
    typer.echo(shown)
    lost = round(cores_lost(start, read()), 2)
    typer.echo(f"load before: {load:.1f}; other programs kept {lost} cores busy meanwhile, on which times depend", err=True)
    if options.json is not None:
        options.json.write_text(
            json.dumps({"check": options.command, "load_before": load, "cores_lost": lost, **found}, indent=1) + "\n"
        )
    if options.logs is None:
        shutil.rmtree(folder)


def _calibrate(options: argparse.Namespace, folder: Path) -> tuple[Mapping[str, Any], str]:
    run = calibrate.calibrate(
        _model(options, folder),
        folder,
        core=options.core,
        rates=options.rates,
        seconds=options.seconds,
        seed=options.seed,
        say=_tell,
    )
    found = asyncio.run(run)
    return found, calibrate.text(found)


def _http_order(options: argparse.Namespace, folder: Path) -> tuple[Mapping[str, Any], str]:
    policies = list(PolicyName)
    scripts = http_order.traffic(options.seconds, options.seed)
    simulated = http_order.simulate_order(scripts, policies)
    _tell(f"simulated; {len(scripts)} clients go through the router, {len(policies)} times {options.seconds:g} s")
    measured = asyncio.run(http_order.measure_order(scripts, policies, folder, _tell))
    found = {
        "measured": {policy: own._asdict() for policy, own in measured.items()},
        "simulated": {policy: [run._asdict() for run in own] for policy, own in simulated.items()},
        "verdict": http_order.judge(simulated, measured),
    }
    return found, http_order.text(found)


def _real_rank(options: argparse.Namespace, folder: Path) -> tuple[Mapping[str, Any], str]:
    timing, request_s = real_rank.TIMING, real_rank.REQUEST_S
    if options.timing is not None:
        timing, request_s = calibrate.timing_of(json.loads(options.timing.read_text()))
    run = real_rank.rank_on_real(
        _model(options, folder),
        folder,
        cores=options.cores,
        rounds=options.rounds,
        seed=options.seed,
        timing=timing,
        request_s=request_s,
        say=_tell,
    )
    found = asyncio.run(run)
    return found, real_rank.text(found)


_COMMANDS = {"calibrate": _calibrate, "http-order": _http_order, "real-rank": _real_rank}


def _model(options: argparse.Namespace, folder: Path) -> Path:
    """A tiny model whose tokens are bytes: the one given, or one that is made. Raises Problem."""
    if options.model is not None:
        given: Path = options.model
        return given.resolve()
    _tell("making a tiny model")
    made = folder / "model"
    done = subprocess.run(
        [sys.executable, "-m", "tests.real.tiny_glm", str(made)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_MODEL_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise Problem(f"the tiny model could not be made (this needs transformers and the repo's tests): {done.stderr[-300:]}")
    return made / "first"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.placement",
        description="Holds the placement simulator against real engines and against the real router over HTTP.",
        epilog="Exit status: 0 measured (disagreement is a result), 1 it could not measure, 2 wrong use, 130 interrupted.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="CHECK")
    fit = commands.add_parser("calibrate", help="fit the replica model to vLLM on a CPU, and predict loads held out")
    fit.add_argument("--core", type=int, default=0, help="that the engine computes on [0]")
    fit.add_argument("--rates", type=float, nargs="+", default=[4.0, 10.0], help="requests/s of each load held out [4 10]")
    order = commands.add_parser("http-order", help="rank policies over HTTP before simulated engines, and in the simulator")
    for command, seconds in ((fit, 40.0), (order, 40.0)):
        command.add_argument("--seconds", type=float, default=seconds, help=f"of each load [{seconds:g}]")
    rank = commands.add_parser(
        "real-rank", help="rank policies before two real engines by uncached tokens, and in the simulator"
    )
    rank.add_argument("--cores", type=int, nargs=2, default=[0, 1], metavar="CORE", help="one for each engine [0 1]")
    rank.add_argument("--rounds", type=int, default=2, help="times that each policy runs [2]")
    rank.add_argument("--timing", type=Path, metavar="FILE", help="the JSON of `calibrate`, for the simulator")
    for command in (fit, rank):
        command.add_argument("--model", type=Path, metavar="FOLDER", help="whose tokenizer has one token a byte [one is made]")
    for command in (fit, order, rank):
        command.add_argument("--seed", type=int, default=1, help="of the load [1]")
        command.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found there")
        command.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the processes' logs there")
    options = parser.parse_args(arguments)
    for name in ("seconds", "rounds"):
        if (value := getattr(options, name, 1)) < 1:
            parser.error(f"--{name} {value}: must be at least 1")
    if (model := getattr(options, "model", None)) is not None and not model.is_dir():
        parser.error(f"--model {model}: no folder; leave it out, and a tiny model is made")
    if (timing := getattr(options, "timing", None)) is not None and not timing.is_file():
        parser.error(f"--timing {timing}: no file; write one with `calibrate --json {timing}`")
    if any(rate <= 0 for rate in getattr(options, "rates", ())):
        parser.error(f"--rates {' '.join(f'{rate:g}' for rate in options.rates)}: each must be above 0")
    return options


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
