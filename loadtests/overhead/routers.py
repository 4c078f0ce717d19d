"""The routers that are compared, and how each is started. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from loadtests.overhead.figures import Stage

HOST = "127.0.0.1"
RIVALS = ("vllm-router==0.1.17", "sglang-router==0.3.2")


class RouterName(StrEnum):
    OURS = "ours"
    VLLM = "vllm-router"
    VLLM_ROUND_ROBIN = "vllm-router-rr"
    SGLANG = "sglang-router"


@dataclass(frozen=True, slots=True)
class Launch:
    """What a command line is made of. Ports are free ones of this machine; `python` runs ours, `rivals` holds theirs."""

    port: int
    second_port: int
    engines: Sequence[str]
    python: str
    rivals: Path


@dataclass(frozen=True, slots=True)
class Router:
    title: str
    stages: frozenset[Stage]
    command: Callable[[Launch], list[str]]
    is_ours: bool = False


def _ours(launch: Launch) -> list[str]:
    command = [launch.python, "-m", "intellect", "router", "--host", HOST, "--port", str(launch.port)]
    command += ["--admin-port", str(launch.second_port)]
    for engine in launch.engines:
        command += ["--replica", engine]
    return command


def _vllm(policy: str) -> Callable[[Launch], list[str]]:
    return lambda launch: [str(launch.rivals / "bin/vllm-router"), *_rival_flags(launch, policy)]


def _sglang(launch: Launch) -> list[str]:
    return [str(launch.rivals / "bin/python"), "-m", "sglang_router.launch_router", *_rival_flags(launch, "cache_aware")]


def _rival_flags(launch: Launch, policy: str) -> list[str]:
    flags = ["--host", HOST, "--port", str(launch.port), "--prometheus-port", str(launch.second_port)]
    return [*flags, "--policy", policy, "--worker-urls", *launch.engines]


_EVERY_STAGE = frozenset(Stage)
ROUTERS = {
    RouterName.OURS: Router("ours", _EVERY_STAGE, _ours, is_ours=True),
    RouterName.VLLM: Router("vllm-router cache_aware", _EVERY_STAGE, _vllm("cache_aware")),
    # Its cheapest policy: what streaming is compared with. Everything else is compared with policies that see prompts.
    RouterName.VLLM_ROUND_ROBIN: Router("vllm-router round_robin", frozenset({Stage.CHUNKS}), _vllm("round_robin")),
    RouterName.SGLANG: Router("sglang-router cache_aware", _EVERY_STAGE, _sglang),
}
