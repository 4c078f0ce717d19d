"""What KV events tell of the engines' caches, as a correction of what the prefix index believes.

The index knows what was sent where, at once and of every prompt; events know what is really held, a little later and only of
prompts, or beginnings of prompts, whose tokens are known. So a rank's cache counts as its events tell it where they have told
of all of it, and the index goes on to say what running requests are computing there, and what has been given up for prompts
that are queued there. Where events tell of a part, that part is held at least; where something may have been missed, or no
block of the prompt is known, nothing changes.
"""

import enum
from collections.abc import Callable, Mapping, Sequence

from router.policy.interface import Coverage, PlacementRequest
from router.policy.prefix_index import PrefixIndex
from router.policy.prompt import Prompt, bytes_of, chunks_in
from router.policy.targets import Target
from router.types import ReplicaId

# A block is evicted after those that follow on it, so whoever holds the last of so many holds the others.
STRIDE = 16
# Links between chunks and blocks that are remembered, the newest: about 50 MB.
LINKS_MAX = 1 << 18
# Different texts with the same tokens whose chunks end in the same block; more are not linked.
CHUNKS_PER_BLOCK = 4

Rank = tuple[ReplicaId, int]


class _Origin(enum.Enum):
    """Who says how far a source can be trusted."""

    HEARD = enum.auto()  # nobody: its events are taken for complete from the first one on
    TOLD = enum.auto()  # who follows it, who also tells when its cache is lost


class _Source:
    """One rank's events."""

    __slots__ = ("bit", "blocks", "coverage", "origin")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.blocks: set[int] = set()
        self.coverage = Coverage.UNSURE
        self.origin = _Origin.HEARD


class ExactCaches:
    """Blocks by the ranks that hold them. Bounded by those who tell: no more blocks than an engine can hold."""

    def __init__(self) -> None:
        self._sources: dict[Rank, _Source] = {}
        self._ranks: dict[int, Rank] = {}  # by bit
        self._holders: dict[int, int] = {}  # block -> bit set
        self._known = 0  # bit set of those that tell of all or some
        self._complete: dict[Rank, int] = {}  # those that tell of all; the values say nothing
        self._links = ChunkLinks()

    @property
    def is_heard(self) -> bool:
        """Whether any source can be used; if not, nothing here needs to be asked."""
        return bool(self._known)

    def blocks(self, rank: Rank) -> int:
        """How many the rank is known to hold."""
        source = self._sources.get(rank)
        return 0 if source is None else len(source.blocks)

    def stored(self, rank: Rank, blocks: Sequence[int]) -> None:
        source = self._heard(rank)
        held, holders, bit = source.blocks, self._holders, source.bit
        for block in blocks:
            if block not in held:
                held.add(block)
                holders[block] = holders.get(block, 0) | bit

    def evicted(self, rank: Rank, blocks: Sequence[int], drop: Callable[[int], None] | None = None) -> None:
        """`drop` is called with each chunk of the index that has lost its KV; None: the blocks may still be there."""
        source = self._heard(rank)
        for block in blocks:
            if block in source.blocks:
                source.blocks.remove(block)
                self._release(block, source.bit)
            if drop is not None:
                for chunk in self._links.behind(block):
                    drop(chunk)

    def cleared(self, rank: Rank) -> None:
        source = self._heard(rank)
        for block in source.blocks:
            self._release(block, source.bit)
        source.blocks.clear()

    def trusted(self, rank: Rank, coverage: Coverage) -> None:
        source = self._source(rank)
        source.origin = _Origin.TOLD
        self._set_coverage(source, coverage)

    def restarted(self, replica: ReplicaId) -> None:
        """The caches of a replica are lost. Whoever is told how far to trust them is also told what they hold."""
        for rank, source in list(self._sources.items()):
            if rank[0] == replica and source.origin is _Origin.HEARD:
                self._close(rank)

    def removed(self, replica: ReplicaId) -> None:
        for rank in [rank for rank in self._sources if rank[0] == replica]:
            self._close(rank)

    def learn(self, prompt: Prompt, blocks: Sequence[int]) -> None:
        """Which blocks the chunks of this prompt lie in, so that an evicted block takes them out of the index."""
        if self._known:
            self._links.learn(prompt, blocks)

    def correct(
        self,
        held: dict[int | None, int],
        request: PlacementRequest,
        index: PrefixIndex,
        target_of: Callable[[Rank], Target | None],
    ) -> None:
        """Corrects `held`: bytes of the prompt that each slot of the index is believed to hold. Within a chunk both agree.

        Nothing is changed where nobody holds even the first block: either nothing is cached anywhere, or the engines count
        something into their blocks that these do not have (an adapter, an image).
        """
        chunks = request.prompt.chunks
        # Where its own blocks are not known, those of its beginning may be, from another prompt.
        blocks = request.blocks or self._links.of(chunks)
        leading = self.leading(blocks)
        if not leading:
            return
        bytes_per_block = request.prompt.size / (len(blocks) + 0.5)  # behind the last whole block lies half a one on average
        for rank in {**leading, **self._complete}:
            target = target_of(rank)
            if target is None or target.slot is None:
                continue
            believed = held.get(target.slot, 0)
            count = leading.get(rank, 0)
            told = int(count * bytes_per_block) if request.blocks else bytes_of(count)
            is_all = bool(request.blocks) or count < len(blocks)  # else it may hold more, of which the blocks are not known
            if told > _next_boundary(believed):
                if target.queued < 1.0:  # else the index has given it up already for the prompts that are queued there
                    held[target.slot] = told
            elif is_all and believed > _next_boundary(told) and rank in self._complete:
                held[target.slot] = max(told, index.in_use(target.slot, chunks))

    def leading(self, blocks: Sequence[int]) -> dict[Rank, int]:
        """How many of the first of `blocks` each rank holds; those that hold none, or are not to be trusted, are left out."""
        if not blocks:
            return {}
        holders = self._holders
        counts: dict[Rank, int] = {}
        alive = self._known & holders.get(blocks[0], 0)
        depth = 1
        while alive and depth < len(blocks):
            end = min(depth + STRIDE, len(blocks))
            if alive & holders.get(blocks[end - 1], 0) != alive:
                for position in range(depth, end):
                    still = alive & holders.get(blocks[position], 0)
                    if still != alive:
                        self._count(counts, alive & ~still, position)
                        alive = still
            depth = end
        self._count(counts, alive, depth)
        return counts

    def _count(self, counts: dict[Rank, int], bits: int, blocks: int) -> None:
        while bits:
            bit = bits & -bits
            bits ^= bit
            counts[self._ranks[bit]] = blocks

    def _source(self, rank: Rank) -> _Source:
        source = self._sources.get(rank)
        if source is None:
            bit = 1
            while bit in self._ranks:
                bit <<= 1
            source = self._sources[rank] = _Source(bit)
            self._ranks[bit] = rank
        return source

    def _heard(self, rank: Rank) -> _Source:
        source = self._source(rank)
        if source.origin is _Origin.HEARD and source.coverage is not Coverage.ALL:
            self._set_coverage(source, Coverage.ALL)
        return source

    def _set_coverage(self, source: _Source, coverage: Coverage) -> None:
        source.coverage = coverage
        self._known = self._known & ~source.bit if coverage is Coverage.UNSURE else self._known | source.bit
        self._complete = {rank: 0 for rank, one in self._sources.items() if one.coverage is Coverage.ALL}

    def _close(self, rank: Rank) -> None:
        self.cleared(rank)
        source = self._sources[rank]
        self._set_coverage(source, Coverage.UNSURE)
        del self._sources[rank], self._ranks[source.bit]

    def _release(self, block: int, bit: int) -> None:
        left = self._holders[block] & ~bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


