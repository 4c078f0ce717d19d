"""KV events correct what placement believes of a cache, and are never taken for more than they tell."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.policy.exact_cache import STRIDE, ChunkLinks, ExactCaches
from router.policy.interface import Coverage, PlacementRequest
from router.policy.predicted import Predicted
from router.policy.prompt import bytes_of
from router.types import ReplicaId
from tests.router.policy.prompts import prompt, text
from tests.router.policy.test_predicted import fleet, place, serve

A, B = ReplicaId("a:1"), ReplicaId("b:1")
BYTES_PER_BLOCK = 64  # 16 tokens of 4 bytes


def ask(name: str, chunks: int, *, blocks_known: bool = True) -> PlacementRequest:
    """A prompt of `chunks` times 256 bytes, which is four blocks each."""
    blocks = blocks_of(name, chunks * 4) if blocks_known else ()
    return PlacementRequest("m", prompt(text(name, chunks)), blocks=blocks)


def blocks_of(name: str, count: int) -> list[int]:
    return [hash((name, number)) for number in range(count)]


def cached(policy: Predicted, request: PlacementRequest) -> dict[ReplicaId, float]:
    """Bytes that each replica is taken to hold of the prompt."""
    return {terms.replica: terms.cached_tokens * 4 for terms in policy.explain(request, [A, B])}


def served(policy: Predicted, request: PlacementRequest, replica: ReplicaId = A) -> None:
    """The request ran there and has ended; its blocks were told of, if they are known."""
    ticket = place(policy, request, [replica], 0.0)
    policy.stored(replica, 0, request.blocks, 0.0)
    serve(policy, ticket, 0.0, completion=0)


def near(size: float) -> object:
    return pytest.approx(size, abs=2 * BYTES_PER_BLOCK)


def test_what_an_engine_evicts_is_not_counted_on() -> None:
    """The index still believes in the prompt; the engine has said that only its beginning is left."""
    policy = fleet(A, B)
    request = ask("a", 12)
    served(policy, request)
    assert cached(policy, request)[A] == near(12 * 256)
    policy.evicted(A, 0, request.blocks[16:], 1.0)
    assert cached(policy, request) == {A: near(4 * 256), B: 0}


def test_what_others_have_sent_to_an_engine_counts() -> None:
    """Blocks of another router's requests, or from before this one was started."""
    policy = fleet(A, B)
    request = ask("a", 12)
    policy.stored(B, 0, request.blocks, 0.0)
    assert cached(policy, request) == {A: 0, B: near(12 * 256)}


def test_a_prompt_that_is_being_computed_counts_before_its_events_come() -> None:
    """Siblings that arrive together share one computation though nothing was stored yet."""
    policy = fleet(A, B)
    shared = ask("system", 8)
    policy.stored(A, 0, shared.blocks, 0.0)
    long = PlacementRequest("m", prompt(text("system", 8), text("a", 8)), blocks=[*shared.blocks, *blocks_of("a", 32)])
    ticket = place(policy, long, [A], 0.0)
    assert cached(policy, long)[A] == near(16 * 256)
    policy.ended(ticket, None, 1.0)
    assert cached(policy, long)[A] == near(8 * 256), "it failed before anything was computed"


def test_what_queued_prompts_drive_out_is_not_counted_on() -> None:
    """An engine still holds it, but the index has given it up for prompts that come before this one."""
    policy = fleet(A, kv_capacity_tokens=1024)
    request = ask("a", 12)
    served(policy, request)
    ticket = place(policy, ask("b", 16, blocks_known=False), [A], 1.0)
    assert {terms.cached_tokens for terms in policy.explain(request, [A])} == {0.0}
    policy.ended(ticket, None, 2.0)
    [terms] = policy.explain(request, [A])
    assert terms.cached_tokens * 4 == near(12 * 256), "the other prompt was not computed after all"


@pytest.mark.parametrize("coverage", [Coverage.UNSURE, Coverage.SOME])
def test_a_source_that_is_silent_or_suspended_does_not_count_as_empty(coverage: Coverage) -> None:
    """Nothing is concluded from what is not told; what is told of a part counts as far as it goes."""
    policy = fleet(A, B)
    policy.trusted(A, 0, coverage)
    request = ask("a", 12)
    place_and_end = place(policy, request, [A], 0.0)
    serve(policy, place_and_end, 0.0, completion=0)
    policy.stored(B, 0, request.blocks[:8], 1.0)
    assert cached(policy, request)[A] == near(12 * 256)
    other = ask("b", 12)
    policy.stored(A, 0, other.blocks, 1.0)
    assert cached(policy, other)[A] == (near(12 * 256) if coverage is Coverage.SOME else 0)


