"""`intellect replica`: one engine with its agent. Only parses; server.agent does the work."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from intellect.arguments import engine_arguments
from intellect.help_text import epilog
from intellect.places import places
from intellect.problem import Problem, UsageProblem

if TYPE_CHECKING:
    from server.settings import ExpertParallelRank

TOKEN_VARIABLE = "INTELLECT_AGENT_TOKEN"

# Named here and not read from server.presets, which would make every command start slower; a test compares them.
PRESETS = "cpu, sim, intellect3-bf16-tp2, intellect3-fp8-tp1, intellect3-wide-ep"

EPILOG = epilog(
    "intellect replica --model ~/models/smollm2 --preset cpu",
    "intellect replica --model PrimeIntellect/INTELLECT-3-FP8 --preset intellect3-fp8-tp1 --device 0 --store /mnt/checkpoints",
    "intellect replica --preset sim -- --time-scale 0.1",
    exit_status="0 stopped by a signal, 1 the agent could not go on, 2 wrong use",
)


def replica(
    model: Annotated[str | None, typer.Option(help="Model folder or hub id; only preset sim can do without.")] = None,
    preset: Annotated[str, typer.Option(help=f"How to launch the engine: {PRESETS}.")] = "cpu",
    port: Annotated[int, typer.Option(help="The engine's port; the router sends requests to it.")] = 8200,
    admin_port: Annotated[int, typer.Option(help="The agent's port: status, checkpoint, drain, metrics.")] = 8100,
    host: Annotated[str, typer.Option(help="Address of both ports.")] = "127.0.0.1",
    served_model_name: Annotated[
        str | None, typer.Option(help="Name for clients and in the store; by default the folder's name or the hub id.")
    ] = None,
    store: Annotated[Path | None, typer.Option(help="Checkpoint store to swap from; without it no swaps.")] = None,
    token: Annotated[
        str | None,
        typer.Option(help=f"Token for POST on the agent's port; better given as {TOKEN_VARIABLE}.", show_default=False),
    ] = None,
    device: Annotated[
        list[int] | None, typer.Option(help="Accelerator to use; repeat for several. By default all visible ones.")
    ] = None,
    ep_group: Annotated[str | None, typer.Option(help="Wide expert parallelism: name of the group.")] = None,
    ep_rank: Annotated[int | None, typer.Option(help="Rank of this engine over all nodes.")] = None,
    ep_size: Annotated[int | None, typer.Option(help="Ranks over all nodes.")] = None,
    ep_local_rank: Annotated[int | None, typer.Option(help="Rank on this node.")] = None,
    ep_address: Annotated[str | None, typer.Option(help="Host of rank 0.")] = None,
    engine: Annotated[
        list[str] | None, typer.Argument(metavar="-- ENGINE_ARGUMENT", help="Added to the preset's; they win.")
    ] = None,
) -> int:
    """Run one engine and the agent that launches, watches and swaps it."""
    import asyncio
    import logging

    from server.agent import run_agent
    from server.model_source import ModelUnavailable, resolve_model
    from server.settings import AgentSettings

    served_name = served_model_name or "simulated"
    if model is not None:
        try:
            resolved = resolve_model(model, places().state_dir, lambda line: typer.echo(line, err=True))
        except ModelUnavailable as error:
            raise Problem(f"--model {model}: {error}") from error
        model, served_name = resolved.folder_or_id, served_model_name or resolved.served_name
    try:
        settings = AgentSettings(
            served_model_name=served_name,
            model=model,
            preset=preset,
            host=host,
            port=port,
            admin_port=admin_port,
            token=token or os.environ.get(TOKEN_VARIABLE) or None,
            store=None if store is None else store.expanduser().absolute(),
            engine_arguments=engine_arguments(engine),
            devices=tuple(device or ()),
            expert_parallel=_expert_parallel(ep_group, ep_rank, ep_size, ep_local_rank, ep_address),
        )
    except ValueError as error:
        raise UsageProblem(str(error)) from error
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return asyncio.run(run_agent(settings))
    except ValueError as error:
        raise UsageProblem(str(error)) from error


def _expert_parallel(
    group: str | None, rank: int | None, size: int | None, local_rank: int | None, address: str | None
) -> "ExpertParallelRank | None":
    from server.settings import ExpertParallelRank

    if group is None and rank is None and size is None and local_rank is None and address is None:
        return None
    if group is None or rank is None or size is None or local_rank is None or address is None:
        raise UsageProblem("--ep-group, --ep-rank, --ep-size, --ep-local-rank and --ep-address go together; give all five")
    return ExpertParallelRank(group=group, rank=rank, size=size, local_rank=local_rank, address=address)
