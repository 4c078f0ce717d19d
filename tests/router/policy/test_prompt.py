"""Prompts are compared by their beginnings, unparsed."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.prompt import BytesPrompt, Chains, bytes_of, chunk_size, chunks_in

TEXT = os.urandom(40_000)


@given(st.integers(0, len(TEXT)), st.integers(0, len(TEXT)), st.binary(min_size=1, max_size=2000))
def test_two_prompts_share_exactly_the_chunks_that_lie_in_their_common_beginning(size: int, common: int, rest: bytes) -> None:
    """A request is taken for cached as far as it is equal to an earlier one, and no further."""
    common = min(common, size)
    first, second = TEXT[:size], TEXT[:common] + rest
    pairs = zip(first, second, strict=False)
    shared = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
    a, b = BytesPrompt(first, 0), BytesPrompt(second, 0)
    equal = 0
    for left, right in zip(a.chunks, b.chunks, strict=False):
        if left != right:
            break
        equal += 1
    assert equal == chunks_in(shared)


@given(st.integers(0, 2_000_000))
def test_the_grid_of_chunks_counts_bytes_and_chunks_alike(size: int) -> None:
    """What is held in chunks and what is asked for in bytes are the same thing."""
    chunks = chunks_in(size)
    assert bytes_of(chunks) <= size < bytes_of(chunks + 1)
    assert chunks_in(bytes_of(chunks)) == chunks
    assert chunk_size(chunks) == bytes_of(chunks + 1) - bytes_of(chunks)


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1535, 1536, 8191, 8192, 9215, 9216, 16_384, 18_432, 40_000])
def test_a_prompt_has_a_hash_at_each_boundary_it_reaches(size: int) -> None:
    """Also a prompt that ends on a boundary is known to its end."""
    assert len(BytesPrompt(TEXT[:size], 0).chunks) == chunks_in(size)


def test_another_scope_shares_nothing() -> None:
    """The cache of one model or tenant is never counted for another's equal text."""
    one, other = BytesPrompt(TEXT, 1), BytesPrompt(TEXT, 2)
    assert not set(one.chunks) & set(other.chunks)
    assert one.digest(100) != other.digest(100)


@given(st.integers(0, len(TEXT)))
def test_a_prompt_that_goes_on_is_known_by_the_digest_of_its_beginning(size: int) -> None:
    """The next turn of a conversation is recognised wherever the last one ended."""
    assert BytesPrompt(TEXT, 7).digest(size) == BytesPrompt(TEXT[:size], 7).digest(size)


@given(
    st.lists(st.tuples(st.integers(0, len(TEXT)), st.integers(0, 3000), st.sampled_from("ab"), st.integers(0, 1)), max_size=12)
)
def test_what_is_remembered_of_earlier_prompts_changes_no_hash(prompts: list[tuple[int, int, str, int]]) -> None:
    """Each turn of a conversation, and each branch of it, has the hashes that it has in a router that never saw it."""
    chains = Chains(kept=2)
    for size, more, letter, scope in prompts:
        body = b"{" + TEXT[:size] + letter.encode() * more + b"}"
        known = BytesPrompt(body, scope, begin=1, size=size + more, chains=chains)
        assert list(known.chunks) == list(BytesPrompt(body, scope, begin=1, size=size + more).chunks)
        assert len(chains) <= 2
