"""The beginning of a prompt as chained hashes over its raw bytes, so that two prompts can be compared without tokenising.

Boundaries lie on a fixed grid that becomes coarser: every 512 bytes at first, every 2048 in the end, so that a prompt of 60 kB
has about 45. The first is at 1024 bytes: what shares less, about 250 tokens, is not worth a search. Each hash covers
everything before its boundary, and what else decides over KV: see `scope`.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from xxhash import xxh3_64_intdigest

FIRST_BYTES = 1024
FINE_BYTES = 512
COARSE_BYTES = 2048
# Up to where the grid has which step; beyond, it has COARSE_BYTES.
# Shorter prompts are hashed faster than they are found.
LONG_BYTES = 4096
# Prompts whose chains are remembered.
CHAINS_KEPT = 4096
_STEPS = ((FIRST_BYTES, FIRST_BYTES), (8192, FINE_BYTES), (16_384, 1024))


class Prompt(Protocol):
    """What placement knows of a prompt. Sizes are bytes, hashes 64 bits."""

    @property
    def size(self) -> int: ...

    @property
    def chunks(self) -> Sequence[int]:
        """Hash of the prompt up to each boundary of the grid; the rest behind the last boundary is in none."""
        ...

    def digest(self, size: int) -> int:
        """Hash of the first `size` bytes, of any length: whether a prompt goes on where another ended."""
        ...


class BytesPrompt:
    """A prompt in the bytes of a request's body. `scope` hashes what is not in them but must be equal for KV to be equal."""

    __slots__ = ("_begin", "_body", "_chains", "_chunks", "_scope", "size")

    def __init__(
        self, body: bytes, scope: int, *, begin: int = 0, size: int | None = None, chains: "Chains | None" = None
    ) -> None:
        """The prompt is `size` bytes of `body` from `begin`; all of them by default. `chains` saves hashing what is known."""
        self._body = body
        self._chains = chains
        self._begin = begin
        self._scope = scope
        self._chunks: list[int] | None = None
        self.size = len(body) - begin if size is None else size

    @property
    def chunks(self) -> Sequence[int]:
        if self._chunks is None:
            begin, end = self._begin, self._begin + self.size
            if self._chains is None or self.size < LONG_BYTES:
                self._chunks = chained(self._body, begin, end, self._scope)
            else:
                self._chunks = self._chains.chunks(self._body, begin, end, self._scope)
        return self._chunks

    def digest(self, size: int) -> int:
        return xxh3_64_intdigest(memoryview(self._body)[self._begin : self._begin + size], self._scope)


@lru_cache(maxsize=256)
def scope_of(model: str) -> int:
    """The scope of prompts for one model: KV of another is never equal."""
    return xxh3_64_intdigest(model.encode())


def _grid() -> list[int]:
    boundaries = [0]
    for until, step in _STEPS:
        boundaries.extend(range(boundaries[-1] + step, until + 1, step))
    return boundaries


_GRID = _grid()
_LAST = len(_GRID) - 1  # where the coarse part begins


class Chains:
    """The chains of prompts that were seen, so that of one that goes on only the new part is hashed, chunk by chunk.

    Whether a prompt begins as an earlier one did is told by one hash over all of that, which is many times faster. Of prompts
    with the same first chunk the last one is remembered.
    """

    def __init__(self, kept: int = CHAINS_KEPT) -> None:
        self._kept = kept
        self._known: OrderedDict[int, tuple[int, int, list[int]]] = OrderedDict()  # first chunk -> bytes, their digest, chunks

    def __len__(self) -> int:
        return len(self._known)

    def chunks(self, body: bytes, begin: int, end: int, scope: int) -> list[int]:
        """As `chained`. The list is shared: not to be changed."""
        first = xxh3_64_intdigest(body[begin : begin + FIRST_BYTES], scope)
        known = self._known.get(first)
        view = memoryview(body)
        if known is not None:
            size, digest, chunks = known
            if begin + size <= end and xxh3_64_intdigest(view[begin : begin + size]) == digest:
                if end - begin < bytes_of(len(chunks) + 1):
                    return chunks
                chunks = chunks + chained(body, begin, end, scope, chunks)
                return self._keep(first, view[begin:end], chunks)
        chunks = chained(body, begin, end, scope, [first])
        return self._keep(first, view[begin:end], [first, *chunks])

    def _keep(self, first: int, prompt: memoryview, chunks: list[int]) -> list[int]:
        size = bytes_of(len(chunks))
        self._known[first] = (size, xxh3_64_intdigest(prompt[:size]), chunks)
        self._known.move_to_end(first)
        if len(self._known) > self._kept:
            self._known.popitem(last=False)
        return chunks


def chained(body: bytes, begin: int, end: int, scope: int, known: Sequence[int] = ()) -> list[int]:
    """The hash at each boundary of the prompt between `begin` and `end`, seeded by the one before it.

    `known` are the first ones; then only the others are returned.
    """
    chunks: list[int] = []
    digest = known[-1] if known else scope
    origin = begin
    begin += bytes_of(len(known))
    for until, step in _STEPS:
        for boundary in range(begin + step, min(end, origin + until) + 1, step):
            digest = xxh3_64_intdigest(body[begin:boundary], digest)
            chunks.append(digest)
            begin = boundary
        if begin < origin + until:
            return chunks
    for boundary in range(begin + COARSE_BYTES, end + 1, COARSE_BYTES):
        digest = xxh3_64_intdigest(body[begin:boundary], digest)
        chunks.append(digest)
        begin = boundary
    return chunks


def bytes_of(chunks: int) -> int:
    """How many bytes the first `chunks` boundaries cover."""
    return _GRID[chunks] if chunks <= _LAST else _GRID[_LAST] + (chunks - _LAST) * COARSE_BYTES


def chunks_in(size: int) -> int:
    """How many boundaries lie within the first `size` bytes."""
    if size < _GRID[_LAST]:
        return bisect_right(_GRID, size) - 1
    return _LAST + (size - _GRID[_LAST]) // COARSE_BYTES


def chunk_size(position: int) -> int:
    """Bytes between boundary `position` (from 0) and the next."""
    return _GRID[position + 1] - _GRID[position] if position < _LAST else COARSE_BYTES
