"""The beginning of a prompt as chained hashes over its raw bytes, so that two prompts can be compared without tokenising.

Boundaries lie on a fixed grid: every 256 bytes (about 64 tokens) up to 16 KiB, then every 1024 bytes, which keeps a prompt of
60 kB at about 100 hashes. Each hash covers everything before its boundary, and what else decides over KV: see `scope`.
"""

from collections.abc import Sequence
from typing import Protocol

from xxhash import xxh3_64_intdigest

FINE_BYTES = 256
FINE_UNTIL = 16 * 1024
COARSE_BYTES = 1024


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

    __slots__ = ("_bytes", "_chunks", "_scope", "size")

    def __init__(self, prompt: bytes | memoryview, scope: int) -> None:
        self._bytes = prompt
        self._scope = scope
        self._chunks: list[int] | None = None
        self.size = len(prompt)

    @property
    def chunks(self) -> Sequence[int]:
        if self._chunks is None:
            self._chunks = chained(self._bytes, self._scope)
        return self._chunks

    def digest(self, size: int) -> int:
        return xxh3_64_intdigest(self._bytes[:size], self._scope)


def chained(prompt: bytes | memoryview, scope: int) -> list[int]:
    """The hash at each boundary, seeded by the one before it."""
    chunks = []
    end = len(prompt)
    digest = scope
    fine_end = min(end, FINE_UNTIL)
    for begin in range(0, fine_end - FINE_BYTES + 1, FINE_BYTES):
        digest = xxh3_64_intdigest(prompt[begin : begin + FINE_BYTES], digest)
        chunks.append(digest)
    for begin in range(FINE_UNTIL, end - COARSE_BYTES + 1, COARSE_BYTES):
        digest = xxh3_64_intdigest(prompt[begin : begin + COARSE_BYTES], digest)
        chunks.append(digest)
    return chunks


_FINE_CHUNKS = FINE_UNTIL // FINE_BYTES


def bytes_of(chunks: int) -> int:
    """How many bytes the first `chunks` boundaries cover."""
    if chunks <= _FINE_CHUNKS:
        return chunks * FINE_BYTES
    return FINE_UNTIL + (chunks - _FINE_CHUNKS) * COARSE_BYTES


def chunks_in(size: int) -> int:
    """How many boundaries lie within the first `size` bytes."""
    if size <= FINE_UNTIL:
        return size // FINE_BYTES
    return _FINE_CHUNKS + (size - FINE_UNTIL) // COARSE_BYTES
