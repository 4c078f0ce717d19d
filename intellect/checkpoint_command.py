"""`intellect checkpoint`: publish, list, verify and swap in versions of a model's weights."""

import contextlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from intellect.arguments import existing_folder
from intellect.help_text import epilog, help_without_command
from intellect.places import STATE_DIR_DEFAULT, Places
from intellect.problem import Problem, UsageProblem

if TYPE_CHECKING:
    from intellect.admin_client import ReplicaReport
    from protocol.checkpoint_files import Progress
    from protocol.manifest import Manifest

STORE_DEFAULT = Places(STATE_DIR_DEFAULT).store
ADMIN_DEFAULT = "http://127.0.0.1:8001"
STRATEGY = "in_place"
# What the command may take longer than the rollout before it is told from it.
_WAITING_S_MAX = 1.0

app = typer.Typer(
    help="Publish checkpoints to a store, and swap them into running replicas.",
    epilog="Exit status: 0 done, 1 refused or failed, 2 wrong use.",
    invoke_without_command=True,
    callback=help_without_command,
)

Store = Annotated[Path, typer.Option(help="Folder of the store; `intellect up` has it in its state folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value for scripts.")]


@app.command(
    epilog=epilog(
        "intellect checkpoint publish ./step-400 --model smollm2-135m-instruct --version v2",
        "intellect checkpoint publish ./step-400 --model my-model --version step-400 --parent step-300 --step 400 --json",
        exit_status="0 done, 1 refused or failed, 2 wrong use",
    )
)
def publish(
    source: Annotated[Path, typer.Argument(metavar="SRC_DIR", help="Folder with config.json and *.safetensors.")],
    model: Annotated[str, typer.Option(help="The name the model is served under.")],
    version: Annotated[str, typer.Option(help="A new name for this version: letters, digits, '.', '_', '-'.")],
    store: Store = STORE_DEFAULT,
    parent: Annotated[str | None, typer.Option(help="The version it was trained from.")] = None,
    step: Annotated[int | None, typer.Option(help="The training step it comes from.")] = None,
    as_json: Json = False,
) -> None:
    """Copy a model folder into the store as a new version, and seal it."""
    from protocol import publisher
    from protocol.checkpoint_files import version_folder
    from protocol.manifest import CheckpointError

    existing_folder("SRC_DIR", source)
    folder = store.expanduser().absolute()
    started = time.monotonic()
    try:
        with _progress("copying", shown=not as_json) as progress:
            manifest = publisher.publish(
                source.expanduser(),
                store=folder,
                model=model,
                version=version,
                parent=parent,
                step=step,
                progress=progress,
            )
    except CheckpointError as error:
        raise Problem(str(error)) from error
    seconds = time.monotonic() - started
    if as_json:
        path = str(version_folder(folder, model, version))
        _print_json({**_summary(manifest), "folder": path, "seconds": round(seconds, 3)})
    else:
        typer.echo(
            f"published {model} {version} in {folder}: {len(manifest.files)} files, {_size(_bytes(manifest))}, "
            f"{len(manifest.tensors)} tensors, in {seconds:.1f} s"
        )
        _print_swap(folder, model, version)


def _print_swap(store: Path, model: str, version: str) -> None:
    from intellect.machine import our_command

    if store == STORE_DEFAULT.expanduser():
        where = ""
    elif store.name == STORE_DEFAULT.name:
        where = f", if the replicas were started with --store {store}, or `up` with --state-dir {store.parent}"
    else:
        where = f", if the replicas were started with --store {store}"
    command = shlex.join((our_command(), "checkpoint", "swap", version, "--model", model))
    typer.echo(f"swap it in{where}:\n{command}")


