"""KV-cache events on ZeroMQ in the wire format of vLLM 0.32 (vllm/distributed/kv_events.py).

PUB frames: topic, 8-byte big-endian sequence number, msgpack batch. A batch is an array [ts, events, data_parallel_rank];
its events are maps with a `type`. A ROUTER socket replays recent batches from a sequence number on and ends with -1.

This module imports pyzmq, so it is imported only where `--kv-events-config` turns events on.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq.asyncio
from zmq.constants import SocketType
from zmq.sugar.context import Context

from server.sim_blocks import AllBlocksCleared, BlockRemoved, BlocksStored, CacheEvent
from server.sim_settings import KvEventSettings

_MEDIUM = "GPU"
_GROUP = 0  # one kind of attention, so one KV-cache group
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


def encode_batch(events: Sequence[CacheEvent], *, block_size: int, ts: float) -> bytes:
    """One batch of data-parallel rank 0; `ts` is in seconds since 1970."""
    return msgspec.msgpack.encode([ts, [_event(item, block_size) for item in events], 0])


def _event(item: CacheEvent, block_size: int) -> dict[str, Any]:
    match item:
        case BlocksStored(hashes, parent, tokens, salt):
            first_keys = None if salt is None else (salt,)
            return {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": tokens,
                "block_size": block_size,
                "lora_id": None,
                "medium": _MEDIUM,
                "lora_name": None,
                "extra_keys": [first_keys, *[None] * (len(hashes) - 1)],
                "group_idx": _GROUP,
            }
        case BlockRemoved(block_hash):
            return {"type": "BlockRemoved", "block_hashes": [block_hash], "medium": _MEDIUM, "group_idx": _GROUP}
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


class ZmqCacheEvents:
    """Publishes batches at once; `serve_replays` answers who missed some. Open it inside the running event loop."""

    def __init__(self, settings: KvEventSettings, *, block_size: int, clock: Callable[[], float] = time.time) -> None:
        self._topic = settings.topic.encode()
        self._block_size = block_size
        self._clock = clock
        self._sequence = 0
        self._recent: deque[tuple[bytes, bytes]] = deque(maxlen=settings.buffer_steps)
        self._context = zmq.asyncio.Context()
        self._publisher = Context(self._context).socket(SocketType.PUB)
        self._publisher.set_hwm(settings.hwm)
        if _is_bound(settings.endpoint):
            self._publisher.bind(settings.endpoint)
        else:
            self._publisher.connect(settings.endpoint)
        self._replay: zmq.asyncio.Socket | None = None
        if settings.replay_endpoint is not None:
            self._replay = self._context.socket(SocketType.ROUTER)
            self._replay.bind(settings.replay_endpoint)

    def publish(self, events: Sequence[CacheEvent]) -> None:
        number = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        payload = encode_batch(events, block_size=self._block_size, ts=self._clock())
        self._recent.append((number, payload))
        # A PUB socket never blocks: it drops what a slow subscriber does not take.
        self._publisher.send_multipart((self._topic, number, payload))

    async def serve_replays(self) -> None:
        """Answers replay requests for ever; returns at once where no replay endpoint is set."""
        if self._replay is None:
            return
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3:
                continue
            client, _, start = frames
            for number, payload in list(self._recent):
                if number >= start:
                    await self._replay.send_multipart((client, b"", self._topic, number, payload))
            await self._replay.send_multipart((client, b"", b"", _END_OF_REPLAY, b""))

    def close(self) -> None:
        self._publisher.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)
        self._context.term()


def _is_bound(endpoint: str) -> bool:
    """vLLM binds wildcards and local transports, and connects to everything else."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
