"""Where a replica publishes its KV events, from what its agent or its engine says of it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from router.edge.ask import ask
from router.edge.upstream import UpstreamPool, request_head
from router.errors import UpstreamError

ASK_TIMEOUT_S = 2.0
_ANSWER_BYTES_MAX = 1024 * 1024
_WILDCARDS = frozenset({"*", "0.0.0.0", "::", ""})


@dataclass(frozen=True, slots=True)
class KvEndpoints:
    """Of one data-parallel rank: ZeroMQ addresses to connect to. `replay` None: what was missed cannot be asked for."""

    events: str
    replay: str | None = None


def reachable(endpoint: str, host: str) -> str | None:
    """An address as the publisher names it, as one that can be connected to; `host` is the replica's.

    None for one that cannot be: `inproc://`, or an address without a port.
    """
    if endpoint.startswith("ipc://"):
        return endpoint  # only on the same machine; elsewhere nobody answers
    try:
        parts = urlsplit(endpoint.replace("tcp://*", "tcp://0.0.0.0", 1))
        port = parts.port
    except ValueError:
        return None
    if parts.scheme != "tcp" or not port:
        return None
    name = parts.hostname or ""
    name = host if name in _WILDCARDS else name
    return f"tcp://[{name}]:{port}" if ":" in name else f"tcp://{name}:{port}"


def of_status(endpoint: str | None, host: str, ranks: int = 1) -> dict[int, KvEndpoints]:
    """From `ReplicaStatus.kv_events_endpoint`, by rank: vLLM publishes each rank at the port after the one before it.

    Empty where nothing is published.
    """
    first = None if endpoint is None else reachable(endpoint, host)
    if first is None:
        return {}
    if not first.startswith("tcp://"):
        return {0: KvEndpoints(first)}
    base, _, port = first.rpartition(":")
    return {rank: KvEndpoints(f"{base}:{int(port) + rank}") for rank in range(ranks)}


class _Config(msgspec.Struct, frozen=True):
    """What is read of vLLM's KVEventsConfig."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = ""
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000


_SOURCES = msgspec.json.Decoder(dict[str, Any])


def of_engine(answer: bytes, host: str) -> dict[int, KvEndpoints]:
    """From the body of an engine's `GET /kv_event_sources`, by rank; the only place that tells of replay.

    Empty where it says nothing useful. A key of the answer is a rank, its value that rank's configuration.
    """
    try:
        configs = {int(rank): msgspec.convert(one, _Config) for rank, one in _SOURCES.decode(answer).items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        return {}
    # Ranks are counted from 0 here; an engine that is one rank of several names its own number.
    found = {}
    for number, (_, config) in enumerate(sorted(configs.items())):
        events = reachable(config.endpoint, host)
        if not config.enable_kv_cache_events or config.publisher != "zmq" or events is None:
            continue
        has_replay = config.replay_endpoint is not None and config.buffer_steps > 0
        replay = reachable(config.replay_endpoint, host) if has_replay and config.replay_endpoint else None
        found[number] = KvEndpoints(events, replay)
    return found


async def ask_engine(
    pool: UpstreamPool, headers: Iterable[tuple[bytes, bytes]] = (), *, timeout_s: float = ASK_TIMEOUT_S
) -> dict[int, KvEndpoints]:
    """What the engine itself says, by rank. Empty where it does not say: an older engine, or one behind the agent's guard."""
    head = request_head(b"GET", b"/kv_event_sources", headers)
    try:
        status, answer = await ask(pool, head, b"", timeout_s=timeout_s, bytes_max=_ANSWER_BYTES_MAX)
    except UpstreamError:
        return {}
    return of_engine(answer, pool.endpoint.host) if status == 200 else {}
