"""What a router believes its replicas' caches hold."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.policy.prefix_index import Hit, PrefixIndex
from router.policy.prompt import FINE_BYTES, bytes_of, chunk_size
from tests.router.policy.prompts import prompt
from tests.router.policy.prompts import text as text_of

ROOM = 1000 * FINE_BYTES


def text(name: str, steps: float) -> bytes:
    """So many steps of the fine grid, which has its first boundary at the second of them and becomes coarser at the 16th."""
    return text_of(name, steps, unit=FINE_BYTES)


def held(index: PrefixIndex, slot: int, *parts: bytes) -> int:
    """Bytes that a slot holds of a prompt."""
    return next((hit.size for hit in index.lookup(prompt(*parts)) if hit.slots >> slot & 1), 0)


def serve(index: PrefixIndex, slot: int, *parts: bytes, answer: int | None = None) -> None:
    """A request begins and ends."""
    asked = prompt(*parts)
    index.begin(slot, asked.chunks)
    index.end(slot, asked.chunks)
    if answer is not None:
        index.answered(slot, asked, answer)


def test_each_slot_is_credited_with_what_it_holds_of_a_prompt() -> None:
    """Of two replicas the one that has seen more of a conversation is known to."""
    index = PrefixIndex()
    a, b, c = index.open(ROOM), index.open(ROOM), index.open(ROOM)
    serve(index, a, text("system", 4), text("one", 8))
    index.begin(b, prompt(text("system", 4), text("two", 3)).chunks)  # what runs counts at once
    hits = index.lookup(prompt(text("system", 4), text("one", 8), text("more", 2)))
    assert hits == [Hit(1 << a, 11, 12 * FINE_BYTES), Hit(1 << b, 3, 4 * FINE_BYTES)]
    assert held(index, c, text("system", 4)) == 0


def test_a_conversation_is_credited_with_its_answer_too() -> None:
    """The next turn goes back to the replica that generated the last answer, whose tokens it has cached as well."""
    index = PrefixIndex()
    a, b = index.open(ROOM), index.open(ROOM)
    serve(index, a, text("chat", 3.4), answer=2500)
    serve(index, b, text("chat", 3.4))
    following = (text("chat", 3.4), b"answer" * 500, b"question")
    assert held(index, a, *following) == int(3.4 * FINE_BYTES) + 2500
    assert held(index, b, *following) == 3 * FINE_BYTES
    assert held(index, a, text("chat", 3.4), b"short") == int(3.4 * FINE_BYTES) + 5, "never more than the prompt has"
    assert held(index, a, text("chat", 3.3), b"another question" * 50) == 3 * FINE_BYTES, "this is no continuation of it"


def test_an_answer_that_became_part_of_a_prompt_is_counted_once() -> None:
    """A long conversation does not take twice the room that it takes in the engine."""
    index = PrefixIndex()
    slot = index.open(ROOM)
    serve(index, slot, text("chat", 3.4), answer=2500)
    following = prompt(text("chat", 3.4), b"answer" * 500)
    (hit,) = index.lookup(following)
    index.drop(slot, hit.tail)
    index.begin(slot, following.chunks)
    assert index.sizes(slot)[1] == bytes_of(len(following.chunks))


def test_the_oldest_is_forgotten_first_and_of_a_prompt_its_end() -> None:
    """What is believed to be cached never exceeds what fits, and goes in the order in which the engine lets it go."""
    index = PrefixIndex()
    slot = index.open(10 * FINE_BYTES)
    for name in ("old", "new"):
        serve(index, slot, text("system", 2), text(name, 5))
    assert held(index, slot, text("system", 2), text("new", 5)) == 7 * FINE_BYTES
    assert held(index, slot, text("system", 2), text("old", 5)) == 5 * FINE_BYTES, "two of its chunks had to go, the last ones"


def test_what_runs_is_not_forgotten_for_what_has_ended() -> None:
    """A long answer's prompt stays cached while it is written, however many short ones come and go."""
    index = PrefixIndex()
    slot = index.open(10 * FINE_BYTES)
    index.begin(slot, prompt(text("long", 6)).chunks)
    for number in range(20):
        serve(index, slot, text(f"short {number}", 4))
    assert held(index, slot, text("long", 6)) == 6 * FINE_BYTES
    assert held(index, slot, text("short 19", 4)) == 4 * FINE_BYTES


def test_a_prompt_that_several_use_is_kept_until_the_last_of_them_ends() -> None:
    """Siblings of a group share one copy, and it is counted once."""
    index = PrefixIndex()
    slot = index.open(5 * FINE_BYTES)
    chunks = prompt(text("group", 5)).chunks
    for _ in range(3):
        index.begin(slot, chunks)
    assert index.sizes(slot) == (5 * FINE_BYTES, 5 * FINE_BYTES)
    for left in (2, 1):
        index.end(slot, chunks)
        assert index.sizes(slot)[0] == 5 * FINE_BYTES, left
    index.end(slot, chunks)
    assert index.sizes(slot) == (0, 5 * FINE_BYTES)


def test_a_closed_slot_is_forgotten_at_once_and_its_number_is_not_mistaken_for_it() -> None:
    """After a checkpoint swap nothing of the former weights' cache is credited."""
    index = PrefixIndex()
    old = index.open(ROOM)
    serve(index, old, text("x", 150))
    index.begin(old, prompt(text("x", 300)).chunks)  # runs into the swap
    index.close(old)
    assert not index.lookup(prompt(text("x", 300)))
    fresh = index.open(ROOM)
    assert held(index, fresh, text("x", 300)) == 0
    for turn in range(20):  # the old entries are cleared away meanwhile
        serve(index, fresh, text(f"y{turn}", 3))
    again = index.open(ROOM)
    assert held(index, again, text("x", 300)) == 0
    assert held(index, fresh, text("x", 300)) == 0