def test_what_may_be_gone_is_neither_counted_on_nor_dropped() -> None:
    """After a loss of events the index is what is left to go by."""
    policy = fleet(A, B)
    policy.trusted(A, 0, Coverage.ALL)
    mine, others = ask("a", 12), ask("b", 12)
    served(policy, mine)
    policy.stored(A, 0, others.blocks, 1.0)
    assert cached(policy, others)[A] == near(12 * 256)
    policy.trusted(A, 0, Coverage.UNSURE)
    policy.forgotten(A, 0, [*mine.blocks, *others.blocks], 2.0)
    policy.trusted(A, 0, Coverage.SOME)
    assert cached(policy, others)[A] == 0
    assert cached(policy, mine)[A] == near(12 * 256)


def test_prompts_whose_blocks_nobody_names_are_left_to_the_index() -> None:
    """Engines count adapters and images into their blocks; such a prompt must not look as if it was cached nowhere."""
    policy = fleet(A, B)
    policy.stored(A, 0, blocks_of("something", 8), 0.0)
    ticket = place(policy, ask("a", 12), [A], 0.0)
    serve(policy, ticket, 0.0, completion=0)
    assert cached(policy, ask("a", 12))[A] == near(12 * 256)


def test_an_evicted_block_takes_its_chunks_out_of_the_index() -> None:
    """So later prompts profit whose own blocks are not known, such as the next turn of a conversation."""
    policy = fleet(A, B)
    served(policy, ask("a", 12))
    unknown = ask("a", 12, blocks_known=False)
    policy.evicted(A, 0, blocks_of("a", 48)[24:], 1.0)
    assert cached(policy, unknown)[A] == near(6 * 256)


def test_a_beginning_whose_blocks_are_known_counts_wherever_it_is_held() -> None:
    """The system prompt of an earlier conversation, which another router has sent to B; this one is new."""
    policy = fleet(A, B)
    served(policy, ask("system", 12))
    policy.stored(B, 0, blocks_of("system", 48), 1.0)
    unknown = PlacementRequest("m", prompt(text("system", 12), text("question", 4)))
    assert cached(policy, unknown) == {A: near(12 * 256), B: near(12 * 256)}


def test_what_follows_on_the_known_blocks_is_left_to_the_index() -> None:
    """An engine that holds all that is known of a prompt may hold the rest of it, too."""
    policy = fleet(A, B)
    served(policy, ask("system", 8))
    long = PlacementRequest("m", prompt(text("system", 8), text("question", 8)))
    serve(policy, place(policy, long, [A], 1.0), 1.0, completion=0)
    assert cached(policy, long)[A] == near(16 * 256)


def test_chunks_of_running_requests_are_not_dropped() -> None:
    """A block that was evicted while a request waits for its turn is computed anew by that request."""
    policy = fleet(A, B)
    served(policy, ask("a", 12))
    ticket = place(policy, ask("a", 12), [A], 1.0)
    policy.evicted(A, 0, blocks_of("a", 48), 1.0)
    unknown = ask("a", 12, blocks_known=False)
    assert cached(policy, unknown)[A] == near(12 * 256)
    serve(policy, ticket, 1.0, completion=0)
    assert cached(policy, unknown)[A] == near(12 * 256)


@pytest.mark.parametrize("lose", ["cleared", "restarted"])
def test_a_cache_that_was_lost_holds_nothing(lose: str) -> None:
    """By its own word, or since its process is another one."""
    policy = fleet(A, B)
    request = ask("a", 12)
    served(policy, request)
    if lose == "cleared":
        policy.cleared(A, 0, 1.0)
    else:
        policy.restarted(A)
    assert cached(policy, request)[A] == 0
    assert cached(policy, ask("a", 12, blocks_known=False))[A] == 0


