"""`intellect sim`: placement policies compared on virtual time. Only parses and prints; router.sim does the work."""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from intellect.help_text import epilog
from intellect.problem import Problem, UsageProblem

if TYPE_CHECKING:
    from router.sim.experiment import Run, RunSpec

ALL = "all"

EPILOG = epilog(
    "intellect sim --list",
    "intellect sim --policy predicted --policy least_loaded --workload agents --seeds 1,2,3",
    "intellect sim --tuned --workload ladder_146 --load 1.5 --seeds 1,2,3,4,5",
    "intellect sim --policy cache_aware --setting cache_aware.threshold=0.5 --workload ladder_73 --load 0.5",
    "intellect sim --policy predicted --trace traffic.jsonl --replicas 8 --json result.json --plot result.html",
    "intellect sim --policy predicted --workload agents --routers 4 --sharing off",
    exit_status="0 done, 1 a run failed, 2 wrong use",
)


def sim(
    policy: Annotated[
        list[str] | None, typer.Option(help="Policy to run, or all; repeat for several [all].", show_default=False)
    ] = None,
    workload: Annotated[
        list[str] | None, typer.Option(help="Workload to run, or all; repeat for several.", show_default=False)
    ] = None,
    trace: Annotated[
        list[Path] | None, typer.Option(help="File of recorded requests, one JSON object a line.", show_default=False)
    ] = None,
    seeds: Annotated[str, typer.Option(help="Comma-separated whole numbers; each is a run.")] = "1",
    load: Annotated[float, typer.Option(help="Times the workload's own rate; 1.0 is about 80 % of saturation.")] = 1.0,
    duration: Annotated[
        float | None, typer.Option(help="Virtual seconds in which requests arrive [the workload's].", show_default=False)
    ] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Replicas [the workload's].", show_default=False)] = None,
    routers: Annotated[int, typer.Option(min=1, help="Routers that share the traffic at random.")] = 1,
    sharing: Annotated[str, typer.Option(metavar="on|off", help="Routers hear of each other's placements.")] = "on",
    events: Annotated[str, typer.Option(metavar="on|off", help="Engines publish KV events.")] = "on",
    setting: Annotated[
        list[str] | None, typer.Option(metavar="POLICY.KEY=VALUE", help="Setting of a policy; repeat for several.")
    ] = None,
    tuned: Annotated[bool, typer.Option("--tuned", help="Rivals with the best settings that a search has found.")] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Runs at the same time [processors].", show_default=False)
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every figure there.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write charts to a .html or (with matplotlib) .png.", show_default=False)
    ] = None,
    list_known: Annotated[bool, typer.Option("--list", help="List the policies and the workloads, and end.")] = False,
) -> int:
    """Compare placement policies in a simulated fleet: every policy on every workload with every seed.

    Goodput is the share of requests whose first token came within its target and whose other tokens followed fast enough.
    """
    if list_known:
        _print_known()
        return 0
    from router.sim.experiment import RunFailed, RunSpec, execute_all
    from router.sim.plots import PlotError, write_plot
    from router.sim.report import as_json, summarise
    from router.sim.report_table import tables

    common = RunSpec(
        policy="",
        workload="",
        seed=0,
        load=_above_zero("--load", load),
        duration_s=None if duration is None else _above_zero("--duration", duration),
        replicas=replicas,
        routers=routers,
        sharing=_switch("--sharing", sharing),
        events=_switch("--events", events),
    )
    _check_outputs(json_file, plot)
    settings = _settings(policy or [ALL], setting or [], is_tuned=tuned)
    specs = _specs(settings, _workloads(workload, trace), trace or [], _seeds(seeds), common)
    try:
        with _progress(len(specs)) as done:
            runs = execute_all(specs, processes or os.cpu_count() or 1, done)
        summaries = summarise(runs)
        if json_file is not None:
            json_file.write_text(json.dumps(as_json(runs, summaries), indent=1) + "\n", encoding="utf-8")
        if plot is not None:
            write_plot(plot, summaries)
    except RunFailed as error:
        raise Problem(str(error)) from error
    except OSError as error:
        raise Problem(f"--json {json_file}: cannot be written ({error.strerror}); check the folder") from error
    except PlotError as error:
        raise Problem(f"--plot {error}") from error
    typer.echo(tables(summaries, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    return 0


def _specs(
    settings: dict[str, Any], workloads: list[str], traces: list[Path], seeds: list[int], common: "RunSpec"
) -> "list[RunSpec]":
    from dataclasses import replace

    from router.sim.experiment import specs_of

    played = [str(path) for path in traces]
    return specs_of(settings, workloads, seeds, common) + specs_of(settings, played, seeds, replace(common, is_trace=True))


def _settings(names: list[str], given: list[str], *, is_tuned: bool) -> dict[str, Any]:
    from router.sim.contestants import NAMES, ContestantError, check_name, settings_of
    from router.sim.tuned import tuned_settings

    chosen = list(NAMES) if ALL in names else list(dict.fromkeys(names))
    for name in chosen:
        try:
            check_name(name)
        except ContestantError as error:
            raise UsageProblem(f"--policy {error}") from error
    try:
        return dict(settings_of(chosen, given, tuned_settings() if is_tuned else {}))
    except ContestantError as error:
        raise UsageProblem(f"--setting {error}") from error


def _workloads(names: list[str] | None, traces: list[Path] | None) -> list[str]:
    """The names asked for, all of them known; the traces, if any, readable."""
    from router.sim.contestants import suggestion
    from router.sim.trace import read_trace
    from router.sim.trace_lines import TraceError
    from router.sim.workloads.catalogue import SCENARIOS

    if not names and not traces:
        raise UsageProblem(f"--workload is missing: give one or more of {ALL}, {', '.join(SCENARIOS)}, or --trace FILE")
    for path in traces or []:
        try:
            read_trace(path)
        except TraceError as error:
            raise UsageProblem(f"--trace {error}") from error
    if names and ALL in names:
        return list(SCENARIOS)
    for name in names or []:
        if name not in SCENARIOS:
            near = suggestion(name, SCENARIOS)
            raise UsageProblem(f"--workload {name}: there is no such workload{near}; known are {', '.join(SCENARIOS)}")
    return list(dict.fromkeys(names or []))


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageProblem(f"--seeds {text}: is no list of whole numbers; write it like 1,2,3") from None
    return list(dict.fromkeys(seeds))


def _above_zero(flag: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise UsageProblem(f"{flag} {value:g}: must be a number above 0")
    return value


def _switch(flag: str, word: str) -> bool:
    if word not in ("on", "off"):
        raise UsageProblem(f"{flag} {word}: must be on or off")
    return word == "on"


def _check_outputs(json_file: Path | None, plot: Path | None) -> None:
    """What cannot be written is said before the runs, not after them."""
    from router.sim.plots import PlotError, check_plot

    for flag, path in (("--json", json_file), ("--plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageProblem(f"{flag} {path}: its folder does not exist; make it first")
        if path is not None and path.is_dir():
            raise UsageProblem(f"{flag} {path}: is a folder; name a file")
    if plot is not None:
        try:
            check_plot(plot)
        except PlotError as error:
            raise UsageProblem(f"--plot {error}") from error


def _print_known() -> None:
    import dataclasses

    from router.sim.contestants import NAMES, default_settings
    from router.sim.workloads.catalogue import SCENARIOS

    typer.echo("policies (with the settings that --setting POLICY.KEY=VALUE changes):")
    for name in NAMES:
        fields = dataclasses.asdict(default_settings(name))
        typer.echo(f"  {name:24}" + " ".join(f"{key}={value}" for key, value in fields.items()))
    typer.echo("workloads:")
    for scenario in SCENARIOS.values():
        typer.echo(f"  {scenario.name:24}{scenario.summary}")
        fleet = scenario.fleet
        typer.echo(
            f"  {'':24}{fleet.replicas} replicas, {fleet.limits.kv_capacity_tokens} KV tokens, {scenario.duration_s:g} s"
        )


@contextlib.contextmanager
def _progress(count: int) -> "Iterator[Callable[[Run], None]]":
    """A bar on a terminal; elsewhere a line on stderr for each run that is through."""
    if not sys.stderr.isatty():
        ended = 0

        def say(run: "Run") -> None:
            nonlocal ended
            ended += 1
            typer.echo(f"{ended}/{count} {_line(run)}", err=True)

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=count)
        yield lambda run: bar.update(task, advance=1, description=_line(run))


def _line(run: "Run") -> str:
    spec = run.spec
    good = 100 * run.figures.values["goodput_share"]
    return f"{spec.policy} on {spec.workload}, seed {spec.seed}: goodput {good:.1f} % ({run.wall_s:.1f} s)"
