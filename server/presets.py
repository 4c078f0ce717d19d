"""Launch presets: settings in, command line and environment of one engine process out. Pure.

Every vLLM flag here exists in the pinned release; a test gives each command line to vLLM's own parser. `VLLM_*` variables
that the agent was started with win over a preset's, and the raw engine arguments of the settings come last, so they win too.
"""

import enum
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from protocol.status import BASE_VERSION
from server.guard import CHECKPOINT_VARIABLE, TOKEN_VARIABLE
from server.settings import ALL2ALL_BACKEND_DEFAULT, RPC_PORT_DEFAULT, AgentSettings, ExpertParallelRank

# The module behind the `vllm` console script, which does not work with the CPU distribution (its name is another one).
VLLM_LAUNCHER = "vllm.entrypoints.launchers.api_server.entry"
SIM_LAUNCHER = "server.sim_engine"
GUARD = "server.guard.EngineGuard"
WORKER_EXTENSION = "server.vllm_worker.CheckpointWorker"

API_KEY_VARIABLE = "VLLM_API_KEY"  # the key that the engine's clients must send, the agent too

RANKS_PER_NODE = 8
# The router closes idle connections after 4 s; an engine that closes first would cut a request that is on its way.
KEEP_ALIVE_S = 75
# Each engine publishes at its own port plus one of these, vLLM adds the expert-parallel rank.
KV_EVENTS_OFFSET = 1000
KV_REPLAY_OFFSET = 2000
KV_TOPIC = "kv"


