"""Keys of KV blocks, and the blocks that one engine holds.

Blocks are known by keys of our own, chained hashes over token ids, so neither the engine's hash algorithm nor its seed
matters, and a prompt whose tokens are known can be looked up.
"""

import sys
from array import array
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from router.state.kv_wire import BlockHash, BlockRemoved, BlockStored

# Blocks of one rank where its engine's capacity is not known: 16 million tokens in blocks of 16.
CAPACITY_BLOCKS_DEFAULT = 1_000_000

_TOKEN_BYTES = 8


def block_keys(token_ids: Sequence[int], block_size: int, scope: int = 0) -> list[int]:
    """Keys (64 bits) of the whole blocks of `block_size` tokens; each covers everything before it.

    XXH3 over a block's token ids as little-endian signed 64-bit numbers, seeded by the key of the block before; the first
    by `scope`, see `salt_scope`. Raises OverflowError for a token id that does not fit.
    """
    tokens = _packed(token_ids)
    step = block_size * _TOKEN_BYTES
    keys, key = [], scope
    for begin in range(0, len(tokens) - step + 1, step):
        key = xxh3_64_intdigest(tokens[begin : begin + step], key)
        keys.append(key)
    return keys


def salt_scope(salt: str) -> int:
    """The scope of prompts with this `cache_salt`: their KV is shared only among them."""
    return _with_extra(0, [salt])


def _packed(token_ids: Sequence[int]) -> memoryview:
    packed = array("q", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed).cast("B")


def _with_extra(parent: int, extra: Any) -> int:
    """The seed of a block over whose KV more decides than its tokens."""
    return xxh3_64_intdigest(msgspec.msgpack.encode(extra), parent)


class Stored(NamedTuple):
    """What an event of stored blocks has changed."""

    keys: list[int]  # held from now on, in the prompt's order
    surplus: list[int]  # given up, since more was told of than the engine can hold
    unrooted: int  # blocks that cannot be keyed


class HeldBlocks:
    """The blocks of one engine's prefix cache, as its events tell; never more than `capacity` of them."""

    __slots__ = ("_copies", "_copies_total", "_held", "_keys", "capacity", "is_exact")

    def __init__(self, capacity: int = CAPACITY_BLOCKS_DEFAULT) -> None:
        self.capacity = capacity
        self.is_exact = True  # no event contradicted another
        self._keys: dict[BlockHash, int] = {}  # oldest first
        # Sequences that run side by side leave several copies of a block, each of which is told of. Those beyond the first:
        self._copies: dict[BlockHash, int] = {}
        self._copies_total = 0
        self._held: set[int] = set()

    def __len__(self) -> int:
        return len(self._held)

    def leading(self, keys: Sequence[int]) -> int:
        """How many of `keys`, from the first on, are held."""
        for count, key in enumerate(keys):
            if key not in self._held:
                return count
        return len(keys)

    def store(self, event: BlockStored) -> Stored:
        """Raises OverflowError for a token id beyond 64 bits; blocks before it may have been taken in then."""
        size, hashes, extras = event.block_size, event.block_hashes, event.extra_keys
        key = 0 if event.parent_block_hash is None else self._keys.get(event.parent_block_hash)
        fits = size > 0 and len(event.token_ids) == size * len(hashes) and (extras is None or len(extras) == len(hashes))
        if key is None or not fits:
            return Stored([], [], len(hashes))
        tokens, step = _packed(event.token_ids), size * _TOKEN_BYTES
        new = []
        for number, block_hash in enumerate(hashes):
            extra = None if extras is None else extras[number]
            seed = key if extra is None else _with_extra(key, extra)
            key = xxh3_64_intdigest(tokens[number * step : (number + 1) * step], seed)
            if block_hash in self._keys:
                self._copies[block_hash] = self._copies.get(block_hash, 0) + 1
                self._copies_total += 1
                continue
            self._keys[block_hash] = key
            if key not in self._held:
                self._held.add(key)
                new.append(key)
        is_too_much = len(self._keys) + self._copies_total > self.capacity
        return Stored(new, self._shrink() if is_too_much else [], 0)

    def remove(self, event: BlockRemoved) -> list[int]:
        """Keys that are held no longer. Blocks that were not known are passed over."""
        evicted = []
        for block_hash in event.block_hashes:
            copies = self._copies.pop(block_hash, 0)
            if copies:
                self._copies_total -= 1
                if copies > 1:
                    self._copies[block_hash] = copies - 1
                continue
            key = self._keys.pop(block_hash, None)
            if key is not None and key in self._held:
                self._held.remove(key)
                evicted.append(key)
        return evicted

    def clear(self) -> list[int]:
        """Keys that were held."""
        held = list(self._held)
        self.is_exact = True
        self._keys.clear()
        self._copies.clear()
        self._copies_total = 0
        self._held.clear()
        return held

    def _shrink(self) -> list[int]:
        """Makes room. vLLM tells again of blocks that a request reuses, if the request asks for it; those are no copies."""
        self.is_exact = False
        self._copies.clear()
        self._copies_total = 0
        surplus = []
        for block_hash in list(islice(self._keys, max(0, len(self._keys) - self.capacity))):
            key = self._keys.pop(block_hash)
            if key in self._held:
                self._held.remove(key)
                surplus.append(key)
        return surplus
