"""Which processes make up the stack: commands, environments, ports and processors. Pure."""

import enum
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from intellect.places import Places

LOOPBACK = "127.0.0.1"  # of everything but the public port
AGENT_PORT = 8100
ENGINE_PORT = 8200

# Any model on one GPU: the preset cpu without what it does for the CPU's sake.
_ON_GPU = ("--dtype", "auto", "--no-enforce-eager")

# A stop is promised within 10 s: the router first, so that answers in flight can end, then the replicas.
ROUTER_DRAIN_S = 2
LEASH_GRACE_S = 5


class Engine(enum.StrEnum):
    VLLM = "vllm"
    SIM = "sim"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """What the user asked for, checked."""

    engine: Engine
    model: str  # folder or hub id, as the engine takes it
    served_name: str
    preset: str
    replicas: int
    host: str
    port: int
    admin_port: int
    places: Places
    router_flags: tuple[str, ...] = ()  # passed on as they are
    api_keys: tuple[str, ...] = ()
    engine_arguments: tuple[str, ...] = ()

    @property
    def logs(self) -> Path:
        return self.places.logs(self.port)


@dataclass(frozen=True, slots=True)
class Secrets:
    """Made anew for each run. Given to children by variables: every user of a machine can read arguments."""

    agent_token: str  # opens the agents' POST routes to the router
    upstream_key: str  # opens the engines to the router alone


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str]  # added to our own environment
    log: Path
    url: str  # where it answers GET /health


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPlan:
    router: ProcessPlan
    replicas: tuple[ProcessPlan, ...]
    at_once: int  # replicas that start at the same time
    notes: tuple[str, ...]  # what was decided otherwise than the user may expect


def plan_stack(
    options: StackOptions,
    secrets: Secrets,
    *,
    cores: Sequence[int],
    gpus: int,
    is_free: Callable[[int], bool],
    environ: Mapping[str, str],
) -> StackPlan:
    """Private ports that are taken (`is_free` says no) are passed over."""
    agent_ports = _free_ports(AGENT_PORT, options.replicas, is_free, taken={options.port, options.admin_port})
    taken = {options.port, options.admin_port, *agent_ports}
    engine_ports = _free_ports(ENGINE_PORT, options.replicas, is_free, taken=taken)
    shares = share_cores(cores, options.replicas)
    binds_cores = options.engine is Engine.VLLM and not gpus and "VLLM_CPU_OMP_THREADS_BIND" not in environ
    replicas = tuple(
        _replica(
            options,
            secrets,
            index=index,
            ports=(agent_port, engine_port),
            cores=shares[index] if binds_cores else None,
            devices=_devices(index, options.preset) if gpus else (),
        )
        for index, (agent_port, engine_port) in enumerate(zip(agent_ports, engine_ports, strict=True))
    )
    notes = [
        *_port_notes("agent", AGENT_PORT, agent_ports),
        *_port_notes("engine", ENGINE_PORT, engine_ports),
    ]
    if binds_cores and options.replicas > 1:
        notes.append(f"each replica computes on its own cores: {', '.join(map(_core_list, shares))}")
    return StackPlan(
        router=_router(options, secrets, agent_ports),
        replicas=replicas,
        # Starting is mostly one busy core for each replica; more at once only wait for each other.
        at_once=options.replicas if gpus or options.engine is Engine.SIM else max(1, len(cores)),
        notes=tuple(notes),
    )


def gpus_each(preset: str) -> int:
    """Accelerators that one replica of this preset spreads over."""
    return 2 if preset == "intellect3-bf16-tp2" else 1


def _devices(index: int, preset: str) -> tuple[int, ...]:
    count = gpus_each(preset)
    return tuple(range(index * count, (index + 1) * count))


def share_cores(cores: Sequence[int], replicas: int) -> list[tuple[int, ...]]:
    """Disjoint, nearly equal shares of the cores; all cores to everyone where there are fewer cores than replicas.

    A replica's threads meet at a barrier after every layer and spin while they wait. On cores shared with another
    replica, each thread would wait for one that the other's spinning keeps from running.
    """
    if len(cores) < replicas:
        return [tuple(cores)] * replicas
    bounds = [index * len(cores) // replicas for index in range(replicas + 1)]
    return [tuple(cores[start:end]) for start, end in itertools.pairwise(bounds)]


def _replica(
    options: StackOptions,
    secrets: Secrets,
    *,
    index: int,
    ports: tuple[int, int],
    cores: tuple[int, ...] | None,
    devices: Sequence[int],
) -> ProcessPlan:
    agent_port, engine_port = ports
    adjustments = _ON_GPU if devices and options.preset == "cpu" else ()
    engine_arguments = (*adjustments, *options.engine_arguments)
    command = (
        *_intellect("replica"),
        *("--model", options.model, "--served-model-name", options.served_name),
        *("--preset", options.preset, "--store", str(options.places.store)),
        *("--host", LOOPBACK, "--port", str(engine_port), "--admin-port", str(agent_port)),
        *(argument for device in devices for argument in ("--device", str(device))),
        *(("--", *engine_arguments) if engine_arguments else ()),
    )
    variables = {"INTELLECT_AGENT_TOKEN": secrets.agent_token, "VLLM_API_KEY": secrets.upstream_key}
    if cores is not None:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = _core_list(cores)
    name = f"replica-{index}"
    return ProcessPlan(
        name=name,
        command=command,
        variables=variables,
        log=options.logs / f"{name}.log",
        url=f"http://{LOOPBACK}:{agent_port}",
    )


def _router(options: StackOptions, secrets: Secrets, agent_ports: Sequence[int]) -> ProcessPlan:
    command = (
        *_intellect("router"),
        *("--host", options.host, "--port", str(options.port)),
        *("--admin-host", LOOPBACK, "--admin-port", str(options.admin_port)),
        *(argument for port in agent_ports for argument in ("--replica", f"http://{LOOPBACK}:{port}")),
        *options.router_flags,
    )
    variables = {
        "INTELLECT_AGENT_TOKEN": secrets.agent_token,
        "INTELLECT_UPSTREAM_KEY": secrets.upstream_key,
        "INTELLECT_DRAIN_TIMEOUT_S": str(ROUTER_DRAIN_S),
    }
    if options.api_keys:
        variables["INTELLECT_API_KEY"] = ",".join(options.api_keys)
    return ProcessPlan(
        name="router",
        command=command,
        variables=variables,
        log=options.logs / "router.log",
        url=f"http://{LOOPBACK}:{options.admin_port}",
    )


def _intellect(command: str) -> tuple[str, ...]:
    # -P: a folder called `server` or `router` where the user happens to be must not be imported.
    return (sys.executable, "-P", "-m", "intellect", command)


def _free_ports(first: int, count: int, is_free: Callable[[int], bool], *, taken: set[int]) -> list[int]:
    found: list[int] = []
    port = first
    while len(found) < count:
        if port > 65535:
            raise ValueError(f"no free port from {first} up")
        if port not in taken and is_free(port):
            found.append(port)
        port += 1
    return found


def _port_notes(what: str, first: int, ports: Sequence[int]) -> list[str]:
    if list(ports) == list(range(first, first + len(ports))):
        return []
    return [f"some {what} ports from {first} up are in use; taking {', '.join(map(str, ports))}"]


def _core_list(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores))
