"""Which replicas hold the beginning of a prompt: by what was routed, by what engines report, by what was just routed.

Block hashes are chained: a hash stands for its block and everything before it.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from router.policy.interface import PlacementRequest
from router.sim.rivals.ledger import Target
from router.types import ReplicaId

BYTES_PER_TOKEN = 4
BLOCK_TOKENS = 16  # vLLM's default, where a replica's facts do not say


def prompt_tokens(request: PlacementRequest, block_tokens: int) -> int:
    """A prompt's length, at least 1: its whole blocks exactly, what is behind them by its bytes."""
    whole = len(request.blocks) * block_tokens
    by_bytes = request.prompt.size // BYTES_PER_TOKEN
    return max(1, by_bytes if whole == 0 else min(max(by_bytes, whole), whole + block_tokens - 1))


class RoutedPrefixes:
    """An approximate index: what was routed to each target, least recently used forgotten first, ends before beginnings."""

    def __init__(self) -> None:
        self._used: dict[Target, OrderedDict[int, float]] = {}  # when each block was last routed, oldest first

    def matched(self, target: Target, blocks: Sequence[int]) -> int:
        """How many leading blocks were routed there."""
        used = self._used.get(target)
        if used is None:
            return 0
        low, high = 0, len(blocks)  # a block is kept no longer than those before it: one bisection finds the end
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] in used:
                low = middle
            else:
                high = middle - 1
        return low

    def insert(self, target: Target, blocks: Sequence[int], now: float) -> None:
        used = self._used.setdefault(target, OrderedDict())
        for block in reversed(blocks):
            used[block] = now
            used.move_to_end(block)

    def size(self, target: Target) -> int:
        """In blocks."""
        return len(self._used.get(target, ()))

    def shrink(self, target: Target, capacity: int) -> None:
        used = self._used.get(target)
        while used and len(used) > capacity:
            used.popitem(last=False)

    def shrink_all(self, capacity: int) -> None:
        for target in self._used:
            self.shrink(target, capacity)

    def expire(self, target: Target, before: float) -> None:
        used = self._used.get(target)
        while used and used[next(iter(used))] < before:
            used.popitem(last=False)

    def forget(self, replica: ReplicaId) -> None:
        self._used = {target: used for target, used in self._used.items() if target[0] != replica}


class ReportedBlocks:
    """A precise index: what engines say that they hold. Walks a prompt once, however many replicas there are."""

    def __init__(self) -> None:
        self._bits: dict[Target, int] = {}
        self._free: list[int] = []
        self._holders: dict[int, int] = {}  # of each block, one bit per target

    def stored(self, target: Target, blocks: Sequence[int]) -> None:
        bit = self._bits.get(target)
        if bit is None:
            bit = self._free.pop() if self._free else 1 << len(self._bits)
            self._bits[target] = bit
        holders = self._holders
        for block in blocks:
            holders[block] = holders.get(block, 0) | bit

    def evicted(self, target: Target, blocks: Sequence[int]) -> None:
        self._drop(self._bits.get(target, 0), blocks)

    def forget(self, replica: ReplicaId) -> None:
        for target in [target for target in self._bits if target[0] == replica]:
            bit = self._bits[target]
            self._drop(bit, [block for block, holders in self._holders.items() if holders & bit])
            del self._bits[target]
            self._free.append(bit)

    def matched(self, blocks: Sequence[int], targets: Sequence[Target]) -> list[int]:
        """For each target, how many leading blocks it holds without a gap."""
        bits = [self._bits.get(target, 0) for target in targets]
        alive = 0
        for bit in bits:
            alive |= bit
        ends: dict[int, int] = {0: 0}
        depth = 0
        for block in blocks:
            if not alive:
                break
            left = alive & self._holders.get(block, 0)
            gone = alive ^ left
            while gone:
                lowest = gone & -gone
                ends[lowest] = depth
                gone ^= lowest
            alive = left
            depth += 1
        return [ends.get(bit, depth) for bit in bits]

    def _drop(self, bit: int, blocks: Sequence[int]) -> None:
        holders = self._holders
        for block in blocks:
            left = holders.get(block, 0) & ~bit
            if left:
                holders[block] = left
            else:
                holders.pop(block, None)


class _Placed(NamedTuple):
    until: float
    target: Target
    blocks: Sequence[int]


class PredictedPrefixes:
    """What was routed within the last `ttl_s` seconds, and so may be computed before any event says it."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._placed: deque[_Placed] = deque()
        self._by_first: dict[int, deque[_Placed]] = {}

    def insert(self, target: Target, blocks: Sequence[int], now: float) -> None:
        if blocks:
            placed = _Placed(now + self._ttl_s, target, blocks)
            self._placed.append(placed)
            self._by_first.setdefault(blocks[0], deque()).append(placed)

    def matched(self, blocks: Sequence[int], now: float) -> dict[Target, int]:
        """How many leading blocks were routed lately to each target; targets that got none are left out."""
        while self._placed and self._placed[0].until <= now:
            self._remove_oldest()
        matched: dict[Target, int] = {}
        for placed in self._by_first.get(blocks[0], ()) if blocks else ():
            known = matched.get(placed.target, 0)
            if known < len(blocks):
                matched[placed.target] = max(known, _common(blocks, placed.blocks))
        return matched

    def forget(self, replica: ReplicaId) -> None:
        kept = [placed for placed in self._placed if placed.target[0] != replica]
        self._placed = deque(kept)
        self._by_first = {}
        for placed in kept:
            self._by_first.setdefault(placed.blocks[0], deque()).append(placed)

    def _remove_oldest(self) -> None:
        first = self._placed.popleft().blocks[0]
        same = self._by_first[first]
        same.popleft()
        if not same:
            del self._by_first[first]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading hashes are equal. Chained: where one pair is equal, so are all before it."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