def test_a_restart_that_is_noticed_late_does_not_undo_what_events_have_told() -> None:
    """Whoever follows the events tells of a lost cache himself, and blocks stored since then must not be missed."""
    policy = fleet(A, B)
    policy.trusted(A, 0, Coverage.ALL)
    policy.cleared(A, 0, 0.0)
    request = ask("a", 12)
    policy.stored(A, 0, request.blocks, 0.5)
    policy.restarted(A)
    assert cached(policy, request)[A] == near(12 * 256)


def test_events_of_a_replica_that_is_gone_are_taken_without_harm() -> None:
    """The last events of a replica may come after its removal."""
    policy = fleet(A, B)
    policy.stored(A, 0, blocks_of("a", 8), 0.0)
    policy.stored(B, 0, blocks_of("b", 8), 0.0)
    ticket = place(policy, ask("a", 2), [A], 0.0)
    policy.removed(A)
    policy.ended(ticket, None, 1.0)
    policy.stored(A, 0, blocks_of("a", 8), 1.0)
    policy.evicted(A, 0, blocks_of("a", 4), 1.0)
    policy.cleared(A, 0, 1.0)
    assert [terms.cached_tokens for terms in policy.explain(ask("a", 2), [B])] == [0.0]


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 5 * STRIDE), min_size=1, max_size=5),
    asked=st.integers(1, 5 * STRIDE),
)
def test_each_rank_is_credited_with_exactly_what_it_holds(lengths: Sequence[int], asked: int) -> None:
    """Skipping over blocks finds the same as looking at each."""
    caches = ExactCaches()
    blocks = blocks_of("a", 5 * STRIDE)
    for rank, length in enumerate(lengths):
        caches.stored((A, rank), blocks[:length])
    assert caches.leading(blocks[:asked]) == {(A, rank): min(length, asked) for rank, length in enumerate(lengths) if length}


def test_links_are_bounded_and_the_oldest_go_first() -> None:
    """A router that runs for months keeps no more of them than it did after the first day."""
    links = ChunkLinks(links_max=30)
    for number in range(20):
        links.learn(prompt(text(f"p{number}", 16)), blocks_of(f"p{number}", 64))
        assert len(links) <= 30
    assert not any(links.behind(block) for block in blocks_of("p0", 64))
    assert any(links.behind(block) for block in blocks_of("p19", 64))


@settings(max_examples=100, deadline=None)
@given(chunks=st.integers(1, 80), blocks=st.integers(1, 400))
def test_a_chunk_lies_before_the_end_of_its_block(chunks: int, blocks: int) -> None:
    """Tokens are taken to be spread evenly, so a chunk's block ends within a block of the chunk's own end."""
    links = ChunkLinks()
    asked = prompt(text("a", chunks))
    keys = blocks_of("a", blocks)
    links.learn(asked, keys)
    per_block = asked.size / (blocks + 0.5)
    for position, chunk in enumerate(asked.chunks, 1):
        if chunk in links.chunks:
            number = keys.index(links.chunks[chunk]) + 1
            assert abs(number * per_block - bytes_of(position)) <= per_block + 1


class Caches(RuleBasedStateMachine):
    """Against plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.caches = ExactCaches()
        self.held: dict[int, set[int]] = {rank: set() for rank in range(3)}

    @rule(rank=st.integers(0, 2), blocks=st.lists(st.integers(0, 20), max_size=8))
    def stored(self, rank: int, blocks: list[int]) -> None:
        self.caches.stored((A, rank), blocks)
        self.held[rank] |= set(blocks)

    @rule(rank=st.integers(0, 2), blocks=st.lists(st.integers(0, 20), max_size=8))
    def evicted(self, rank: int, blocks: list[int]) -> None:
        self.caches.evicted((A, rank), blocks)
        self.held[rank] -= set(blocks)

    @rule(rank=st.integers(0, 2))
    def cleared(self, rank: int) -> None:
        self.caches.cleared((A, rank))
        self.held[rank].clear()

    @rule()
    def restarted(self) -> None:
        self.caches.restarted(A)
        self.held = {rank: set() for rank in range(3)}

    @invariant()
    def agrees(self) -> None:
        for rank, held in self.held.items():
            assert self.caches.blocks((A, rank)) == len(held)
        for block in range(21):
            assert set(self.caches.leading([block])) == {(A, rank) for rank, held in self.held.items() if block in held}


TestCaches = Caches.TestCase
TestCaches.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
