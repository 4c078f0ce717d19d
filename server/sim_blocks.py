"""KV-cache blocks of the simulated engine: reference counts, prefix cache by chained hashes, least-recently-used eviction.

Each block remembers the fingerprint of the weights that computed it, so that a sequence which reads blocks of other
weights can be told. Pure and synchronous; it knows nothing of sequences, time or sockets.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

MIXED_WEIGHTS = b"mixed"  # a block whose tokens were computed under more than one set of weights


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive full blocks entered the prefix cache. `salt` is set where the first of them begins a salted prompt."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    salt: str | None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    hash: bytes


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


CacheEvent = BlocksStored | BlockRemoved | AllBlocksCleared


def chain_hash(parent: bytes | None, tokens: Sequence[int], salt: str | None) -> bytes:
    """Hash of a full block after `parent`; the salt enters the first block, and through the chain all others."""
    digest = hashlib.blake2b(parent or (salt or "").encode(), digest_size=32)  # as long as the sha256 of vLLM
    digest.update(array("Q", tokens).tobytes())
    return digest.digest()


class Block:
    __slots__ = ("fingerprint", "hash", "id", "refs")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.refs = 0
        self.hash: bytes | None = None
        self.fingerprint: bytes | None = None

    def computed_by(self, fingerprint: bytes) -> None:
        """Some tokens of this block were computed under weights `fingerprint`."""
        if self.fingerprint is None:
            self.fingerprint = fingerprint
        elif self.fingerprint != fingerprint:
            self.fingerprint = MIXED_WEIGHTS

    def __repr__(self) -> str:
        return f"Block({self.id}, refs={self.refs}, cached={self.hash is not None})"


class BlockPool:
    """All blocks of one engine. A block with no reference is free; it keeps its hash, and can be hit, until reused."""

    def __init__(self, count: int) -> None:
        self._blocks = [Block(index) for index in range(count)]
        self._free: OrderedDict[int, Block] = OrderedDict((block.id, block) for block in self._blocks)  # next victim first
        self._cached: dict[bytes, dict[int, Block]] = {}  # sequences that ran side by side leave several copies of a block
        self._events: list[CacheEvent] = []

    @property
    def total(self) -> int:
        return len(self._blocks)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - self.free

    def match(self, hashes: Sequence[bytes]) -> list[Block]:
        """The cached blocks of the longest cached prefix of `hashes`. Takes no reference."""
        matched: list[Block] = []
        for block_hash in hashes:
            copies = self._cached.get(block_hash)
            if copies is None:
                break
            matched.append(next(iter(copies.values())))
        return matched

    def acquire(self, block: Block) -> None:
        """One more reference to a cached block."""
        block.refs += 1
        self._free.pop(block.id, None)

    def allocate(self, count: int) -> list[Block]:
        """`count` empty blocks with one reference each; the least recently freed are evicted from the prefix cache.

        Raises:
            ValueError: fewer than `count` are free. Nothing is taken then.
        """
        if count > self.free:
            raise ValueError(f"{count} KV blocks wanted, {self.free} free")
        taken: list[Block] = []
        for _ in range(count):
            _, block = self._free.popitem(last=False)
            self._forget(block)
            block.fingerprint = None
            block.refs = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[Block]) -> None:
        """One reference less to each block of a sequence, given in sequence order; its tail is evicted first."""
        for block in reversed(blocks):
            block.refs -= 1
            assert block.refs >= 0
            if block.refs == 0:
                self._free[block.id] = block
                if block.hash is None:
                    self._free.move_to_end(block.id, last=False)  # nothing to lose: reuse it first

    def store(
        self, blocks: Sequence[Block], hashes: Sequence[bytes], *, parent: bytes | None, tokens: Sequence[int], salt: str | None
    ) -> None:
        """Enters full blocks that follow `parent` into the prefix cache; `tokens` are all of theirs.

        Like vLLM it tells of a block also where a copy of it is cached already.
        """
        for block, block_hash in zip(blocks, hashes, strict=True):
            block.hash = block_hash
            self._cached.setdefault(block_hash, {})[block.id] = block
        first_salt = salt if parent is None else None
        self._events.append(BlocksStored(tuple(hashes), parent, tuple(tokens), first_salt))

    def clear(self) -> bool:
        """Forgets every cached prefix. False, and nothing is forgotten, while any block is referenced."""
        if self.used:
            return False
        for block in self._blocks:
            block.hash = None
        self._cached.clear()
        self._events.append(AllBlocksCleared())
        return True

    def _forget(self, block: Block) -> None:
        """Takes one copy of a block out of the prefix cache; like vLLM it tells of each copy."""
        if block.hash is None:
            return
        copies = self._cached[block.hash]
        del copies[block.id]
        if not copies:
            del self._cached[block.hash]
        self._events.append(BlockRemoved(block.hash))
        block.hash = None

    def take_events(self) -> list[CacheEvent]:
        """What happened to the prefix cache since the last call."""
        events, self._events = self._events, []
        return events

    def __repr__(self) -> str:
        return f"BlockPool(used={self.used}/{self.total}, cached={len(self._cached)})"
