"""Prompts of which only hashes are known share what their texts shared."""

from hypothesis import given
from hypothesis import strategies as st

from router.policy.prompt import BytesPrompt, bytes_of, chunks_in
from router.sim.logged_prompts import LoggedPrompt
from tests.router.policy.prompts import text


def logged(content: bytes) -> LoggedPrompt:
    prompt = BytesPrompt(content, 0)
    return LoggedPrompt(list(prompt.chunks), prompt.size, prompt.digest(prompt.size))


def shared(one: LoggedPrompt, other: LoggedPrompt) -> int:
    """Blocks at the beginning that are equal, at 4 bytes a token."""
    pairs = zip(one.blocks(one.size // 4, 4.0), other.blocks(other.size // 4, 4.0), strict=False)
    return next((number for number, (left, right) in enumerate(pairs) if left != right), min(one.size, other.size) // 64)


@given(st.integers(0, 120), st.integers(0, 40), st.integers(0, 40))
def test_blocks_are_shared_up_to_the_last_chunk_that_is(common: int, one: int, other: int) -> None:
    """Never more than the texts share, and nothing less than the grid shows."""
    beginning = text("common", common)
    left, right = logged(beginning + text("left", one + 0.5)), logged(beginning + text("right", other + 0.5))
    seen = bytes_of(chunks_in(len(beginning)))
    assert seen // 64 <= shared(left, right) <= len(beginning) // 64
    assert left.digest(left.size) != right.digest(right.size)


def test_equal_prompts_are_equal_to_the_last_token() -> None:
    """Siblings of a group share all of their prompt, also what lies behind the last chunk."""
    one, other = logged(text("same", 3.7)), logged(text("same", 3.7))
    assert one.blocks(230, 4.0) == other.blocks(230, 4.0)
    assert len(set(one.blocks(230, 4.0))) == 230 // 16
    assert one.digest(one.size) == other.digest(other.size)


def test_a_prompt_shorter_than_a_chunk_is_like_no_other() -> None:
    """Nothing is known of it but its size."""
    one, other = logged(text("one", 0.5)), logged(text("two", 0.5))
    assert shared(one, other) == 0
    assert one.digest(64) != other.digest(64)
    assert logged(b"").blocks(20, 4.0) != one.blocks(20, 4.0)