def _next_boundary(size: int) -> int:
    return bytes_of(chunks_in(size) + 1)


class ChunkLinks:
    """In which KV block each chunk of a prompt ends: the same for every rank, because both are chained over what precedes."""

    def __init__(self, links_max: int = LINKS_MAX) -> None:
        self._links_max = links_max
        self._block_of: dict[int, int] = {}  # chunk -> block, oldest first
        self._chunks_of: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    @property
    def chunks(self) -> Mapping[int, int]:
        """Each linked chunk's block."""
        return self._block_of

    def of(self, chunks: Sequence[int]) -> list[int]:
        """The block of each of the first chunks, as far as they are linked."""
        blocks = []
        for chunk in chunks:
            block = self._block_of.get(chunk)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def behind(self, block: int) -> tuple[int, ...]:
        """Chunks that end in this block."""
        return self._chunks_of.get(block, ())

    def learn(self, prompt: Prompt, blocks: Sequence[int]) -> None:
        """By position: tokens are taken to be spread evenly over the bytes."""
        if not blocks or not prompt.size:
            return
        chunks = prompt.chunks
        blocks_per_byte = (len(blocks) + 0.5) / prompt.size
        for position in range(len(chunks), 0, -1):
            chunk = chunks[position - 1]
            if chunk in self._block_of:
                break  # and so are those before it: they were linked with it
            block = blocks[min(len(blocks), max(1, int(bytes_of(position) * blocks_per_byte))) - 1]
            others = self._chunks_of.get(block, ())
            if len(others) < CHUNKS_PER_BLOCK:
                self._block_of[chunk] = block
                self._chunks_of[block] = (*others, chunk)
        while len(self._block_of) > self._links_max:
            self._unlink(next(iter(self._block_of)))

    def _unlink(self, chunk: int) -> None:
        block = self._block_of.pop(chunk)
        left = tuple(other for other in self._chunks_of[block] if other != chunk)
        if left:
            self._chunks_of[block] = left
        else:
            del self._chunks_of[block]
