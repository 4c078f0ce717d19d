"""`intellect up`: the local stack in one command. Checks, plans, runs; the parts are in intellect.stack."""

import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from intellect.arguments import AdminPort, Port, engine_arguments
from intellect.help_text import epilog
from intellect.places import STATE_DIR_DEFAULT, places
from intellect.problem import Problem, UsageProblem
from intellect.stack.plan import Engine
from router.policy.catalogue import PolicyName

if TYPE_CHECKING:
    from intellect.stack.plan import StackOptions, StackPlan
    from server.model_source import ResolvedModel

# Seconds; see the router's setting stall_after_s.
CPU_STALL_AFTER_S = 30.0

EPILOG = epilog(
    "intellect up",
    "intellect up --model ~/models/my-model --replicas 1 --port 9000 --admin-port 9001",
    "intellect up --engine sim",
    "intellect up --replicas 1 -- --max-model-len 4096",
    exit_status="0 stopped by Ctrl-C or SIGTERM, 1 it could not start, 2 wrong use",
)


def up(
    port: Port = 8000,
    admin_port: AdminPort = 8001,
    host: Annotated[str, typer.Option(help="Address of the public port.")] = "127.0.0.1",
    replicas: Annotated[
        int | None, typer.Option(help="Engines to run; by default 2, or one for each GPU if there are fewer.")
    ] = None,
    engine: Annotated[Engine, typer.Option(help="Real vLLM, or a simulated engine that needs no model.")] = Engine.VLLM,
    model: Annotated[
        str | None,
        typer.Option(help="Model folder or hub id; by default SmolLM2-135M-Instruct, made once from an installed package."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name for clients; by default the folder's name or the hub id.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="How to launch vLLM, as in `intellect replica`.")] = None,
    state_dir: Annotated[Path, typer.Option(help="Models, checkpoints and logs.")] = STATE_DIR_DEFAULT,
    policy: Annotated[PolicyName | None, typer.Option(help="How requests are placed.", show_default="predicted")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key that clients must send; repeat for several. Or INTELLECT_API_KEY.")
    ] = None,
    require_keys: Annotated[bool, typer.Option("--require-keys", help="Refuse to start without a key.")] = False,
    allow_anonymous: Annotated[
        bool, typer.Option("--allow-anonymous", help="Without a key, serve other machines too.")
    ] = False,
    engine_args: Annotated[
        list[str] | None, typer.Argument(metavar="-- ENGINE_ARGUMENT", help="Passed to every engine.")
    ] = None,
) -> int:
    """Serve a model on this machine: one router, several replicas, one URL."""
    from intellect.machine import read_machine
    from intellect.stack import checks
    from intellect.stack.plan import StackOptions, gpus_each
    from router.config import ConfigError, load_settings

    arguments = engine_arguments(engine_args)
    flags = {
        "policy": policy,
        "api_key": tuple(api_key) if api_key else None,
        "require_keys": require_keys or None,
        "allow_anonymous": allow_anonymous or None,
    }
    try:
        settings = load_settings(None, os.environ, {**flags, "host": host, "port": port, "admin_port": admin_port})
    except ConfigError as error:
        raise UsageProblem(str(error)) from error
    where = places(state_dir)
    machine = read_machine()
    launch = _preset(engine, preset)
    gpus = 0 if engine is Engine.SIM else len(machine.gpus)
    count = checks.check_replicas(replicas, gpus=gpus, each=gpus_each(launch))
    checks.check_engine(engine)
    checks.check_state_dir(where, port)
    checks.check_ports(host, port, admin_port)
    resolved = _resolve(engine, model, where.state_dir)
    if engine is Engine.VLLM and not gpus:
        checks.check_memory(count, resolved.folder_or_id, machine)
    options = StackOptions(
        engine=engine,
        model=resolved.folder_or_id,
        served_name=_served_name(served_model_name or resolved.served_name),
        preset=launch,
        replicas=count,
        host=host,
        port=port,
        admin_port=admin_port,
        places=where,
        router_flags=(
            *("--policy", settings.policy),
            *("--continuation", settings.continuation),
            *("--keep-alive", str(settings.keep_alive_s)),
            # One step of an engine on a CPU may take seconds: the prefill of a long prompt.
            *("--stall-after", str(max(settings.stall_after_s, CPU_STALL_AFTER_S if launch == "cpu" else 0))),
            *(("--require-keys",) if settings.require_keys else ()),
            *(("--allow-anonymous",) if settings.allow_anonymous else ()),
        ),
        api_keys=settings.api_key,
        engine_arguments=arguments,
    )
    return _run(options, gpus=gpus, cores=machine.cores, admin_token=settings.admin_token)


def _resolve(engine: Engine, model: str | None, state_dir: Path) -> "ResolvedModel":
    from server.model_source import DEFAULT_MODEL, ModelUnavailable, resolve_model, resolve_sim_model

    reference = model or DEFAULT_MODEL
    begun = time.monotonic()
    try:
        if engine is Engine.SIM and model is None:
            return resolve_sim_model(state_dir)
        return resolve_model(reference, state_dir, lambda line: typer.echo(f"{line}, {time.monotonic() - begun:.0f} s"))
    except ModelUnavailable as error:
        raise Problem(f"--model {reference}: {error}") from error


def _served_name(name: str) -> str:
    from protocol.manifest import CheckpointError, check_model_name

    try:
        check_model_name(name)
    except CheckpointError as error:
        raise UsageProblem(f"--served-model-name {name}: {error}; give one that is") from error
    return name


def _preset(engine: Engine, preset: str | None) -> str:
    from server.presets import Preset, parse_preset

    if engine is Engine.SIM:
        if preset is not None:
            raise UsageProblem(f"--preset {preset}: only --engine vllm has presets; leave one of the two out")
        return "sim"
    try:
        chosen = parse_preset(preset or "cpu")
    except ValueError as error:
        raise UsageProblem(f"--preset {preset}: {error}") from error
    if chosen in (Preset.SIM, Preset.INTELLECT3_WIDE_EP):
        remedy = "use --engine sim" if chosen is Preset.SIM else "start one `intellect replica` for each rank, then a router"
        raise UsageProblem(f"--preset {preset}: not for the local stack with --engine vllm; {remedy}")
    return chosen


def _run(options: "StackOptions", *, gpus: int, cores: tuple[int, ...], admin_token: str | None) -> int:
    import asyncio

    from intellect.machine import is_port_free
    from intellect.stack.plan import LOOPBACK, Secrets, plan_stack

    plan = plan_stack(
        options,
        Secrets(agent_token=secrets.token_urlsafe(32), upstream_key=secrets.token_urlsafe(32)),
        cores=cores,
        gpus=gpus,
        is_free=lambda port: is_port_free(LOOPBACK, port),
        environ=os.environ,
    )
    return asyncio.run(_serve(options, plan, admin_token))


async def _serve(options: "StackOptions", plan: "StackPlan", admin_token: str | None) -> int:
    import asyncio
    import signal

    from intellect.machine import our_command
    from intellect.stack.guide import guide
    from intellect.stack.runner import StackRunner
    from intellect.stack.view import make_view

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    view = make_view()
    view.line(f"starting {options.served_name} with {options.replicas} x {options.engine}; logs in {options.logs}")
    for note in plan.notes:
        view.line(note)
    runner = StackRunner(plan, view, admin_token)
    command = our_command()
    return await runner.run(
        stop, lambda seconds: view.line(guide(options, seconds=seconds, environ=os.environ, command=command))
    )
