"""Command line of the simulated engine: vLLM's flags where it has them, the timing model's and the faults' besides.

Flags that vLLM knows and the simulation does not are errors, so that nobody believes they had an effect.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.sim_faults import Fault, FaultKind, decode_faults
from server.sim_settings import EngineSettings, KvEventSettings, SchedulerSettings, TimingModel

_DEFAULT_NAME = "simulated"


@dataclass(frozen=True, slots=True)
class Launch:
    settings: EngineSettings
    faults: tuple[Fault, ...]


def parse_arguments(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Launch:
    """What the process shall be. Prints a usage error and exits with 2 where the arguments are wrong."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        faults = [fault for text in args.fault for fault in decode_faults(text)]
        if any(fault.kind is FaultKind.REFUSE for fault in faults):
            raise ValueError("a refuse fault only works at run time: POST it to /sim/faults, or use slow_start")
        return Launch(
            _settings(args, faults, environ), tuple(fault for fault in faults if fault.kind is not FaultKind.SLOW_START)
        )
    except ValueError as error:
        parser.error(str(error))


def _settings(args: argparse.Namespace, faults: Sequence[Fault], environ: Mapping[str, str]) -> EngineSettings:
    scale = args.time_scale
    slow_start_s = sum(fault.seconds for fault in faults if fault.kind is FaultKind.SLOW_START)
    model = None if args.model is None else Path(args.model)
    names = args.served_model_name or ([_DEFAULT_NAME] if args.model is None else [args.model])
    scheduler = SchedulerSettings(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=_model_len(model) if args.max_model_len is None else args.max_model_len,
        block_size=args.block_size,
        num_blocks=args.num_gpu_blocks_override,
        prefix_caching=args.enable_prefix_caching,
    )
    timing = TimingModel(
        prefill_tokens_per_s=args.prefill_tokens_per_second,
        step_base_s=args.step_seconds,
        decode_per_sequence_s=args.decode_seconds_per_sequence,
        decode_per_context_token_s=args.decode_seconds_per_context_token,
        scale=scale,
    )
    keys = args.api_key or [environ.get("VLLM_API_KEY", "")]
    return EngineSettings(
        host=args.host,
        port=args.port,
        model=model,
        served_model_names=tuple(names),
        api_keys=tuple(key for key in keys if key),
        scheduler=scheduler,
        timing=timing,
        startup_s=args.startup_seconds * scale + slow_start_s,
        weights_load_s=args.weights_load_seconds * scale,
        answer_tokens_mean=args.answer_tokens_mean,
        reasoning_parser=args.reasoning_parser is not None,
        pools=args.runner == "pooling",
        responses_store=environ.get("VLLM_ENABLE_RESPONSES_API_STORE", "0") not in ("", "0"),
        prompt_tokens_details=args.enable_prompt_tokens_details,
        request_id_headers=args.enable_request_id_headers,
        server_load_tracking=args.enable_server_load_tracking,
        shutdown_timeout_s=args.shutdown_timeout,
        timeout_keep_alive_s=args.timeout_keep_alive,
        kv_events=_kv_events(args.kv_events_config),
    )


def _model_len(model: Path | None) -> int:
    """The context that the model's config.json names, as vLLM takes it."""
    try:
        config = {} if model is None else json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        config = {}
    length = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return length if isinstance(length, int) else SchedulerSettings().max_model_len


def _kv_events(text: str | None) -> KvEventSettings | None:
    """None where events are off.

    Raises:
        ValueError: not JSON, an unknown key, or an unknown publisher.
    """
    if text is None:
        return None
    try:
        config: dict[str, Any] = dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise ValueError(f"--kv-events-config {text!r} is not a JSON object: {error}") from error
    is_on = config.pop("enable_kv_cache_events", False)
    publisher = config.pop("publisher", None) or ("zmq" if is_on else "null")
    if publisher not in ("zmq", "null"):
        raise ValueError(f"--kv-events-config: publisher is {publisher!r}, but must be 'zmq' or 'null'")
    try:
        settings = KvEventSettings(**config)
    except TypeError as error:
        raise ValueError(f"--kv-events-config {text!r}: {error}") from error
    return settings if is_on and publisher == "zmq" else None


def _parser() -> argparse.ArgumentParser:
    engine, scheduler, timing = EngineSettings(), SchedulerSettings(), TimingModel()
    parser = argparse.ArgumentParser(
        prog="python -m server.sim_engine",
        description="A simulated vLLM engine: vLLM's routes and shapes, a timing model instead of a GPU, made-up text.",
        allow_abbrev=False,
    )
    vllm = parser.add_argument_group("as in vLLM")
    vllm.add_argument("--host", default=engine.host)
    vllm.add_argument("--port", type=int, default=engine.port)
    vllm.add_argument("--model", metavar="DIR", help="folder with *.safetensors and config.json; default: built-in weights")
    vllm.add_argument("--runner", choices=("auto", "generate", "pooling"), default="auto", help="pooling: an embedding model")
    vllm.add_argument("--served-model-name", nargs="+", metavar="NAME", help="default: the model as given")
    vllm.add_argument("--max-model-len", type=int, metavar="TOKENS", help="default: from config.json, else 131072")
    vllm.add_argument("--max-num-seqs", type=int, default=scheduler.max_num_seqs)
    vllm.add_argument("--max-num-batched-tokens", type=int, default=scheduler.max_num_batched_tokens)
    vllm.add_argument("--block-size", type=int, default=scheduler.block_size, help="tokens of one KV block")
    vllm.add_argument("--num-gpu-blocks-override", type=int, default=scheduler.num_blocks, metavar="BLOCKS")
    vllm.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    vllm.add_argument("--enable-prompt-tokens-details", action="store_true")
    vllm.add_argument("--enable-request-id-headers", action="store_true")
    vllm.add_argument("--enable-server-load-tracking", action="store_true")
    vllm.add_argument("--enable-auto-tool-choice", action="store_true", help="accepted; tool calls always work here")
    vllm.add_argument("--tool-call-parser", metavar="NAME", help="accepted; tool calls always work here")
    vllm.add_argument("--reasoning-parser", metavar="NAME", help="any name: answers begin with reasoning")
    vllm.add_argument("--kv-events-config", metavar="JSON")
    vllm.add_argument("--api-key", nargs="+", metavar="KEY", help="default: VLLM_API_KEY")
    vllm.add_argument("--shutdown-timeout", type=float, default=engine.shutdown_timeout_s, metavar="SECONDS")
    simulation = parser.add_argument_group("simulation")
    simulation.add_argument("--timeout-keep-alive", type=int, default=engine.timeout_keep_alive_s, metavar="SECONDS")
    simulation.add_argument("--time-scale", type=float, default=timing.scale, help="multiplies every duration; 0: no waiting")
    simulation.add_argument("--prefill-tokens-per-second", type=float, default=timing.prefill_tokens_per_s)
    simulation.add_argument("--step-seconds", type=float, default=timing.step_base_s, help="fixed part of an engine step")
    simulation.add_argument("--decode-seconds-per-sequence", type=float, default=timing.decode_per_sequence_s)
    simulation.add_argument("--decode-seconds-per-context-token", type=float, default=timing.decode_per_context_token_s)
    simulation.add_argument("--startup-seconds", type=float, default=engine.startup_s, help="before the port opens")
    simulation.add_argument("--weights-load-seconds", type=float, default=engine.weights_load_s, help="of one reload")
    simulation.add_argument("--answer-tokens-mean", type=int, default=engine.answer_tokens_mean)
    simulation.add_argument("--fault", action="append", default=[], metavar="JSON", help="scripted fault; repeatable")
    return parser
