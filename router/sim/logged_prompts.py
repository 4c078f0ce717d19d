"""Prompts of the router's decision log: the hashes of their chunks and their sizes, and never their text.

What two prompts have in common is known to the last boundary of the grid, and where they are equal as a whole.
"""

from collections.abc import Sequence
from struct import Struct

from xxhash import xxh3_64_intdigest

from router.policy.prompt import bytes_of, chunks_in
from router.sim.prompts import BLOCK_TOKENS

_pack_number = Struct("<Q").pack


class LoggedPrompt:
    """Implements router.policy.prompt.Prompt. Of a beginning that ends within a chunk nothing is known: it is like no other."""

    __slots__ = ("_whole", "chunks", "size")

    def __init__(self, chunks: Sequence[int], size: int, whole: int) -> None:
        """`whole`: hash of all of its bytes."""
        self.chunks = chunks
        self.size = size
        self._whole = whole

    def digest(self, size: int) -> int:
        if size >= self.size:
            return self._whole
        return xxh3_64_intdigest(_pack_number(size), self._cover(size))

    def blocks(self, tokens: int, bytes_per_token: float) -> list[int]:
        """Chained hashes of the whole KV blocks, if the prompt has so many tokens, each of so many bytes.

        A block is taken for equal where the chunk is that its last byte lies in. With one number of bytes per token for all
        prompts of a model, equal chunks give equal blocks.
        """
        block_bytes = BLOCK_TOKENS * bytes_per_token
        return [
            xxh3_64_intdigest(_pack_number(number), self._cover(int(number * block_bytes)))
            for number in range(1, tokens // BLOCK_TOKENS + 1)
        ]

    def _cover(self, size: int) -> int:
        """Hash of the shortest known beginning that the first `size` bytes lie in."""
        needed = chunks_in(size)
        if bytes_of(needed) < size:
            needed += 1
        return self.chunks[max(0, needed - 1)] if needed <= len(self.chunks) and self.chunks else self._whole
