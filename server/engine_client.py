"""The engine's private and informative routes, called by its agent. Every failure is one of three exceptions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from protocol.errors import read_error
from protocol.headers import ENGINE_TOKEN
from server.settings import is_wildcard

_FACTS_TIMEOUT_S = 3.0
_CONNECT_TIMEOUT_S = 3.0
_CACHE_INFO = "vllm:cache_config_info"

_T = TypeVar("_T")


class EngineError(Exception):
    """A call to the engine failed; the message says which and why."""


class EngineUnreachable(EngineError):
    """No connection, or it broke: the engine is not up or has died."""


class EngineTimeout(EngineError):
    """No answer in time: the engine may still be at work on it."""


class EngineRefused(EngineError):
    """It answered with an error, or said that it did not do what was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine says about itself; None where it does not say."""

    max_model_len: int | None = None  # tokens
    kv_block_size: int | None = None  # tokens
    kv_capacity_tokens: int | None = None


class _ModelCard(msgspec.Struct):
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


class _Reset(msgspec.Struct):
    success: bool


def engine_url(host: str, port: int) -> str:
    """Where a process on the same machine reaches an engine that listens on `host`."""
    if is_wildcard(host):
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class EngineClient:
    """For one start of one engine: its token opens no other. Must be closed.

    Calls have no deadline of their own unless `timeout_s` says so; the caller knows how long its step may take.
    """

    def __init__(self, base_url: str, token: str, *, api_key: str | None = None) -> None:
        headers = {ENGINE_TOKEN.decode(): token}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            trust_env=False,  # no proxy stands between an agent and its engine
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def answers(self, timeout_s: float) -> bool:
        """Whether it is up and is the engine that this client's token belongs to, not another one on its port.

        The second of its two calls is answered by the engine's core, between two steps. `timeout_s` is for each.
        """
        try:
            await self._call("GET", "/health", timeout_s=timeout_s)
            await self._call("GET", "/is_sleeping", timeout_s=timeout_s)
        except EngineError:
            return False
        return True

    async def pause(self) -> None:
        """Freezes all requests at the step in progress and lets new ones wait. They keep their KV cache."""
        await self._call("POST", "/pause", params={"mode": "keep", "clear_cache": "false"})

    async def resume(self) -> None:
        await self._call("POST", "/resume")

    async def load(self, weights: str) -> None:
        """Loads the weights of a folder (or hub id) over the present ones, in every worker."""
        body = {"method": "load_checkpoint", "kwargs": {"weights_path": weights}}
        await self._call("POST", "/collective_rpc", body=body)

    async def reset_cache(self) -> None:
        """Preempts every request and forgets all KV, also what a connector holds elsewhere."""
        params = {"reset_running_requests": "true", "reset_external": "true"}
        answer = await self._call("POST", "/reset_prefix_cache", params=params)
        if not _decode(answer, _Reset, "/reset_prefix_cache").success:
            raise EngineRefused("/reset_prefix_cache answered success: false, so KV blocks of other weights may remain")

    async def set_label(self, label: str) -> None:
        """Names the weights, for the engine's own records and for the guard's response header."""
        await self._call("POST", "/update_weight_version", body={"new_version": label})

    async def facts(self) -> EngineFacts:
        """Raises EngineError if the engine cannot be asked; what it leaves out is None."""
        models = _decode(await self._call("GET", "/v1/models", timeout_s=_FACTS_TIMEOUT_S), _ModelList, "/v1/models")
        metrics = await self._call("GET", "/metrics", timeout_s=_FACTS_TIMEOUT_S)
        cache = cache_config(metrics.decode("utf-8", "replace"))
        block_size, blocks = _number(cache, "block_size"), _number(cache, "num_gpu_blocks")
        capacity = _number(cache, "kv_cache_size_tokens")
        if capacity is None and block_size is not None and blocks is not None:
            capacity = block_size * blocks
        return EngineFacts(
            max_model_len=models.data[0].max_model_len if models.data else None,
            kv_block_size=block_size,
            kv_capacity_tokens=capacity,
        )

    async def _call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: object = None,
        timeout_s: float | None = None,
    ) -> bytes:
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else httpx.Timeout(timeout_s)
        try:
            response = await self._http.request(method, path, params=params, json=body, timeout=timeout)
        except httpx.TimeoutException as error:
            raise EngineTimeout(f"{path}: no answer in time") from error
        except httpx.HTTPError as error:
            raise EngineUnreachable(f"{path}: {error or type(error).__name__}") from error
        if response.status_code != 200:
            text = read_error(response.status_code, response.content).message
            raise EngineRefused(f"{path} answered {response.status_code}: {text}")
        return response.content


def cache_config(metrics: str) -> Mapping[str, str]:
    """The labels of vLLM's `cache_config_info`, from the text of /metrics; empty if it is not there."""
    lines = "\n".join(line for line in metrics.splitlines() if line.startswith(_CACHE_INFO))
    for family in text_string_to_metric_families(f"# TYPE {_CACHE_INFO} gauge\n{lines}\n"):
        for sample in family.samples:
            return sample.labels
    return {}


def _number(labels: Mapping[str, str], name: str) -> int | None:
    value = labels.get(name, "")
    return int(value) if value.isdigit() else None


def _decode(body: bytes, kind: type[_T], path: str) -> _T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineRefused(f"{path} answered something else than expected: {error}") from error
