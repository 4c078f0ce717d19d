"""Prompts of segments behave as prompts of bytes would: as much is shared as is equal, and not a block more."""

from collections.abc import Sequence
from itertools import takewhile
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from router.policy.prompt import bytes_of, chunks_in
from router.sim.prompts import (
    AGENT_BYTES_PER_TOKEN,
    BLOCK_TOKENS,
    CHAT_BYTES_PER_TOKEN,
    Segment,
    SimPrompt,
    answer_blocks,
    history_of,
)

RATES = st.sampled_from([1.0, AGENT_BYTES_PER_TOKEN, CHAT_BYTES_PER_TOKEN])
# Few ids, so that prompts often begin alike; lengths that meet and miss the boundaries of blocks and chunks.
SEGMENTS = st.lists(st.builds(Segment, st.integers(1, 3), st.one_of(st.integers(0, 40), st.integers(60, 400))), max_size=6)


def tokens_of(segments: list[Segment]) -> list[tuple[int, int]]:
    """The prompt written out: each token as (segment, place in it)."""
    return [(segment.id, place) for segment in segments for place in range(segment.tokens)]


def common(first: Sequence[object], second: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


@given(SEGMENTS, SEGMENTS, RATES)
def test_as_many_blocks_and_chunks_are_equal_as_tokens(first: list[Segment], second: list[Segment], rate: float) -> None:
    """A policy that compares hashes sees exactly the prefix that an engine could reuse."""
    one, other = (SimPrompt.empty(rate).extended(*segments) for segments in (first, second))
    shared = common(tokens_of(first), tokens_of(second))
    assert common(one.blocks, other.blocks) == shared // BLOCK_TOKENS
    chunks = 0
    most = min(len(one.chunks), len(other.chunks))
    while chunks < most and bytes_of(chunks + 1) * 10 // round(rate * 10) <= shared:
        chunks += 1
    assert common(one.chunks, other.chunks) == chunks


@given(SEGMENTS, SEGMENTS, RATES, st.integers(0, 3000))
def test_digests_are_equal_exactly_where_the_beginnings_are(
    first: list[Segment], second: list[Segment], rate: float, size: int
) -> None:
    """A policy can ask whether a prompt goes on where another ended."""
    one, other = (SimPrompt.empty(rate).extended(*segments) for segments in (first, second))
    assume(size <= min(one.size, other.size))
    covered = size * 10 // round(rate * 10)
    assert (one.digest(size) == other.digest(size)) is (tokens_of(first)[:covered] == tokens_of(second)[:covered])


@given(SEGMENTS, SEGMENTS, RATES)
def test_a_prompt_that_grows_equals_one_made_at_once(first: list[Segment], second: list[Segment], rate: float) -> None:
    """A conversation built turn by turn is the conversation, whether or not its earlier turns were looked at."""
    grown = SimPrompt.empty(rate)
    for segment in first:
        grown = grown.extended(segment)
        assert len(grown.chunks) == chunks_in(grown.size)
    grown = grown.extended(*second)
    made = SimPrompt.empty(rate).extended(*first, *second)
    assert list(grown.blocks) == list(made.blocks)
    assert list(grown.chunks) == list(made.chunks)
    assert (grown.size, grown.tokens) == (made.size, made.tokens)
    assert grown.digest(grown.size) == made.digest(made.size)


@given(SEGMENTS, RATES)
def test_sizes_fit_the_tokens(segments: list[Segment], rate: float) -> None:
    """Blocks count whole runs of 16 tokens, chunks the boundaries of the router's own grid; no hash comes twice."""
    prompt = SimPrompt.empty(rate).extended(*segments)
    assert prompt.tokens == sum(segment.tokens for segment in segments)
    assert len(prompt.blocks) == prompt.tokens // BLOCK_TOKENS
    assert len(prompt.chunks) == chunks_in(prompt.size)
    assert prompt.tokens * rate <= prompt.size + 1e-6
    assert prompt.size < prompt.tokens * rate + 1
    hashes = [*prompt.blocks, *prompt.chunks]
    assert len(set(hashes)) == len(hashes)
    assert all(0 <= number < 1 << 64 for number in hashes)


@given(SEGMENTS, st.integers(1, 400), st.integers(1, 400))
def test_a_next_turn_finds_the_blocks_that_the_answer_left(segments: list[Segment], answer: int, question: int) -> None:
    """What an engine generated counts as its prompt when the conversation goes on; a dropped reasoning does not."""
    prompt = SimPrompt.empty(CHAT_BYTES_PER_TOKEN).extended(*segments)
    said = Segment(7, answer)
    left = [*prompt.blocks, *answer_blocks(prompt, said)]
    assert len(left) == (prompt.tokens + answer) // BLOCK_TOKENS
    following = prompt.extended(history_of(said), Segment(8, question))
    assert list(following.blocks)[: len(left)] == left
    assert following.digest(prompt.size) == prompt.digest(prompt.size)
    shortened = prompt.extended(history_of(said, kept=0.4), Segment(8, question))
    assert common(left, shortened.blocks) == prompt.tokens // BLOCK_TOKENS
    assert shortened.tokens == prompt.tokens + max(1, int(answer * 0.4)) + question


def test_another_scope_shares_nothing() -> None:
    """KV of another model, version or salt is never credited."""
    one, other = (SimPrompt.empty(3.3, scope).extended(Segment(1, 700)) for scope in (1, 2))
    assert not set(one.blocks) & set(other.blocks)
    assert not set(one.chunks) & set(other.chunks)
    assert one.digest(0) != other.digest(0)


def test_block_hashes_spread_over_any_number_of_buckets() -> None:
    """A policy that takes hashes modulo the number of replicas is not misled by how they are made."""
    rng = Random(1)
    blocks = [block for _ in range(50) for block in SimPrompt.empty(4.2).extended(Segment(rng.getrandbits(64), 1600)).blocks]
    for buckets in (2, 3, 4, 8, 10, 64):
        counts = [0] * buckets
        for block in blocks:
            counts[block % buckets] += 1
        assert max(counts) < 1.5 * len(blocks) / buckets


def test_a_token_without_bytes_is_refused() -> None:
    """It would make prompts of no size."""
    with pytest.raises(ValueError, match=r"bytes_per_token 0\.5"):
        SimPrompt.empty(0.5)
