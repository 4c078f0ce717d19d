"""How far a source of KV events can be trusted, whatever is lost, comes twice or begins anew."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.state.kv_blocks import block_keys
from router.state.kv_source import KvMode, KvSource, Received, Replayed
from router.types import ReplicaId

REPLICA = ReplicaId("127.0.0.1:1")
SIZE = 2


class Mirror:
    """A sink that keeps what it is told, as a policy would."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.clears = 0
        self.forgotten_keys: list[int] = []
        self.modes: list[KvMode] = []

    def stored(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        assert not self.held & set(blocks)
        self.held |= set(blocks)

    def evicted(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        assert self.held >= set(blocks)
        self.held -= set(blocks)

    def cleared(self, replica: ReplicaId, rank: int, now: float) -> None:
        self.clears += 1
        self.held.clear()

    def forgotten(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        assert self.held >= set(blocks)
        self.forgotten_keys += blocks
        self.held -= set(blocks)

    def mode_changed(self, replica: ReplicaId, rank: int, mode: KvMode, reason: str) -> None:
        self.modes.append(mode)


class Engine:
    """A prefix cache that publishes as vLLM does: each copy of a block is told of, the last messages are kept."""

    def __init__(self, start: int, kept: int) -> None:
        self.start = start  # tells the messages of one start from those of another, as vLLM's times do
        self.copies: Counter[tuple[int, ...]] = Counter()
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self.published = 0

    def _publish(self, *events: Mapping[str, object]) -> tuple[int, bytes]:
        message = self.published, msgspec.msgpack.encode([float(self.start), events, 0])
        self.published += 1
        self.kept.append(message)
        return message

    def store(self, tokens: Sequence[int], *, skip: int = 0) -> tuple[int, bytes]:
        """Blocks of a prompt; the first `skip` of them were hits."""
        ends = range(SIZE, len(tokens) + 1, SIZE)
        prompts = [tuple(tokens[:end]) for end in ends]
        self.copies.update(prompts[skip:])
        event = {
            "type": "BlockStored",
            "block_hashes": [repr(prompt).encode() for prompt in prompts[skip:]],
            "parent_block_hash": repr(prompts[skip - 1]).encode() if skip else None,
            "token_ids": tokens[skip * SIZE : len(prompts) * SIZE],
            "block_size": SIZE,
        }
        return self._publish(event)

    def evict(self, prompt: tuple[int, ...]) -> tuple[int, bytes]:
        self.copies -= Counter([prompt])
        return self._publish({"type": "BlockRemoved", "block_hashes": [repr(prompt).encode()], "medium": "GPU"})

    def clear(self) -> tuple[int, bytes]:
        self.copies.clear()
        return self._publish({"type": "AllBlocksCleared"})

    @property
    def keys(self) -> set[int]:
        return {block_keys(prompt, SIZE)[-1] for prompt in self.copies}


def replay(
    source: KvSource, engine: Engine, until: int | None = None, *, drop: Sequence[int] = (), cut: bool = False
) -> Replayed:
    start = source.begin_replay()
    for seq, payload in engine.kept:
        if seq >= start and seq not in drop:
            source.receive_replayed(seq, payload, 0.0, until)
    return source.end_replay(0.0, is_whole=not cut, until=until)


@pytest.fixture
def mirror() -> Mirror:
    return Mirror()


@pytest.fixture
def source(mirror: Mirror) -> KvSource:
    return KvSource(REPLICA, 0, mirror)


KEYS = block_keys([1, 2, 3, 4], SIZE)


def test_a_source_that_is_heard_from_its_first_message_on_is_known_wholly(source: KvSource, mirror: Mirror) -> None:
    """What is not known of it, it does not hold."""
    engine = Engine(1, 10)
    assert (source.mode, source.resident(KEYS)) == (KvMode.JOINING, None)
    assert source.receive(*engine.store([1, 2, 3, 4]), 7.0) is Received.APPLIED
    assert (source.mode, source.resident(KEYS), source.resident([5]), source.heard_at) == (KvMode.LIVE, 2, 0, 7.0)
    source.receive(*engine.evict((1, 2)), 8.0)
    assert (source.resident(KEYS), mirror.held, mirror.modes) == (0, {KEYS[1]}, [KvMode.LIVE])


def test_a_router_that_comes_late_knows_only_what_was_stored_since(source: KvSource) -> None:
    """An engine that it knows nothing of is not one that holds nothing."""
    engine = Engine(1, 10)
    engine.store([9, 9])
    message = engine.store([1, 2])
    assert source.receive(*message, 0.0) is Received.GAP
    assert (source.mode, source.gaps) == (KvMode.JOINING, 0)
    source.skip_to(message[0], 0.0)
    assert source.receive(*message, 0.0) is Received.APPLIED
    assert (source.mode, source.resident(KEYS), source.resident(block_keys([9, 9], SIZE))) == (KvMode.PARTIAL, 1, None)
    source.receive(*engine.store([9, 9, 1, 1], skip=1), 0.0)
    assert (source.unrooted, source.blocks) == (1, 1)
    source.receive(*engine.evict((9, 9)), 0.0)  # it was not known
    assert source.resident(KEYS) == 1


def test_a_router_that_comes_late_learns_all_where_the_engine_still_has_it(source: KvSource) -> None:
    """And only the last of it where it has no more."""
    engine = Engine(1, 10)
    engine.store([1, 2, 3, 4])
    assert replay(source, engine) is Replayed.CLOSED
    assert (source.mode, source.resident(KEYS)) == (KvMode.LIVE, 2)
    few = Engine(1, 1)
    few.store([9, 9])
    few.store([1, 2, 3, 4])
    late = KvSource(REPLICA, 0, Mirror())
    assert replay(late, few) is Replayed.CLOSED
    assert (late.mode, late.resident(KEYS), late.resident([5])) == (KvMode.PARTIAL, 2, None)


def test_an_engine_that_has_published_nothing_yet_holds_nothing(source: KvSource) -> None:
    """A fresh replica is known to be empty, before its first request."""
    assert replay(source, Engine(1, 10)) is Replayed.CLOSED
    assert (source.mode, source.resident(KEYS)) == (KvMode.LIVE, 0)


def test_a_gap_suspends_until_a_replay_closes_it(source: KvSource, mirror: Mirror) -> None:
    """Then nothing is lost."""
    engine = Engine(1, 10)
    source.receive(*engine.store([1, 2]), 0.0)
    engine.store([1, 2, 3, 4], skip=1)
    message = engine.store([5, 6])
    assert source.receive(*message, 0.0) is Received.GAP
    assert (source.mode, source.resident(KEYS), source.gaps) == (KvMode.SUSPENDED, None, 1)
    assert replay(source, engine, until=2) is Replayed.CLOSED
    assert source.receive(*message, 0.0) is Received.APPLIED
    assert (source.mode, source.resident(KEYS), source.losses) == (KvMode.LIVE, 2, 0)
    assert mirror.held == engine.keys
    assert mirror.forgotten_keys == []


def test_a_gap_that_no_replay_closes_leaves_what_comes_after_it(source: KvSource, mirror: Mirror) -> None:
    """What was known before may be gone, so it is forgotten; a cache that is cleared is known wholly again."""
    engine = Engine(1, 10)
    source.receive(*engine.store([1, 2, 3, 4]), 0.0)
    engine.evict((1, 2))
    message = engine.store([5, 6])
    assert source.receive(*message, 0.0) is Received.GAP
    assert replay(source, Engine(1, 10), until=2, cut=True) is Replayed.LOST
    source.skip_to(message[0], 0.0)
    source.receive(*message, 0.0)
    assert (source.mode, source.resident(KEYS), source.losses) == (KvMode.PARTIAL, None, 1)
    assert (mirror.held, sorted(mirror.forgotten_keys), mirror.clears) == (set(block_keys([5, 6], SIZE)), sorted(KEYS), 0)
    source.receive(*engine.clear(), 0.0)
    assert (source.mode, source.resident(KEYS), mirror.clears, mirror.held) == (KvMode.LIVE, 0, 1, set())


def test_a_replay_that_begins_right_after_what_was_heard_proves_nothing(source: KvSource, mirror: Mirror) -> None:
    """The engine no longer has the last message that was heard: it may be another start, so what was known is forgotten."""
    old, new = Engine(1, 10), Engine(2, 2)
    for number in range(2):
        source.receive(*old.store([number, number]), 0.0)
        new.store([5 + number, 5])
    for number in range(2):
        new.store([7 + number, 7])
    assert replay(source, new) is Replayed.CLOSED
    assert (source.mode, source.next_seq) == (KvMode.PARTIAL, 4)
    assert mirror.held == {*block_keys([7, 7], SIZE), *block_keys([8, 7], SIZE)}


def test_a_replay_with_holes_is_asked_for_again(source: KvSource) -> None:
    """A publisher's socket drops what is not taken in time, its end as well."""
    engine = Engine(1, 10)
    for number in range(6):
        engine.store([number, number])
    assert replay(source, engine, drop=[3]) is Replayed.AGAIN
    assert source.next_seq == 3
    assert replay(source, engine, drop=[5], cut=True) is Replayed.AGAIN
    assert replay(source, engine) is Replayed.CLOSED
    assert (source.mode, source.blocks) == (KvMode.LIVE, 6)
    assert replay(source, engine, cut=True) is Replayed.LOST
    assert source.mode is KvMode.LIVE  # that nobody answers says nothing


def test_a_message_that_comes_twice_counts_once(source: KvSource) -> None:
    """After a replay the messages that it brought still wait in the subscriber's queue."""
    engine = Engine(1, 10)
    message = engine.store([1, 2])
    replay(source, engine)
    assert source.receive(*message, 0.0) is Received.DUPLICATE
    source.receive(*engine.evict((1, 2)), 0.0)
    assert (source.mode, source.blocks, source.restarts) == (KvMode.LIVE, 0, 0)


@pytest.mark.parametrize("missed", [0, 1])
def test_an_engine_that_begins_anew_is_forgotten(source: KvSource, mirror: Mirror, missed: int) -> None:
    """Its cache went with it, whether or not the first message of the new start was heard."""
    old, new = Engine(1, 10), Engine(2, 10)
    for number in range(5):
        source.receive(*old.store([number, number]), 0.0)
    for number in range(missed):
        new.store([number, number])
    message = new.store([1, 2])
    if source.receive(*message, 0.0) is Received.GAP:
        assert replay(source, new, until=message[0]) is Replayed.CLOSED
        source.receive(*message, 0.0)
    assert (source.mode, source.restarts, mirror.clears) == (KvMode.LIVE, 1, 1)
    assert mirror.held == new.keys


@pytest.mark.parametrize("published", [0, 2, 3, 5])
def test_after_the_connection_broke_it_is_found_out_whether_the_engine_is_the_same(source: KvSource, published: int) -> None:
    """By the last message that was heard; a new start is not taken for the old one, however many messages it has published."""
    old = Engine(1, 10)
    for number in range(3):
        source.receive(*old.store([number, number]), 0.0)
    source.disconnected()
    assert (source.mode, source.resident(KEYS)) == (KvMode.SUSPENDED, None)
    assert replay(source, old) is Replayed.CLOSED
    assert (source.mode, source.blocks, source.restarts) == (KvMode.LIVE, 3, 0)
    source.disconnected()
    new = Engine(2, 10)
    for number in range(published):
        new.store([7 + number, 7])
    assert replay(source, new) is Replayed.AGAIN
    assert source.restarts == 1
    assert replay(source, new) is Replayed.CLOSED
    assert (source.mode, source.blocks) == (KvMode.LIVE, published)


def test_without_a_replay_a_broken_connection_costs_what_was_known(source: KvSource) -> None:
    """The message that is due may be another engine's."""
    engine = Engine(1, 10)
    source.receive(*engine.store([1, 2]), 0.0)
    source.disconnected()
    message = engine.store([5, 6])
    assert source.receive(*message, 0.0) is Received.GAP
    source.skip_to(message[0], 0.0)
    source.receive(*message, 0.0)
    assert (source.mode, source.blocks, source.resident(KEYS)) == (KvMode.PARTIAL, 1, None)


def test_a_message_without_a_number_suspends_until_the_next(source: KvSource) -> None:
    """If that is the one that was due, nothing was missed."""
    engine = Engine(1, 10)
    source.receive(*engine.store([1, 2]), 0.0)
    source.receive_garbage()
    assert (source.mode, source.resident(KEYS), source.malformed) == (KvMode.SUSPENDED, None, 1)
    source.receive(*engine.store([5, 6]), 0.0)
    assert (source.mode, source.resident(KEYS)) == (KvMode.LIVE, 1)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        msgspec.msgpack.encode([1.0, [{"type": "SomethingNew"}]]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved"}]]),
        msgspec.msgpack.encode(
            [
                1.0,
                [
                    {
                        "type": "BlockStored",
                        "block_hashes": [1],
                        "parent_block_hash": None,
                        "token_ids": [2**64 - 1],
                        "block_size": 1,
                    }
                ],
            ]
        ),
    ],
    ids=["empty", "no msgpack", "unknown event", "field missing", "token too large"],
)
def test_a_message_that_cannot_be_read_is_one_that_was_missed(source: KvSource, payload: bytes) -> None:
    """What it said may contradict what was known."""
    source.receive(*Engine(1, 10).store([1, 2]), 0.0)
    source.receive(1, payload, 0.0)
    assert (source.mode, source.malformed, source.losses, source.next_seq) == (KvMode.PARTIAL, 1, 1, 2)
    assert source.resident(KEYS) is None


def test_more_blocks_than_the_engine_has_are_not_believed() -> None:
    """Memory is bounded by the engine's own capacity, and then nothing is exact any more."""
    mirror = Mirror()
    source, engine = KvSource(REPLICA, 0, mirror, capacity_blocks=4), Engine(1, 10)
    for number in range(6):
        source.receive(*engine.store([number, number]), 0.0)
    assert (source.mode, source.blocks, len(mirror.held), len(mirror.forgotten_keys)) == (KvMode.PARTIAL, 4, 4, 2)
    source.receive(*engine.clear(), 0.0)
    assert source.mode is KvMode.LIVE


PROMPTS = st.lists(st.integers(0, 2), min_size=SIZE, max_size=4 * SIZE)


class SourceMachine(RuleBasedStateMachine):
    """An engine that stores, evicts, clears and restarts, before a network that loses messages and replays."""

    @initialize(kept=st.integers(1, 8))
    def begin(self, kept: int) -> None:
        self.kept = kept
        self.engine = Engine(0, kept)
        self.mirror = Mirror()
        self.source = KvSource(REPLICA, 0, self.mirror)
        self.losing = self.deaf = False

    def deliver(self, message: tuple[int, bytes]) -> None:
        """As router/edge/kv_events.py does."""
        if self.losing:
            return
        if self.source.receive(*message, 0.0) is Received.GAP:
            self.repair(message[0])
            if self.source.next_seq != message[0] or self.source.receive(*message, 0.0) is Received.GAP:
                self.source.skip_to(message[0], 0.0)
                assert self.source.receive(*message, 0.0) is Received.APPLIED

    def repair(self, until: int | None) -> None:
        for _ in range(3):
            if self.deaf or replay(self.source, self.engine, until) is not Replayed.AGAIN:
                return

    @rule(prompt=PROMPTS)
    def a_prompt_is_computed(self, prompt: list[int]) -> None:
        ends = [tuple(prompt[:end]) for end in range(SIZE, len(prompt) + 1, SIZE)]
        hits = next((number for number, one in enumerate(ends) if one not in self.engine.copies), len(ends) - 1)
        self.deliver(self.engine.store(prompt, skip=hits))

    @rule(prompt=PROMPTS)
    def a_prompt_is_computed_side_by_side(self, prompt: list[int]) -> None:
        self.deliver(self.engine.store(prompt))

    @precondition(lambda self: self.engine.copies)
    @rule(data=st.data())
    def a_block_is_evicted(self, data: st.DataObject) -> None:
        self.deliver(self.engine.evict(data.draw(st.sampled_from(sorted(self.engine.copies)))))

    @rule()
    def the_cache_is_cleared(self) -> None:
        self.deliver(self.engine.clear())

    @rule(losing=st.booleans(), deaf=st.booleans())
    def the_network_changes(self, losing: bool, deaf: bool) -> None:
        self.losing, self.deaf = losing, deaf

    @rule()
    def the_engine_restarts(self) -> None:
        self.engine = Engine(self.engine.start + 1, self.kept)
        self.source.disconnected()
        self.losing = False
        self.repair(None)

    @rule()
    def it_is_quiet_for_a_while(self) -> None:
        self.repair(None)

    @invariant()
    def nothing_is_credited_that_is_gone(self) -> None:
        """Whenever all that was published has been heard; and a live source is known wholly."""
        source, truth = self.source, self.engine.keys
        assert len(self.mirror.held) == source.blocks
        assert source.resident(sorted(self.mirror.held)) in (None, source.blocks)
        if source.next_seq != self.engine.published or source.mode not in (KvMode.LIVE, KvMode.PARTIAL):
            return
        assert self.mirror.held <= truth
        if source.mode is KvMode.LIVE:
            assert self.mirror.held == truth


TestAnyOrder = SourceMachine.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
