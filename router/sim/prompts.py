"""Prompts without text: a prompt is a sequence of segments, and two prompts are equal as far as their segments are.

A segment is an id of 64 bits and a number of tokens; token `n` of a segment is the same token wherever that segment stands, so
a segment cut short is a prefix of itself. Blocks, chunks and digests are made of the same chain, hence equal content has
equal hashes and other content other ones. A prompt is extended, never changed: what it shares with the prompt that it goes
on from (a system prompt, the turns before) is hashed once.
"""

from bisect import bisect_right
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from router.policy.prompt import bytes_of, chunks_in

BLOCK_TOKENS = 16
CHAT_BYTES_PER_TOKEN = 4.2
AGENT_BYTES_PER_TOKEN = 3.3  # tool calls and JSON

_MASK = (1 << 64) - 1
# An odd number near 2^64 / golden ratio: the hashes of consecutive blocks lie far apart, also modulo small numbers.
_STRIDE = 0x9E3779B97F4A7C15
_pack_piece = Struct("<QQQ").pack
_pack_place = Struct("<QQ").pack


class Segment(NamedTuple):
    """`tokens` tokens of content that nothing else has."""

    id: int
    tokens: int


class _Piece(NamedTuple):
    """A part of a segment."""

    segment: int
    offset: int
    tokens: int


class SimPrompt:
    """Begin with `SimPrompt.empty` and extend. Implements router.policy.prompt.Prompt."""

    __slots__ = ("_chunks", "_parent", "_scope", "_segments", "_starts", "_tail", "_tenths", "blocks", "size", "tokens")

    def __init__(
        self,
        *,
        scope: int,
        tenths: int,
        parent: "SimPrompt | None" = None,
        segments: tuple[Segment, ...] = (),
        starts: tuple[int, ...] = (),
        tokens: int = 0,
        blocks: list[int],
        tail: tuple[_Piece, ...] = (),
    ) -> None:
        self._chunks: list[int] | None = None
        self._parent = parent
        self._scope = scope
        self._tenths = tenths  # bytes of ten tokens; whole numbers, so that the same place is never rounded two ways
        self._segments = segments
        self._starts = starts  # token at which each segment begins
        self._tail = tail  # what lies behind the last whole block
        self.tokens = tokens
        self.blocks: Sequence[int] = blocks  # chained hashes of the whole blocks of 16 tokens
        self.size = -(-tokens * tenths // 10)  # rounded up: the last byte belongs to the last token

    @classmethod
    def empty(cls, bytes_per_token: float, scope: int = 0) -> "SimPrompt":
        """`bytes_per_token` counts to one decimal. Prompts of other scopes (model, version, tenant's salt) share nothing."""
        tenths = round(bytes_per_token * 10)
        if tenths < 10:
            raise ValueError(f"bytes_per_token {bytes_per_token}: a token has at least one byte; give 1.0 or more")
        return cls(scope=scope, tenths=tenths, blocks=[])

    def extended(self, *segments: Segment) -> "SimPrompt":
        """This prompt with `segments` behind it."""
        blocks = list(self.blocks)
        tail, tokens = self._tail, self.tokens
        added, starts = [], []
        for segment in segments:
            if segment.tokens <= 0:
                continue
            tail = self._grow(blocks, tail, segment)
            added.append(segment)
            starts.append(tokens)
            tokens += segment.tokens
        return SimPrompt(
            scope=self._scope,
            tenths=self._tenths,
            parent=self,
            segments=(*self._segments, *added),
            starts=(*self._starts, *starts),
            tokens=tokens,
            blocks=blocks,
            tail=tail,
        )

    def _grow(self, blocks: list[int], tail: tuple[_Piece, ...], segment: Segment) -> tuple[_Piece, ...]:
        """Appends to `blocks` those that `segment` fills behind `tail`. Returns the new tail."""
        offset = 0
        if tail:
            fill = sum(piece.tokens for piece in tail)
            offset = min(BLOCK_TOKENS - fill, segment.tokens)
            tail = (*tail, _Piece(segment.id, 0, offset))
            if fill + offset < BLOCK_TOKENS:
                return tail
            blocks.append(_hash(blocks[-1] if blocks else self._scope, tail))
        if whole := (segment.tokens - offset) // BLOCK_TOKENS:
            # Where the segment is entered, what came before it and how it lies in the blocks decide over all its whole blocks.
            first = _hash(blocks[-1] if blocks else self._scope, (_Piece(segment.id, offset, BLOCK_TOKENS),))
            blocks += [(first + number * _STRIDE) & _MASK for number in range(whole)]
            offset += whole * BLOCK_TOKENS
        return (_Piece(segment.id, offset, segment.tokens - offset),) if offset < segment.tokens else ()

    @property
    def chunks(self) -> Sequence[int]:
        if self._chunks is None:
            shared = () if self._parent is None else self._parent.chunks
            own = range(len(shared) + 1, chunks_in(self.size) + 1)
            self._chunks = [*shared, *(self._at(bytes_of(number)) for number in own)]
            self._parent = None
        return self._chunks

    def digest(self, size: int) -> int:
        return self._at(min(size, self.size))

    def _at(self, size: int) -> int:
        """Hash of what lies before byte `size`; of a token that it cuts, nothing counts."""
        end = min(size * 10 // self._tenths, self.tokens)
        blocks = end // BLOCK_TOKENS
        pieces = self._pieces(blocks * BLOCK_TOKENS, end)
        return xxh3_64_intdigest(_pack_place(_hash(self._chain(blocks), pieces), size), 1)

    def _chain(self, blocks: int) -> int:
        return self.blocks[blocks - 1] if blocks else self._scope

    def _pieces(self, begin: int, end: int) -> tuple[_Piece, ...]:
        pieces = []
        number = bisect_right(self._starts, begin) - 1
        while begin < end:
            segment, start = self._segments[number], self._starts[number]
            stop = min(start + segment.tokens, end)
            pieces.append(_Piece(segment.id, begin - start, stop - begin))
            begin = stop
            number += 1
        return tuple(pieces)


def _hash(before: int, pieces: tuple[_Piece, ...]) -> int:
    return xxh3_64_intdigest(b"".join([_pack_piece(*piece) for piece in pieces]), before)


def answer_blocks(prompt: SimPrompt, answer: Segment) -> Sequence[int]:
    """The blocks that become full while `answer` grows behind `prompt`."""
    return prompt.extended(answer).blocks[len(prompt.blocks) :]


def history_of(answer: Segment, kept: float = 1.0) -> Segment:
    """What a later prompt holds of an answer: the answer, or less than it, and then written otherwise than it was generated.

    Chat templates of reasoning models drop the reasoning of earlier turns: `kept` is the share of tokens that stays. The
    blocks of the answer are then worth nothing to the next turn.
    """
    if kept >= 1.0:
        return answer
    return Segment((answer.id + 1) & _MASK, max(1, int(answer.tokens * kept)))