def test_what_was_never_computed_is_not_believed_to_be_there() -> None:
    """A request that failed before its prompt was computed leaves no belief behind, and takes none away."""
    index = PrefixIndex()
    slot = index.open(ROOM)
    serve(index, slot, text("p", 4))
    chunks = prompt(text("p", 10)).chunks
    index.begin(slot, chunks)
    index.end(slot, chunks, computed=3)
    assert held(index, slot, text("p", 10)) == 4 * FINE_BYTES


def test_room_that_answers_take_is_not_used_for_what_has_ended() -> None:
    """Tokens that are being generated drive out cached prefixes, as they do in the engine."""
    index = PrefixIndex()
    slot = index.open(10 * FINE_BYTES)
    serve(index, slot, text("p", 8))
    index.begin(slot, (), reserved=6 * FINE_BYTES)
    assert held(index, slot, text("p", 8)) == 4 * FINE_BYTES
    index.end(slot, (), reserved=6 * FINE_BYTES)
    serve(index, slot, text("p", 8))
    assert held(index, slot, text("p", 8)) == 8 * FINE_BYTES


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0.1, 30)), max_size=40), st.integers(1, 60))
def test_a_smaller_bound_is_kept_at_once(prompts: list[tuple[int, float]], bound: int) -> None:
    """A replica whose cache turns out smaller is believed to hold less from then on."""
    index = PrefixIndex()
    slot = index.open(ROOM)
    for name, chunks in prompts:
        serve(index, slot, text(str(name), chunks), answer=3000)
    index.set_bound(slot, bound * FINE_BYTES)
    assert index.sizes(slot)[1] <= bound * FINE_BYTES


class Caches(RuleBasedStateMachine):
    """Any order of use, failure, loss and churn: never above a bound, never a credit for what a slot was not given."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.bounds: dict[int, int] = {}
        self.given: dict[int, list[bytes]] = {}
        self.running: list[tuple[int, bytes]] = []

    @rule(bound=st.integers(0, 40))
    def open(self, bound: int) -> None:
        slot = self.index.open(bound * FINE_BYTES)
        assert slot not in self.bounds
        self.bounds[slot], self.given[slot] = bound * FINE_BYTES, []

    @precondition(lambda self: self.bounds)
    @rule(data=st.data(), name=st.sampled_from("abc"), chunks=st.floats(0.1, 20), tail=st.sampled_from("xyz"))
    def begin(self, data: st.DataObject, name: str, chunks: float, tail: str) -> None:
        slot = data.draw(st.sampled_from(sorted(self.bounds)))
        whole = text(name, chunks) + text(tail, 3.5)
        self.index.begin(slot, prompt(whole).chunks)
        self.given[slot].append(whole)
        self.running.append((slot, whole))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), computed=st.sampled_from([None, 0, 3]), answer=st.sampled_from([None, 0, 5000]))
    def end(self, data: st.DataObject, computed: int | None, answer: int | None) -> None:
        slot, whole = data.draw(st.sampled_from(self.running))
        self.running.remove((slot, whole))
        self.index.end(slot, prompt(whole).chunks, computed=computed)
        if answer is not None and computed is None:
            self.index.answered(slot, prompt(whole), answer)

    @precondition(lambda self: self.bounds)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.bounds)))
        self.index.close(slot)
        del self.bounds[slot], self.given[slot]
        self.running = [(number, whole) for number, whole in self.running if number != slot]

    @rule(name=st.sampled_from("abc"), chunks=st.floats(0.1, 25), tail=st.sampled_from("xyz"), takes_tail=st.booleans())
    def look(self, name: str, chunks: float, tail: str, takes_tail: bool) -> None:
        asked = text(name, chunks) + text(tail, 5)
        hits = self.index.lookup(prompt(asked))
        seen = 0
        for hit in hits:
            assert hit.slots, "a hit of nobody"
            assert not hit.slots & seen, "a slot in two hits"
            seen |= hit.slots
            assert bytes_of(hit.chunks) <= hit.size <= len(asked)
            for slot in range(hit.slots.bit_length()):
                if hit.slots >> slot & 1:
                    begin = asked[: bytes_of(hit.chunks)]
                    assert any(whole.startswith(begin) for whole in self.given[slot])
                    if hit.tail and takes_tail:
                        self.index.drop(slot, hit.tail)
        assert [hit.size for hit in hits] == sorted((hit.size for hit in hits), reverse=True)

    @invariant()
    def bounds_hold(self) -> None:
        for slot, bound in self.bounds.items():
            prompts = [prompt(whole).chunks for number, whole in self.running if number == slot]
            used = {chunk: chunk_size(position) for chunks in prompts for position, chunk in enumerate(chunks)}
            in_use, held = self.index.sizes(slot)
            assert in_use == sum(used.values())
            assert held <= max(bound, in_use)


TestCaches = Caches.TestCase
TestCaches.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("slots", [3, 100])
def test_many_slots_cost_no_more_memory_than_their_bounds(slots: int) -> None:
    """A long-running router forgets what no replica holds any more."""
    index, rng = PrefixIndex(), random.Random(1)
    opened = [index.open(20 * FINE_BYTES) for _ in range(slots)]
    for turn in range(3000):
        serve(index, rng.choice(opened), text(f"{turn}", 4), answer=3000)
    assert index.entries <= slots * 30
    for slot in opened:
        index.close(slot)
    last = index.open(20 * FINE_BYTES)
    for turn in range(slots * 30):
        serve(index, last, text(f"z{turn % 3}", 1))
    assert index.entries <= 20
