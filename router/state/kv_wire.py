"""vLLM's KV-cache events as they lie in one message (vLLM 0.32, vllm/distributed/kv_events.py).

A message is a msgpack array [time, events, data-parallel rank]; an event is a map that its `type` names. Fields that are not
read here, and those of a later release, are passed over.
"""

from typing import Any

import msgspec

BlockHash = bytes | int  # vLLM's own, by whatever algorithm; an int where VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is set


class BlockStored(msgspec.Struct, tag="BlockStored", frozen=True, gc=False):
    """Full blocks that follow each other entered the prefix cache."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    # What beside its tokens decides over each block's KV: LoRA name, images, and in a prompt's first block its cache salt.
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", frozen=True, gc=False):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", frozen=True, gc=False):
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    ts: float
    events: list[KvEvent]


_BATCH = msgspec.msgpack.Decoder(_Batch)


def decode_batch(payload: bytes) -> list[KvEvent]:
    """The events of one message, in order. Raises ValueError where it is not one, or holds an event of an unknown kind."""
    try:
        return _BATCH.decode(payload).events
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a batch of KV events: {error}") from error


def is_in_gpu_memory(event: BlockStored | BlockRemoved) -> bool:
    """Whether it tells of the cache that the engine computes in, rather than of one that blocks are moved out to.

    Of a model whose layers differ in attention only the first kind's blocks (group 0) are followed.
    """
    return event.medium in (None, "GPU") and event.locality in (None, "LOCAL") and not event.group_idx