class Preset(enum.StrEnum):
    CPU = "cpu"
    SIM = "sim"
    INTELLECT3_BF16_TP2 = "intellect3-bf16-tp2"
    INTELLECT3_FP8_TP1 = "intellect3-fp8-tp1"
    INTELLECT3_WIDE_EP = "intellect3-wide-ep"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """What changes from one start of the same engine to the next."""

    model: str | None  # folder or hub id to load; None only for the simulated engine
    # Where `model` is a checkpoint: the model that it was swapped over. Its tokenizer and generation defaults stay, as they
    # do in a swap, so that an engine answers the same before and after a crash (a checkpoint may come without its own).
    base: str | None = None
    label: str = BASE_VERSION  # protocol.status.checkpoint_label of what it serves
    token: str  # opens its development routes


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One engine process. `env` is its whole environment. Seconds."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    start_timeout_s: float  # until it must answer /health
    stop_timeout_s: float  # from SIGTERM to SIGKILL; longer than the engine's own shutdown timeout
    kv_events_port: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What tells one preset from another."""

    launcher: str
    arguments: tuple[str, ...]
    defaults: Mapping[str, str]  # environment, where the agent's own has no other value
    start_timeout_s: float
    shutdown_timeout_s: int  # given to the engine, to finish what is running
    kv_events_port: int | None = None


def parse_preset(name: str) -> Preset:
    try:
        return Preset(name)
    except ValueError:
        raise ValueError(f"preset is {name!r}, but must be one of {', '.join(Preset)}") from None


def plan_launch(
    settings: AgentSettings,
    start: EngineStart,
    *,
    environ: Mapping[str, str],
    cores: Sequence[int],
    python: str = sys.executable,
) -> LaunchPlan:
    """The engine's command line and environment.

    `environ` is the agent's own environment, `cores` are the processors it may run on. Raises ValueError for settings
    that do not go together.
    """
    preset = parse_preset(settings.preset)
    if start.model is None and preset is not Preset.SIM:
        raise ValueError(f"model is not set, but preset {preset} needs one: a folder or a hub id")
    if (settings.expert_parallel is not None) != (preset is Preset.INTELLECT3_WIDE_EP):
        needs = "needs" if preset is Preset.INTELLECT3_WIDE_EP else "takes no"
        raise ValueError(f"preset {preset} {needs} expert_parallel settings; see server.presets.wide_ep_ranks")
    shape = _SHAPES[preset](settings, cores)
    keeps_base = start.base is not None and preset is not Preset.SIM
    argv = (
        # -P: a folder called `server` or `vllm` where the agent happens to run must not be imported.
        *(python, "-P", "-m", shape.launcher),
        *(("--model", start.model) if start.model is not None else ()),
        *(("--tokenizer", start.base, "--generation-config", start.base) if keeps_base else ()),
        *("--served-model-name", settings.served_model_name),
        *("--host", settings.host, "--port", str(settings.port)),
        *("--shutdown-timeout", str(shape.shutdown_timeout_s)),
        *shape.arguments,
        *(("--device-ids", ",".join(map(str, settings.devices))) if settings.devices else ()),
        *settings.engine_arguments,
    )
    kept = {name: value for name, value in environ.items() if not name.startswith("INTELLECT_")}
    fixed = {"VLLM_SERVER_DEV_MODE": "1", TOKEN_VARIABLE: start.token, CHECKPOINT_VARIABLE: start.label}
    if start.model is not None and Path(start.model).is_absolute():
        fixed["HF_HUB_OFFLINE"] = "1"  # everything is in the folder; do not ask the hub about it
    return LaunchPlan(
        argv=argv,
        env={**shape.defaults, **kept, **fixed},
        start_timeout_s=settings.start_timeout_s or shape.start_timeout_s,
        stop_timeout_s=shape.shutdown_timeout_s + 4.0,
        kv_events_port=shape.kv_events_port,
    )


def wide_ep_ranks(
    settings: AgentSettings,
    *,
    group: str,
    address: str,
    nodes: int = 1,
    node: int = 0,
    ranks_per_node: int = RANKS_PER_NODE,
    rpc_port: int = RPC_PORT_DEFAULT,
    all2all_backend: str = ALL2ALL_BACKEND_DEFAULT,
) -> list[AgentSettings]:
    """The agents to run on one node of a wide expert-parallel group: one per rank, on ports counted up from `settings`.

    `address` is the host of rank 0 (node 0). The router sees every rank as a replica of its own and balances between
    them (vLLM's external load balancing). Raises ValueError.
    """
    if not 0 <= node < nodes:
        raise ValueError(f"node is {node}, but must be from 0 to {nodes - 1}")
    return [
        replace(
            settings,
            preset=Preset.INTELLECT3_WIDE_EP,
            port=settings.port + local_rank,
            admin_port=settings.admin_port + local_rank,
            devices=(local_rank,),
            expert_parallel=ExpertParallelRank(
                group=group,
                rank=node * ranks_per_node + local_rank,
                size=nodes * ranks_per_node,
                local_rank=local_rank,
                address=address,
                rpc_port=rpc_port,
                all2all_backend=all2all_backend,
            ),
        )
        for local_rank in range(ranks_per_node)
    ]


_EVERY_VLLM = (
    *("--middleware", GUARD, "--worker-extension-cls", WORKER_EXTENSION),
    *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
    *("--no-enable-log-requests", "--disable-uvicorn-access-log"),
)
_EVERY_VLLM_ENV = MappingProxyType({"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S), "VLLM_NO_USAGE_STATS": "1"})

_INTELLECT3 = (
    *("--max-model-len", "131072"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder"),
    *("--reasoning-parser", "deepseek_r1"),
)


def _cpu(_settings: AgentSettings, cores: Sequence[int]) -> _Shape:
    return _Shape(
        launcher=VLLM_LAUNCHER,
        arguments=(
            *_EVERY_VLLM,
            *("--dtype", "float32"),  # five times as fast as bfloat16 without AVX-512
            "--enforce-eager",  # compilation costs a minute and gains nothing here
        ),
        defaults={
            **_EVERY_VLLM_ENV,
            # By itself vLLM leaves a core to its front end, which on a small machine is half of it.
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)) or "auto",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        },
        start_timeout_s=600.0,  # 55 s to 115 s were measured
        shutdown_timeout_s=3,
    )


def _sim(_settings: AgentSettings, _cores: Sequence[int]) -> _Shape:
    return _Shape(
        launcher=SIM_LAUNCHER,  # has the guard built in
        arguments=("--enable-prompt-tokens-details", "--timeout-keep-alive", str(KEEP_ALIVE_S)),
        defaults={},
        start_timeout_s=60.0,
        shutdown_timeout_s=3,
    )


def _h200(settings: AgentSettings, *arguments: str, events_port: int) -> _Shape:
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        # vLLM binds only a wildcard address (it connects to any other). The port is for the private network.
        "endpoint": f"tcp://*:{events_port + KV_EVENTS_OFFSET}",
        "replay_endpoint": f"tcp://*:{events_port + KV_REPLAY_OFFSET}",
        "topic": KV_TOPIC,
    }
    rank = settings.expert_parallel.rank if settings.expert_parallel else 0
    return _Shape(
        launcher=VLLM_LAUNCHER,
        arguments=(*_EVERY_VLLM, *_INTELLECT3, *("--kv-events-config", json.dumps(events)), *arguments),
        defaults=_EVERY_VLLM_ENV,
        start_timeout_s=2700.0,  # 213 GB from a network disk, then compilation and CUDA graphs
        shutdown_timeout_s=60,
        kv_events_port=events_port + KV_EVENTS_OFFSET + rank,
    )


def _bf16_tp2(settings: AgentSettings, _cores: Sequence[int]) -> _Shape:
    # 213 GB of weights on two accelerators of 141 GB; 188 kB of KV per token leave room for over 200,000 tokens.
    return _h200(settings, "--tensor-parallel-size", "2", events_port=settings.port)


def _fp8_tp1(settings: AgentSettings, _cores: Sequence[int]) -> _Shape:
    # About 110 GB of weights and 25 GB for one request of full length on 141 GB: the default share of 0.92 is too little.
    return _h200(settings, "--tensor-parallel-size", "1", "--gpu-memory-utilization", "0.95", events_port=settings.port)


def _wide_ep(settings: AgentSettings, _cores: Sequence[int]) -> _Shape:
    place = settings.expert_parallel
    assert place is not None  # plan_launch has checked
    return _h200(
        settings,
        *("--tensor-parallel-size", "1", "--enable-expert-parallel"),
        *("--all2all-backend", place.all2all_backend),
        "--data-parallel-external-lb",
        *("--data-parallel-size", str(place.size), "--data-parallel-rank", str(place.rank)),
        *("--data-parallel-address", place.address, "--data-parallel-rpc-port", str(place.rpc_port)),
        # All ranks of the group are given the same port, because vLLM adds the rank to it.
        events_port=settings.port - place.local_rank,
    )


_SHAPES: Mapping[Preset, Callable[[AgentSettings, Sequence[int]], _Shape]] = MappingProxyType(
    {
        Preset.CPU: _cpu,
        Preset.SIM: _sim,
        Preset.INTELLECT3_BF16_TP2: _bf16_tp2,
        Preset.INTELLECT3_FP8_TP1: _fp8_tp1,
        Preset.INTELLECT3_WIDE_EP: _wide_ep,
    }
)
