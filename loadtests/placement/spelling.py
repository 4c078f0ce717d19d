"""Segments as text of exactly their number of tokens. Equal segments read alike, wherever they stand. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from router.sim.prompts import Segment

_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Spelling:
    """`token` makes the text of one token; what `bytes_per_token` says is what the router will learn."""

    bytes_per_token: float
    token: Callable[[Random], str]

    def text(self, segment: Segment) -> str:
        """A segment cut short is spelt as the beginning of the longer one."""
        rng = Random(segment.id)
        return "".join([self.token(rng) for _ in range(segment.tokens)])


def _word(rng: Random) -> str:
    value = rng.getrandbits(32)
    letters = []
    for alphabet in (_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS):
        value, index = divmod(value, len(alphabet))
        letters.append(alphabet[index])
    return f" {''.join(letters)}"


# The simulated engine takes a space and up to five letters for a token.
WORDS = Spelling(5.0, _word)
# A tokenizer with one token for each byte, as the tiny model's.
LETTERS = Spelling(1.0, lambda rng: rng.choice(_LETTERS))
