"""Which replica holds which beginnings of prompts in its KV cache, as far as a router can know from what it has sent there.

One dictionary maps a chunk's hash to a bit set of cache slots, so that a lookup costs one step for each chunk of the prompt
and nothing for each replica, and stops at the first chunk that nobody holds. Each slot stands for one KV cache and does what
its engine does: chunks of running requests are kept, the others go in the order of their last use when there is no room, and
of one prompt the end goes first. So the chunks that a slot holds of a prompt are its beginning.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from router.policy.prompt import Prompt, bytes_of, chunk_size

# Prompts with the same last chunk and different ends that are remembered; more are the same text with other last words.
ENDS_MAX = 4
# A shorter answer, and the rest of its prompt, is not worth a search for it: it saves some 50 ms of prefill.
ANSWER_BYTES_MIN = 2048
# Entries of a slot that was given up which are removed with each later insertion.
PURGED_AT_ONCE = 64
# Takes the keys of tails out of the range of chunks' hashes.
_TAIL = 1 << 64


class Hit(NamedTuple):
    """Bytes of a prompt that the slots in `slots` hold of its beginning; `chunks` of it are whole chunks."""

    slots: int  # bit set
    chunks: int
    size: int
    tail: int = 0  # key of the end of an earlier prompt, and its answer, that the rest of `size` comes from


class _Slot:
    __slots__ = ("bound", "idle", "idle_size", "reserved", "runs", "used", "used_size")

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.runs: dict[int, int] = {}  # last chunk -> requests that run with it, and so with the same chunks before it
        self.used: dict[int, int] = {}  # chunk -> how many of the runs have it
        self.used_size = 0
        self.idle: OrderedDict[int, int] = OrderedDict()  # chunk or tail -> bytes, least recently used first
        self.idle_size = 0
        self.reserved = 0  # bytes of the bound that something else takes


class PrefixIndex:
    """Sizes are bytes of prompt. A slot is a small number, given out by `open`; its bit in a set is `1 << slot`."""

    def __init__(self) -> None:
        self._slots: list[_Slot | None] = []
        self._open = 0  # bit set
        self._given_up: list[tuple[int, list[int]]] = []  # slots and the keys that still name them
        self._holders: dict[int, int] = {}  # chunk or tail -> slots
        self._ends: dict[int, tuple[int, ...]] = {}  # last chunk of a prompt -> sizes at which prompts with it ended

    def open(self, bound: int) -> int:
        """A new and empty slot that holds at most `bound` bytes besides what running requests use."""
        slot = _Slot(bound)
        given_up = {number for number, _ in self._given_up}
        for number, taken in enumerate(self._slots):
            if taken is None and number not in given_up:
                self._slots[number] = slot
                break
        else:
            number = len(self._slots)
            self._slots.append(slot)
        self._open |= 1 << number
        return number

    def close(self, number: int) -> None:
        """Forgets all that a slot holds: at once for every lookup, its memory bit by bit."""
        slot = self._slot(number)
        self._slots[number] = None
        self._open &= ~(1 << number)
        if keys := [*slot.used, *slot.idle]:
            self._given_up.append((number, keys))

    def set_bound(self, number: int, bound: int) -> None:
        slot = self._slot(number)
        slot.bound = bound
        self._shrink(number, slot)

    def sizes(self, number: int) -> tuple[int, int]:
        """Bytes of prompts that running requests use, each counted once however many use it; and all that it holds.

        What is reserved for answers is in the second only.
        """
        slot = self._slot(number)
        return slot.used_size, slot.used_size + slot.idle_size + slot.reserved

    def entries_of(self, number: int) -> int:
        """Chunks and ends of prompts that a slot holds."""
        slot = self._slot(number)
        return len(slot.used) + len(slot.idle)

    @property
    def entries(self) -> int:
        """Chunks and ends of prompts that are remembered, by whomever they are held."""
        return len(self._holders)

    def lookup(self, prompt: Prompt) -> Sequence[Hit]:
        """Who holds how much, the longest first. Slots that hold nothing of it are in no hit."""
        chunks = prompt.chunks
        if not chunks:
            return ()
        holders = self._holders
        alive = self._open
        hits: list[Hit] = []
        depth = 0
        some = alive & holders.get(chunks[0], 0)
        if not some:
            return ()
        if some == alive & holders.get(chunks[-1], 0):
            # Who holds the last holds all, and nobody holds less.
            self._add_hits(hits, prompt, some, len(chunks), chunks[-1])
            if len(hits) > 1:
                hits.sort(key=_size_of, reverse=True)
            return hits
        for chunk in chunks:
            still = alive & holders.get(chunk, 0)
            if still != alive:
                if depth:
                    self._add_hits(hits, prompt, alive & ~still, depth, chunks[depth - 1])
                alive = still
                if not alive:
                    break
            depth += 1
        if alive and depth:
            self._add_hits(hits, prompt, alive, depth, chunks[depth - 1])
        if len(hits) > 1:
            hits.sort(key=_size_of, reverse=True)
        return hits

    def _add_hits(self, hits: list[Hit], prompt: Prompt, slots: int, depth: int, last: int) -> None:
        """One hit for those that hold only the chunks, and one for those where a prompt ended right there and was answered."""
        for size in self._ends.get(last, ()):
            if size > prompt.size:
                continue
            tail = _TAIL | prompt.digest(size)
            answered = slots & self._holders.get(tail, 0)
            slots &= ~answered
            while answered:  # each may have answered at another length
                bit = answered & -answered
                answered ^= bit
                held = bytes_of(depth) + self._slot(bit.bit_length() - 1).idle[tail]
                hits.append(Hit(bit, depth, min(prompt.size, held), tail))
            if not slots:
                return
        if slots:
            hits.append(Hit(slots, depth, bytes_of(depth)))

    def begin(self, number: int, chunks: Sequence[int], *, reserved: int = 0) -> None:
        """A request with this prompt runs: the slot computes its chunks where it does not hold them, and keeps them.

        `reserved` bytes of its bound are taken for the answer, which nobody can find yet.
        """
        slot = self._slot(number)
        slot.reserved += reserved
        if self._given_up:
            self._purge()
        if chunks:
            running = slot.runs.get(chunks[-1], 0)
            slot.runs[chunks[-1]] = running + 1
            if running:  # the same beginning runs already: nothing changes but the count
                self._shrink(number, slot)
                return
        used, idle, holders = slot.used, slot.idle, self._holders
        bit = 1 << number
        position = 0
        for chunk in chunks:
            position += 1
            count = used.get(chunk)
            if count:
                used[chunk] = count + 1
                continue
            used[chunk] = 1
            size = idle.pop(chunk, 0)
            if size:
                slot.idle_size -= size
            else:
                size = chunk_size(position - 1)
                holders[chunk] = holders.get(chunk, 0) | bit
            slot.used_size += size
        self._shrink(number, slot)

    def end(self, number: int, chunks: Sequence[int], *, computed: int | None = None, reserved: int = 0) -> None:
        """The counterpart of `begin`, with the same `reserved`: its chunks are kept as long as there is room.

        `computed`: how many of them the slot really holds, where the request failed; None: all.
        """
        slot = self._slot(number)
        slot.reserved -= reserved
        if chunks:
            running = slot.runs.pop(chunks[-1]) - 1
            if running:
                slot.runs[chunks[-1]] = running
                return
        used, idle = slot.used, slot.idle
        for position in range(len(chunks) - 1, -1, -1):
            chunk = chunks[position]
            count = used[chunk]
            if count > 1:
                used[chunk] = count - 1
                continue
            del used[chunk]
            size = chunk_size(position)
            slot.used_size -= size
            if computed is None or position < computed:
                idle[chunk] = size
                slot.idle_size += size
            else:
                self._forget(chunk, 1 << number)
        self._shrink(number, slot)

    def answered(self, number: int, prompt: Prompt, answer_size: int) -> None:
        """A prompt was answered with about `answer_size` bytes: the slot holds both, to the last token."""
        chunks = prompt.chunks
        if not chunks or answer_size < ANSWER_BYTES_MIN:
            return
        slot = self._slot(number)
        sizes = self._ends.get(chunks[-1], ())
        if prompt.size not in sizes:
            self._ends[chunks[-1]] = (prompt.size, *sizes[: ENDS_MAX - 1])
        tail = _TAIL | prompt.digest(prompt.size)
        size = prompt.size - bytes_of(len(chunks)) + answer_size
        slot.idle_size += size - slot.idle.pop(tail, 0)
        slot.idle[tail] = size
        self._holders[tail] = self._holders.get(tail, 0) | 1 << number
        self._shrink(number, slot)

    def in_use(self, number: int, chunks: Sequence[int]) -> int:
        """Bytes of this prompt's beginning that running requests use there."""
        used = self._slot(number).used
        low, high = 0, len(chunks)
        while low < high:  # whoever uses a chunk uses those before it
            middle = (low + high + 1) // 2
            if chunks[middle - 1] in used:
                low = middle
            else:
                high = middle - 1
        return bytes_of(low)

    def drop(self, number: int, tail: int) -> None:
        """Gives up what followed on a prompt's end, or a chunk that no running request uses."""
        slot = self._slot(number)
        size = slot.idle.pop(tail, None)
        if size is not None:
            slot.idle_size -= size
            self._forget(tail, 1 << number)

    def _slot(self, number: int) -> _Slot:
        slot = self._slots[number]
        assert slot is not None, "a slot is used between open and close"
        return slot

    def _shrink(self, number: int, slot: _Slot) -> None:
        room = slot.bound - slot.reserved - slot.used_size
        while slot.idle_size > room and slot.idle:
            key, size = slot.idle.popitem(last=False)
            slot.idle_size -= size
            self._forget(key, 1 << number)

    def _forget(self, key: int, bit: int) -> None:
        left = self._holders[key] & ~bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]
            self._ends.pop(key, None)

    def _purge(self) -> None:
        number, keys = self._given_up[-1]
        for _ in range(PURGED_AT_ONCE):
            if not keys:
                self._given_up.pop()
                return
            self._forget(keys.pop(), 1 << number)


def _size_of(hit: Hit) -> int:
    return hit.size
