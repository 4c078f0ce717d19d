"""`intellect router`: the router alone, in front of engines that run elsewhere. Only parses; router.workers does the work."""

import os
from pathlib import Path
from typing import Annotated

import typer

from intellect.help_text import epilog
from intellect.problem import UsageProblem
from router.config import ContinuationMode
from router.policy.catalogue import PolicyName

EPILOG = epilog(
    "intellect router --replica http://127.0.0.1:8200",
    "intellect router --replica http://10.0.0.1:8100 --replica http://10.0.0.2:8100 --host 0.0.0.0 --api-key sk-...",
    "intellect router --config router.toml --replica-file replicas.txt",
    exit_status="0 stopped by a signal, 1 it could not run, 2 wrong use",
)


def router(
    host: Annotated[str | None, typer.Option(help="Address of the public port [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Public port [8000].")] = None,
    admin_host: Annotated[str | None, typer.Option(help="Address of the admin port [127.0.0.1].")] = None,
    admin_port: Annotated[int | None, typer.Option(help="Admin API and metrics [8001].")] = None,
    replica: Annotated[list[str] | None, typer.Option(help="URL of an agent or an engine; repeat for several.")] = None,
    replica_file: Annotated[str | None, typer.Option(help="File of URLs, one a line; read again when it changes.")] = None,
    policy: Annotated[PolicyName | None, typer.Option(help="How requests are placed [predicted].")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key that clients must send; repeat for several. INTELLECT_API_KEY.")
    ] = None,
    require_keys: Annotated[bool, typer.Option("--require-keys", help="Refuse to start without a key.")] = False,
    allow_anonymous: Annotated[
        bool, typer.Option("--allow-anonymous", help="Without a key, serve other machines too.")
    ] = False,
    admin_token: Annotated[str | None, typer.Option(help="Token of the admin API. INTELLECT_ADMIN_TOKEN.")] = None,
    upstream_key: Annotated[str | None, typer.Option(help="Key sent to the engines. INTELLECT_UPSTREAM_KEY.")] = None,
    agent_token: Annotated[str | None, typer.Option(help="Token sent to the agents. INTELLECT_AGENT_TOKEN.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The model's name for clients [the engines'].")] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Web origin that browsers may call from; repeat for several.")
    ] = None,
    health_interval: Annotated[float | None, typer.Option(help="Seconds between probes of a replica [1].")] = None,
    stall_after: Annotated[
        float | None, typer.Option(help="Seconds without a step until an engine counts as stalled [3].")
    ] = None,
    keep_alive: Annotated[float | None, typer.Option(help="Seconds of silence between comments in a stream [10].")] = None,
    continuation: Annotated[
        ContinuationMode | None, typer.Option(help="Streams whose replica fails go on from another where that is safe [safe].")
    ] = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="Longest request body taken.")] = None,
    debug_headers: Annotated[
        bool, typer.Option("--debug-headers", help="Say in each answer which replica it came from, and why.")
    ] = False,
    decision_log: Annotated[
        str | None, typer.Option(help="File of one JSON line for each request; intellect sim --trace replays it.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that share the public port [1].")] = None,
    redis: Annotated[
        str | None, typer.Option(help="URL of a redis over which routers and workers share placements. INTELLECT_REDIS.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with a table [router]; variables and flags win.")] = None,
) -> int:
    """Route OpenAI-compatible requests to replicas.

    Every flag can also stand in the file's table [router] or in a variable: --admin-token is INTELLECT_ADMIN_TOKEN. Keys
    and tokens are better given by variable, since every user of a machine can read arguments.
    """
    from router.config import ConfigError, load_settings
    from router.workers import serve

    overrides: dict[str, object] = {
        "host": host,
        "port": port,
        "admin_host": admin_host,
        "admin_port": admin_port,
        "replica": tuple(replica) if replica else None,
        "replica_file": replica_file,
        "policy": policy,
        "api_key": tuple(api_key) if api_key else None,
        # A flag that is not given must not overrule the file.
        "require_keys": require_keys or None,
        "allow_anonymous": allow_anonymous or None,
        "admin_token": admin_token,
        "upstream_key": upstream_key,
        "agent_token": agent_token,
        "served_model_name": served_model_name,
        "cors_origin": tuple(cors_origin) if cors_origin else None,
        "health_interval_s": health_interval,
        "stall_after_s": stall_after,
        "keep_alive_s": keep_alive,
        "continuation": continuation,
        "max_body_bytes": max_body_bytes,
        "debug_headers": debug_headers or None,
        "decision_log": decision_log,
        "workers": workers,
        "redis": redis,
    }
    try:
        settings = load_settings(config, os.environ, overrides)
    except ConfigError as error:
        raise UsageProblem(str(error)) from error
    return serve(settings)