@app.command(
    "ls",
    epilog=epilog(
        "intellect checkpoint ls",
        "intellect checkpoint ls --model smollm2-135m-instruct --json",
        exit_status="0 done, 1 refused or failed, 2 wrong use",
    ),
)
def list_versions(
    store: Store = STORE_DEFAULT,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    as_json: Json = False,
) -> None:
    """List the published versions, oldest first."""
    from protocol.manifest import CheckpointError
    from protocol.store import read_manifest

    folder = store.expanduser().absolute()
    rows: list[dict[str, object]] = []
    for name, version in _published(folder, model, None):
        try:
            rows.append({**_summary(read_manifest(folder, name, version)), "fault": None})
        except CheckpointError as error:
            rows.append({"model": name, "version": version, "fault": error.fault.value})
    if as_json:
        _print_json(rows)
    elif not rows:
        typer.echo(f"no checkpoints in {folder}; `intellect checkpoint publish` adds one")
    else:
        _print_versions(rows)


@app.command(
    epilog=epilog(
        "intellect checkpoint verify",
        "intellect checkpoint verify --model smollm2-135m-instruct --version v2 --json",
        exit_status="0 all are good, 1 at least one is not, 2 wrong use",
    )
)
def verify(
    store: Store = STORE_DEFAULT,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    version: Annotated[str | None, typer.Option(help="Only this version; needs --model.")] = None,
    as_json: Json = False,
) -> int:
    """Read every byte of published versions and compare it with what was sealed."""
    from protocol import store as checkpoints
    from protocol.manifest import CheckpointError

    if version is not None and model is None:
        raise UsageProblem(f"--version {version}: needs --model NAME")
    folder = store.expanduser().absolute()
    rows: list[dict[str, object]] = []
    for name, candidate in _published(folder, model, version):
        try:
            with _progress(f"{name} {candidate}", shown=not as_json) as progress:
                manifest = checkpoints.verify(folder, name, candidate, progress=progress)
            fault, message, good = None, None, f"ok   {name} {candidate}: {_size(_bytes(manifest))}"
        except CheckpointError as error:
            fault, message, good = error.fault.value, str(error), None
        rows.append({"model": name, "version": candidate, "ok": fault is None, "fault": fault, "message": message})
        if not as_json:
            typer.echo(good or f"FAIL {name} {candidate}: {message} ({fault})")
    if as_json:
        _print_json(rows)
    elif not rows:
        typer.echo(f"no checkpoints in {folder}")
    return 0 if all(row["ok"] for row in rows) else 1


@app.command(
    epilog=epilog(
        "intellect checkpoint swap v2 --model smollm2-135m-instruct",
        "intellect checkpoint swap v2 --model smollm2-135m-instruct --admin http://10.0.0.1:8001 --no-wait --json",
        exit_status="0 all replicas serve it, 1 refused or failed (the replicas serve the former version), 2 wrong use",
    )
)
def swap(
    version: Annotated[str, typer.Argument(help="A published version.")],
    model: Annotated[str, typer.Option(help="The name the model is served under.")],
    strategy: Annotated[
        str, typer.Option(metavar=STRATEGY, help="in_place: pause, load, resume; one replica at a time.")
    ] = STRATEGY,
    admin: Annotated[str, typer.Option(help="The router's admin port.")] = ADMIN_DEFAULT,
    admin_token: Annotated[
        str | None, typer.Option(envvar="INTELLECT_ADMIN_TOKEN", help="The router's admin token.", show_default=False)
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait for the end, or only start it.")] = True,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait at most.")] = 7200.0,
    as_json: Json = False,
) -> int:
    """Bring a published version into all replicas of a model, through the router, while they serve."""
    import msgspec

    from intellect.admin_client import AdminClient

    if strategy != STRATEGY:
        raise UsageProblem(f"--strategy {strategy}: does not exist in this version; use {STRATEGY}")
    begun = time.monotonic()
    with AdminClient(admin, admin_token) as client:
        view = client.start_rollout(model, version, strategy)
        if not as_json:
            typer.echo(f"rollout {view.id}: {model} to {version}, {strategy}")
        shown = 0
        for latest in client.follow_rollout(view.id, timeout_s=timeout_s) if wait else ():
            if not as_json:
                for report in latest.replicas[shown:]:
                    typer.echo(_report_line(report))
            view, shown = latest, len(latest.replicas)
    if as_json:
        _print_json(msgspec.to_builtins(view))
    if view.state == "failed":
        if not as_json:
            for report in view.replicas:
                if report.reason and report.reason not in (view.reason or ""):
                    typer.echo(f"  {report.replica}: {report.reason}")
        raise Problem(f"{model} was not brought to {version}: {view.reason or 'no reason given'}")
    if not as_json and wait:
        replicas = "1 replica" if shown == 1 else f"{shown} replicas"
        typer.echo(f"{model} serves {version} on {replicas}, in {_duration(view.seconds, time.monotonic() - begun)}")
    return 0


