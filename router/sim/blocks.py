"""KV cache of one simulated rank: reference counts, prefix cache and least-recently-used eviction as vLLM's block pool does it.

Kept as a radix tree whose nodes are runs of consecutive blocks with the same holders, so that a request costs by the number
of runs on its path (a handful) and not by the number of its blocks (hundreds). This is exact because a cached block's parent
is always cached, too: whoever holds or releases a block holds or releases all before it, and tails are released first.

Hashes are chained: equal hashes mean that everything before is equal, too.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Node:
    """A run of full blocks. `refs` sequences hold all of it; with none it can be evicted from its tail."""

    __slots__ = ("children", "hashes", "parent", "refs")

    def __init__(self, parent: "Node | None", hashes: list[int]) -> None:
        self.parent = parent
        self.hashes = hashes
        self.refs = 0
        self.children = 0


class KvEvent(NamedTuple):
    is_stored: bool  # or else evicted
    blocks: list[int]  # hashes


class Match(NamedTuple):
    """The longest cached prefix of a prompt."""

    node: Node  # where it ends
    within: int  # how many blocks of `node` belong to it
    blocks: int
    idle: int  # of them: held by no sequence, so counted as free


class BlockCache:
    """All blocks of one rank. A block is held (by sequences), idle (cached, held by none) or empty.

    A sequence holds the run of nodes from the root to its tip, and blocks of its own that are not, or not yet, in the tree:
    those are only counted, as `private`.
    """

    def __init__(self, capacity: int, *, records_events: bool) -> None:
        self.capacity = capacity
        self.held = 0
        self.idle = 0
        self.root = Node(None, [])
        self._heads: dict[int, Node] = {}  # by the first hash of each node's run
        self._idle: OrderedDict[Node, None] = OrderedDict()  # next victim first
        self._records_events = records_events
        self._events: list[KvEvent] = []

    @property
    def free(self) -> int:
        """Blocks that can be had, by eviction where needed."""
        return self.capacity - self.held

    @property
    def empty(self) -> int:
        """Blocks that can be had without eviction."""
        return self.capacity - self.held - self.idle

    def match(self, hashes: Sequence[int], limit: int) -> Match:
        """The longest cached prefix of the first `limit` of `hashes`. Changes nothing."""
        node, within, found, idle = self.root, 0, 0, 0
        heads = self._heads
        while found < limit:
            child = heads.get(hashes[found])
            if child is None:
                break
            common = _common(child.hashes, hashes, found, limit)
            node, within = child, common
            found += common
            if not child.refs:
                idle += common
            if common < len(child.hashes):
                break
        return Match(node, within, found, idle)

    def acquire(self, match: Match) -> Node:
        """One more holder of the matched blocks. Returns the tip to give back with `release`."""
        tip = match.node
        if tip is not self.root and match.within < len(tip.hashes):
            tip = self._split(tip, match.within)
        node = tip
        while node.parent is not None:
            self._hold(node)
            node = node.parent
        return tip

    def reserve(self, blocks: int) -> None:
        """Takes `blocks` private blocks, evicting the least recently released ones.

        Raises:
            ValueError: fewer are free. Nothing is taken then.
        """
        if blocks > self.free:
            raise ValueError(f"{blocks} KV blocks wanted, {self.free} free")
        if blocks > (empty := self.empty):
            self._evict(blocks - empty)
        self.held += blocks

    def extend(self, tip: Node, hashes: Sequence[int]) -> tuple[Node, int]:
        """Private blocks behind `tip` have become full: enters them into the tree.

        Returns the new tip and how many private blocks the sequence still has of them: where others hold the same blocks
        already, the sequence keeps its copies besides.
        """
        copies, done = 0, 0
        while done < len(hashes):
            child = self._heads.get(hashes[done])
            if child is None:
                return self._append(tip, list(hashes[done:])), copies
            common = _common(child.hashes, hashes, done, len(hashes))
            if common < len(child.hashes):
                child = self._split(child, common)
            if child.refs:
                copies += common
            else:
                self.held -= common  # the copy is given up for the cached block, which is held from now on
            self._hold(child)
            tip = child
            done += common
        return tip, copies

    def release(self, tip: Node, private: int) -> None:
        """A sequence gives up all it holds. What is in the tree stays cached until it is evicted, tails first."""
        self.held -= private
        node = tip
        while node.parent is not None:
            node.refs -= 1
            if not node.refs:
                self._idle[node] = None
                self.held -= len(node.hashes)
                self.idle += len(node.hashes)
            node = node.parent

    def take_events(self) -> list[KvEvent]:
        """What was stored and evicted since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _note(self, is_stored: bool, blocks: list[int]) -> None:
        if not self._records_events:
            return
        if self._events and self._events[-1].is_stored is is_stored:
            self._events[-1].blocks.extend(blocks)
        else:
            self._events.append(KvEvent(is_stored, list(blocks)))

    def _hold(self, node: Node) -> None:
        if not node.refs:
            del self._idle[node]
            self.idle -= len(node.hashes)
            self.held += len(node.hashes)
        node.refs += 1

    def _append(self, tip: Node, hashes: list[int]) -> Node:
        """Private blocks become the run behind `tip`, held by the one sequence that had them."""
        self._note(True, hashes)
        if tip.refs == 1 and not tip.children and tip is not self.root:
            tip.hashes += hashes
            return tip
        node = Node(tip, hashes)
        node.refs = 1
        tip.children += 1
        self._heads[hashes[0]] = node
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cuts a node's run; the node itself stays the lower part, so that whoever has it as tip still has it all."""
        assert node.parent is not None
        upper = Node(node.parent, node.hashes[:at])
        upper.refs = node.refs
        upper.children = 1
        node.hashes = node.hashes[at:]
        node.parent = upper
        self._heads[upper.hashes[0]] = upper
        self._heads[node.hashes[0]] = node
        if not upper.refs:
            self._idle[upper] = None  # held by the caller at once, so its place in the order does not matter
        return upper

    def _evict(self, blocks: int) -> None:
        self.idle -= blocks
        while blocks:
            node = next(iter(self._idle))
            run = node.hashes
            if len(run) > blocks:
                self._note(False, run[-blocks:])
                del run[-blocks:]
                return
            assert node.parent is not None
            assert not node.children, "tails are released before what they follow"
            self._note(False, run)
            blocks -= len(run)
            del self._idle[node]
            del self._heads[run[0]]
            node.parent.children -= 1


def _common(run: Sequence[int], hashes: Sequence[int], begin: int, end: int) -> int:
    """How many blocks `run` and `hashes[begin:end]` have in common; the first is known to be equal."""
    most = min(len(run), end - begin)
    if run[most - 1] == hashes[begin + most - 1]:
        return most
    least = 1
    while most - least > 1:
        middle = (least + most) // 2
        if run[middle - 1] == hashes[begin + middle - 1]:
            least = middle
        else:
            most = middle
    return least
