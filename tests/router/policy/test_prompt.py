"""Prompts are compared by their beginnings, unparsed."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.prompt import COARSE_BYTES, FINE_BYTES, FINE_UNTIL, BytesPrompt, bytes_of, chunks_in

TEXT = os.urandom(FINE_UNTIL + 5 * COARSE_BYTES)


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


@given(st.integers(0, 10 * FINE_UNTIL))
def test_the_grid_of_chunks_counts_bytes_and_chunks_alike(size: int) -> None:
    """What is held in chunks and what is asked for in bytes are the same thing."""
    chunks = chunks_in(size)
    assert bytes_of(chunks) <= size < bytes_of(chunks + 1)
    assert chunks_in(bytes_of(chunks)) == chunks


@pytest.mark.parametrize("size", [0, 1, FINE_BYTES - 1, FINE_BYTES, FINE_UNTIL - 1, FINE_UNTIL, FINE_UNTIL + COARSE_BYTES])
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
