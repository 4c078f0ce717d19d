"""How much of a prompt each replica holds, as llm-d's endpoint picker knows it: by what it routed, or by events."""

from collections.abc import Sequence

from router.policy.interface import PlacementRequest
from router.sim.rivals.ledger import Target
from router.sim.rivals.prefix import PredictedPrefixes, ReportedBlocks, RoutedPrefixes
from router.types import ReplicaId

ROUTED_BLOCK_TOKENS = 64
MAX_PREFIX_TOKENS = 131_072


class LlmdPrefixes:
    """Approximate: blocks of 64 tokens, of at most 131 072 tokens, `lru_blocks` for each replica. Precise: the engines' own
    blocks by events, and for `speculative_ttl_s` (0: off) what was just routed."""

    def __init__(self, *, precise: bool, lru_blocks: int, speculative_ttl_s: float) -> None:
        self._precise = precise
        self._lru_blocks = lru_blocks
        self._routed = RoutedPrefixes()
        self._reported = ReportedBlocks()
        self._speculative = PredictedPrefixes(speculative_ttl_s) if precise and speculative_ttl_s > 0 else None

    def matched(
        self, request: PlacementRequest, targets: Sequence[Target], block_tokens: int, now: float
    ) -> tuple[list[int], int]:
        """Leading tokens that each target holds, and the tokens of all blocks that were looked for."""
        if not self._precise:
            blocks, size = _routed_blocks(request.blocks, block_tokens)
            return [self._routed.matched(target, blocks) * size for target in targets], len(blocks) * size
        matched = self._reported.matched(request.blocks, targets)
        if self._speculative is not None:
            lately = self._speculative.matched(request.blocks, now)
            matched = [max(held, lately.get(target, 0)) for target, held in zip(targets, matched, strict=True)]
        return [held * block_tokens for held in matched], len(request.blocks) * block_tokens

    def routed(self, request: PlacementRequest, target: Target, block_tokens: int, now: float) -> None:
        if not self._precise:
            self._routed.insert(target, _routed_blocks(request.blocks, block_tokens)[0], now)
            self._routed.shrink(target, self._lru_blocks)
        elif self._speculative is not None:
            self._speculative.insert(target, request.blocks, now)

    def stored(self, target: Target, blocks: Sequence[int]) -> None:
        if self._precise:
            self._reported.stored(target, blocks)

    def evicted(self, target: Target, blocks: Sequence[int]) -> None:
        if self._precise:
            self._reported.evicted(target, blocks)

    def restarted(self, replica: ReplicaId) -> None:
        """Only events tell of it; what was routed there is believed on."""
        self._reported.forget(replica)
        if self._speculative is not None:
            self._speculative.forget(replica)

    def removed(self, replica: ReplicaId) -> None:
        self.restarted(replica)
        self._routed.forget(replica)


def _routed_blocks(blocks: Sequence[int], block_tokens: int) -> tuple[Sequence[int], int]:
    """The hash at every 64 tokens (hashes are chained), and the tokens between two."""
    stride = max(1, ROUTED_BLOCK_TOKENS // block_tokens)
    size = stride * block_tokens
    return blocks[stride - 1 : MAX_PREFIX_TOKENS // block_tokens : stride], size
