"""Launch presets: the command lines they generate, and that the pinned vLLM takes every one of them."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from server.presets import EngineStart, LaunchPlan, Preset, plan_launch, wide_ep_ranks
from server.settings import AgentSettings

START = EngineStart(model="/models/m", label="v2+1", token="engine-token")
BASE = AgentSettings(served_model_name="owner/m", model="/models/m", port=8203, admin_port=8103)


def plan(settings: AgentSettings, environ: dict[str, str] | None = None, start: EngineStart = START) -> LaunchPlan:
    return plan_launch(settings, start, environ=environ or {}, cores=(2, 5))


def option(argv: Sequence[str], name: str) -> str:
    assert argv.count(name) == 1, f"{name} stands {argv.count(name)} times in {argv}"
    return argv[argv.index(name) + 1]


def with_preset(preset: Preset) -> AgentSettings:
    if preset is Preset.INTELLECT3_WIDE_EP:
        return wide_ep_ranks(BASE, group="g", address="10.0.0.1")[0]
    return replace(BASE, preset=preset)


@pytest.mark.parametrize("preset", Preset)
def test_every_preset_starts_the_model_behind_the_guard(preset: Preset) -> None:
    """Names, addresses, guard secrets and the graceful end are there whatever the preset."""
    launch = plan(with_preset(preset), start=EngineStart(model="/models/m", label="v2+1", token="engine-token"))
    argv = launch.argv
    assert argv[:3] == (sys.executable, "-P", "-m")
    assert option(argv, "--model") == "/models/m"
    assert option(argv, "--served-model-name") == "owner/m"
    assert option(argv, "--host") == "127.0.0.1"
    assert launch.stop_timeout_s > float(option(argv, "--shutdown-timeout")) > 0
    assert "--enable-prompt-tokens-details" in argv
    assert "engine-token" not in " ".join(argv)  # anybody on the machine can read a command line
    assert launch.env["INTELLECT_ENGINE_TOKEN"] == "engine-token"
    assert launch.env["INTELLECT_CHECKPOINT"] == "v2+1"
    if preset is not Preset.SIM:  # which has the guard, prefix caching and development routes built in
        assert argv[3] == "vllm.entrypoints.launchers.api_server.entry"
        assert option(argv, "--middleware") == "server.guard.EngineGuard"
        assert option(argv, "--worker-extension-cls") == "server.vllm_worker.CheckpointWorker"
        assert "--enable-prefix-caching" in argv
        assert launch.env["VLLM_SERVER_DEV_MODE"] == "1"
        assert int(launch.env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 4  # the router's pool forgets a connection after 4 s


def test_cpu() -> None:
    """All cores, float32, a gibibyte of KV, no compilation; a local folder is not looked up on the hub."""
    launch = plan(replace(BASE, engine_arguments=("--enable-expert-parallel",)))
    assert option(launch.argv, "--dtype") == "float32"
    assert "--enforce-eager" in launch.argv
    assert launch.argv[-1] == "--enable-expert-parallel"
    assert launch.env["VLLM_CPU_OMP_THREADS_BIND"] == "2,5"
    assert launch.env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert launch.env["HF_HUB_OFFLINE"] == "1"
    assert launch.kv_events_port is None


def test_an_engine_restarted_on_a_checkpoint_keeps_the_bases_tokenizer() -> None:
    """Crash and restart change no answer: what a swap leaves alone (tokenizer, sampling defaults) stays the base's."""
    argv = plan(BASE, start=replace(START, model="/store/m/v2", base="/models/m")).argv
    assert option(argv, "--model") == "/store/m/v2"
    assert option(argv, "--tokenizer") == option(argv, "--generation-config") == "/models/m"
    assert "--tokenizer" not in plan(BASE).argv
    sim = plan(with_preset(Preset.SIM), start=replace(START, base="/models/m"))
    assert "--tokenizer" not in sim.argv  # its text has none


def test_a_hub_id_may_be_downloaded() -> None:
    """HF_HUB_OFFLINE is only set where nothing is missing."""
    launch = plan(BASE, start=replace(START, model="owner/m"))
    assert "HF_HUB_OFFLINE" not in launch.env


def test_the_agents_environment_reaches_the_engine_without_its_secrets() -> None:
    """An operator's VLLM_ variables win over a preset's; our own variables do not leak into the engine."""
    launch = plan(
        BASE,
        {
            "PATH": "/bin",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": "0-7",
            "VLLM_SERVER_DEV_MODE": "0",
            "INTELLECT_AGENT_TOKEN": "secret",
            "INTELLECT_ENGINE_TOKEN": "other",
            "INTELLECT_CHECKPOINT": "v9",
        },
    )
    assert launch.env["PATH"] == "/bin"
    assert launch.env["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert launch.env["VLLM_CPU_OMP_THREADS_BIND"] == "0-7"
    assert launch.env["VLLM_SERVER_DEV_MODE"] == "1"  # swaps need it
    assert "INTELLECT_AGENT_TOKEN" not in launch.env
    assert launch.env["INTELLECT_ENGINE_TOKEN"] == "engine-token"
    assert launch.env["INTELLECT_CHECKPOINT"] == "v2+1"


@pytest.mark.parametrize(
    ("preset", "tensor_parallel"),
    [(Preset.INTELLECT3_BF16_TP2, "2"), (Preset.INTELLECT3_FP8_TP1, "1"), (Preset.INTELLECT3_WIDE_EP, "1")],
)
def test_intellect3(preset: Preset, tensor_parallel: str) -> None:
    """The model's parsers, its whole context, and KV events with replay."""
    launch = plan(with_preset(preset))
    assert option(launch.argv, "--tensor-parallel-size") == tensor_parallel
    assert option(launch.argv, "--max-model-len") == "131072"
    assert option(launch.argv, "--tool-call-parser") == "qwen3_coder"
    assert "--enable-auto-tool-choice" in launch.argv
    assert option(launch.argv, "--reasoning-parser") == "deepseek_r1"
    events = json.loads(option(launch.argv, "--kv-events-config"))
    assert events == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:9203",  # port 8203 + 1000
        "replay_endpoint": "tcp://*:10203",  # port 8203 + 2000
        "topic": "kv",
    }
    assert launch.kv_events_port == 9203


