"""The simulated engine's tokenizer and template."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.sim_text import STALE_KV_MARKER, decode, encode, render_chat, token_text, word_token


@given(st.text())
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    """Detokenizing what was tokenized gives the text back."""
    assert decode(encode(text)) == text


@given(st.lists(st.integers(0, 2**63 - 1)))
def test_any_token_ids_decode(tokens: list[int]) -> None:
    """Ids that the tokenizer never makes decode to replacement characters instead of failing."""
    assert isinstance(decode(tokens), str)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello there", ["Hello", " there"]),
        ("a  b\n", ["a", " ", " b", "\n"]),
        ("", []),
        ("internationalisation", ["inter", "natio", "nalis", "ation"]),
    ],
)
def test_tokens_are_short_pieces_of_words(text: str, pieces: list[str]) -> None:
    """A token is an optional space and up to five bytes, or one whitespace byte."""
    assert [token_text(token) for token in encode(text)] == pieces


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50))
def test_generated_words_are_tokenized_the_same_when_they_come_back(values: list[int]) -> None:
    """An answer sent back in the next turn has the tokens that were generated, so the prefix cache hits them."""
    tokens = [word_token(value, first=index == 0) for index, value in enumerate(values)]
    assert encode(decode(tokens)) == tokens


@given(st.text(alphabet="ab \n", max_size=20), st.text(alphabet="ab \n", max_size=20))
def test_a_conversation_continued_begins_with_the_tokens_of_its_first_turn(question: str, answer: str) -> None:
    """Each turn's prompt is a prefix, in tokens, of the next turn's prompt."""
    first = encode(render_chat([{"role": "user", "content": question}])[0])
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}, {"role": "user", "content": "x"}]
    second = encode(render_chat(turns)[0])
    assert second[: len(first)] == first
    assert second[len(first) : len(first) + len(encode(answer))] == encode(answer)


def test_the_stale_marker_cannot_be_a_made_up_word() -> None:
    """No generated text contains the marker by accident: words are lower case."""
    assert STALE_KV_MARKER.lower() != STALE_KV_MARKER