def _report_line(report: "ReplicaReport") -> str:
    from protocol.status import checkpoint_label

    phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in report.phases.items())
    line = f"  {report.replica}: {report.outcome} in {report.seconds:.2f} s"
    line += f" ({phases})" if phases else ""
    # Without the reason of a failure: the last line of the command has it.
    return f"{line}, serves {checkpoint_label(report.version, report.epoch)}"


def _duration(rollout_s: float, command_s: float) -> str:
    waited = f" ({command_s:.1f} s with waiting)" if command_s > rollout_s + _WAITING_S_MAX else ""
    return f"{rollout_s:.2f} s{waited}"


def _published(store: Path, model: str | None, version: str | None) -> list[tuple[str, str]]:
    """The (model, version) pairs asked for. A version that is named need not exist: verifying it says what is wrong."""
    from protocol import store as checkpoints
    from protocol.manifest import CheckpointError

    if not store.is_dir():
        if store == STORE_DEFAULT.expanduser():
            return [] if version is None else [(model or "", version)]
        raise UsageProblem(f"--store {store}: is not a folder; check the path, or publish a checkpoint there first")
    if model is not None and version is not None:
        return [(model, version)]
    try:
        names = checkpoints.models(store) if model is None else [model]
        found = [(name, candidate) for name in names for candidate in checkpoints.versions(store, name)]
    except CheckpointError as error:
        raise UsageProblem(f"--model {model}: {error}") from error
    if model is not None and not found:
        known = ", ".join(checkpoints.models(store)) or "none"
        raise Problem(f"--model {model}: has no published version in {store}; models there: {known}")
    return found


def _summary(manifest: "Manifest") -> dict[str, object]:
    return {
        "model": manifest.model,
        "version": manifest.version,
        "parent": manifest.parent,
        "step": manifest.step,
        "created": datetime.fromtimestamp(manifest.created_unix, UTC).isoformat(timespec="seconds"),
        "bytes": _bytes(manifest),
        "tensors": len(manifest.tensors),
        "base_fingerprint": manifest.base_fingerprint,
    }


def _bytes(manifest: "Manifest") -> int:
    return sum(spec.size for spec in manifest.files.values())


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def _print_versions(rows: list[dict[str, object]]) -> None:
    from intellect.version_table import version_table

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in version_table([_cells(row) for row in rows], width):
        typer.echo(line)


def _cells(row: dict[str, object]) -> dict[str, str]:
    cells = {key: str(value) for key, value in row.items() if value is not None}
    if row["fault"] is not None:
        # Beside the version, since it must be seen on a narrow terminal too.
        return {**cells, "version": f"{row['version']} (unreadable: {row['fault']})"}
    size = row["bytes"]
    assert isinstance(size, int)
    published = cells["created"].replace("T", " ").removesuffix("+00:00") + " UTC"
    return {**cells, "size": _size(size), "published": published}


@contextlib.contextmanager
def _progress(what: str, *, shown: bool) -> "Iterator[Progress | None]":
    """A bar of bytes on the terminal, or None where nobody watches."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