def test_devices_are_passed_on() -> None:
    """Several replicas on one node each name their own accelerators."""
    launch = plan(replace(BASE, preset="intellect3-bf16-tp2", devices=(4, 5)))
    assert option(launch.argv, "--device-ids") == "4,5"


def test_wide_ep_runs_one_agent_per_rank() -> None:
    """The second of two nodes: ranks 8 to 15, a port and an accelerator each, one group, one head."""
    ranks = wide_ep_ranks(BASE, group="west", address="10.0.0.1", nodes=2, node=1, rpc_port=5555)
    plans = [plan(rank) for rank in ranks]
    assert len(plans) == 8
    for local, (rank, launch) in enumerate(zip(ranks, plans, strict=True)):
        assert (rank.port, rank.admin_port) == (8203 + local, 8103 + local)
        assert option(launch.argv, "--port") == str(8203 + local)
        assert option(launch.argv, "--device-ids") == str(local)
        assert option(launch.argv, "--data-parallel-rank") == str(8 + local)
        assert option(launch.argv, "--data-parallel-size") == "16"
        assert option(launch.argv, "--data-parallel-address") == "10.0.0.1"
        assert option(launch.argv, "--data-parallel-rpc-port") == "5555"
        assert option(launch.argv, "--all2all-backend") == "deepep_low_latency"
        assert "--data-parallel-external-lb" in launch.argv
        assert "--enable-expert-parallel" in launch.argv
        # vLLM adds the rank to the port that all ranks are given alike.
        assert json.loads(option(launch.argv, "--kv-events-config"))["endpoint"] == "tcp://*:9203"
        assert launch.kv_events_port == 9203 + 8 + local
        assert rank.expert_parallel is not None
        assert (rank.expert_parallel.group, rank.expert_parallel.rank) == ("west", 8 + local)
    assert len({launch.kv_events_port for launch in plans}) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "h100"}, "preset is 'h100'.*cpu, sim, intellect3-bf16-tp2"),
        ({"preset": "intellect3-wide-ep"}, "intellect3-wide-ep needs expert_parallel"),
        ({"expert_parallel": wide_ep_ranks(BASE, group="g", address="a")[0].expert_parallel}, "cpu takes no expert_parallel"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    """An unknown preset lists the known ones; expert-parallel settings go with their preset only."""
    with pytest.raises(ValueError, match=message):
        plan(replace(BASE, **changes))


def test_only_the_simulated_engine_does_without_a_model() -> None:
    """vLLM would otherwise load its own default model."""
    start = replace(START, model=None)
    assert "--model" not in plan(replace(BASE, preset="sim"), start=start).argv
    with pytest.raises(ValueError, match="model is not set"):
        plan(BASE, start=start)


def test_a_node_outside_of_its_group_is_refused() -> None:
    """Nodes count from zero."""
    with pytest.raises(ValueError, match=r"node is 2.*from 0 to 1"):
        wide_ep_ranks(BASE, group="g", address="a", nodes=2, node=2)


PARSE = """
import importlib.util, json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.config import KVEventsConfig
from vllm.utils.argparse_utils import FlexibleArgumentParser

for launcher, *argv in json.load(sys.stdin):
    assert importlib.util.find_spec(launcher)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    validate_parsed_serve_args(args)
    validate_api_server_args(args)  # knows the parsers by name
    assert args.middleware == ["server.guard.EngineGuard"]
    assert args.shutdown_timeout > 0 and args.enable_prompt_tokens_details and args.enable_prefix_caching
    assert not args.enable_log_requests and args.disable_uvicorn_access_log
    assert args.kv_events_config is None or isinstance(args.kv_events_config, KVEventsConfig)
    print("parsed")
"""


def test_vllm_takes_every_command_line() -> None:
    """Each flag exists in the installed vLLM with the type and the choices that it is given."""
    presets = [preset for preset in Preset if preset is not Preset.SIM]
    argvs = [plan(with_preset(preset)).argv[3:] for preset in presets]
    argvs += [
        plan(replace(BASE, preset="intellect3-bf16-tp2", devices=(4, 5), engine_arguments=("--max-num-seqs", "8"))).argv[3:],
        plan(BASE, start=replace(START, base="/models/base")).argv[3:],
    ]
    result = subprocess.run(
        [sys.executable, "-P", "-c", PARSE], input=json.dumps(argvs), capture_output=True, text=True, timeout=110
    )
    assert result.stdout.count("parsed") == len(argvs), result.stderr[-3000:]
