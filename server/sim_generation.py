"""What the simulated model says: one deterministic token after another, with stop conditions and held-back text.

The next token is a hash of (all tokens so far, weights' fingerprint, sampling seed). So the same prompt under the same
weights always gets the same answer, and tokens after a weight swap come from the new weights. An answer continued from its
own beginning goes on as it would have: what the prompt already holds of it is said again, unseen, before the first token.
Nothing here knows of time, batches or KV blocks.
"""

import codecs
import enum
import hashlib
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.sim_text import EOS_TOKEN, STALE_KV_MARKER, encode, token_bytes, word_tail, word_token

_SURE_BYTES = 4  # so many bytes of a first word, its space included, are no accident

# Tokens to say instead of free words (JSON, tool arguments); chosen when the first token is due, so by the weights then.
Script = Callable[[random.Random], list[int]]


class FinishReason(enum.StrEnum):
    """vLLM's finish reasons, which are also label values of vllm:request_success_total."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling parameters that matter to made-up text. `seed` is 0 for greedy sampling."""

    max_tokens: int
    min_tokens: int = 0
    seed: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    top_logprobs: int | None = None  # None: no log probabilities at all
    answer_tokens_mean: int = 128
    reasoning_tokens: int = 0  # how many of the first tokens are reasoning


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of a sampled token, and the likeliest tokens in falling order (the sampled one first)."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Emission:
    """One step of one sequence as the client sees it. `text` lags behind `token` while a stop string may be forming."""

    sequence_id: str
    token: int | None  # None when the sequence ends without a new token (abort)
    text: str = ""
    is_reasoning: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprob: TokenLogprob | None = None


class Generation:
    """The answer of one sequence. `advance` gives the next token; after a finish reason it must not be called again."""

    __slots__ = (
        "_answered",
        "_begins",
        "_context",
        "_decoder",
        "_digest_at_start",
        "_held",
        "_is_resumed",
        "_marker",
        "_natural_length",
        "_owed",
        "_position",
        "_prompt",
        "_sampling",
        "_script",
        "_script_tokens",
        "_sequence_id",
        "_shown",
        "_text",
        "produced",
    )

    def __init__(
        self,
        sequence_id: str,
        prompt: Sequence[int],
        *,
        answered: int | None,
        sampling: Sampling,
        script: Script | None = None,
    ) -> None:
        """`answered` is how many tokens at the prompt's end already belong to the answer (a continued message).

        None: the prompt does not say (a text completion); then they are those that the model itself would have said.
        """
        self._sequence_id = sequence_id
        self._prompt: Sequence[int] = prompt
        self._answered = 0 if answered is None and script is not None else answered
        self._sampling = sampling
        self._script = script
        self._script_tokens: list[int] | None = None
        self._context = hashlib.blake2b(digest_size=8)
        self._digest_at_start = b""
        self._natural_length = 0
        self._position = 0  # in the answer; words of the stale marker do not count
        self._begins = answered == 0  # the next word stands at the beginning of its text and takes no space
        self._is_resumed = False
        self._owed = b""  # what the prompt's last token lacks of the token that the model would have said
        self._marker: list[int] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._shown = 0  # characters of _text already emitted
        self._held = 0 if sampling.include_stop else max((len(stop) for stop in sampling.stop), default=1) - 1
        self.produced = 0  # tokens generated so far

    def mark_stale(self) -> None:
        """The sequence reads KV blocks of other weights: it says so before anything else."""
        self._marker = encode(f"{'' if self._begins else ' '}{STALE_KV_MARKER}")

    def advance(self, fingerprint: bytes, *, room: int) -> Emission:
        """The next token under weights `fingerprint`; `room` is how many tokens the context still takes, this one included."""
        sampling = self._sampling
        if not self._is_resumed:
            self._resume(fingerprint)
        value = _hash(self._context.digest(), fingerprint, sampling.seed)
        is_reasoning = self._position < sampling.reasoning_tokens
        if self._marker:
            token = self._marker.pop(0)
            self._begins = False
            self._context.update(token.to_bytes(8, "little"))
        else:
            token = self._say(value, fingerprint)
        self.produced += 1
        finish, reason = self._finish(token, room)
        text, stop = self._show(token, is_reasoning=is_reasoning, finished=finish is not None)
        if stop is not None:
            finish, reason = FinishReason.STOP, stop
        logprob = None if sampling.top_logprobs is None else _logprob(token, value, sampling.top_logprobs)
        return Emission(self._sequence_id, token, text, is_reasoning, finish, reason, logprob)

    def _resume(self, fingerprint: bytes) -> None:
        """Says again what the prompt holds of the answer, so that the rest of it follows.

        Where the prompt ends inside a token (text that was held back for a stop string, or a character that was cut),
        the token counts as said and its rest is owed. Other weights said something else: then only the length counts.
        """
        self._is_resumed = True
        prompt, self._prompt = self._prompt, ()
        answered = self._answered_at_end(prompt, fingerprint) if self._answered is None else self._answered
        self._start(prompt[: len(prompt) - answered])
        self._begins = self._answered is not None  # a completion's first word follows the prompt's text
        for index, token in enumerate(prompt[len(prompt) - answered :]):
            said = self._say(_hash(self._context.digest(), fingerprint, self._sampling.seed), fingerprint)
            if said == token:
                continue
            rest = _rest(said, token)
            if rest and index == answered - 1:
                self._owed = rest
                return
            self._context = hashlib.blake2b(array("Q", prompt).tobytes(), digest_size=8)
            self._position = answered
            self._begins = False
            return

    def _start(self, prompt: Sequence[int]) -> None:
        """The answer begins behind `prompt`."""
        self._context = hashlib.blake2b(array("Q", prompt).tobytes(), digest_size=8)
        self._digest_at_start = self._context.digest()
        mean = self._sampling.answer_tokens_mean
        chance = _hash(self._digest_at_start, b"length", self._sampling.seed) % (mean + 1)
        self._natural_length = mean - mean // 2 + chance

    def _answered_at_end(self, prompt: Sequence[int], fingerprint: bytes) -> int:
        """How many tokens at the end of `prompt` are what the model says after the tokens before them."""
        seed = self._sampling.seed
        tail = word_tail(prompt)
        start = len(prompt) - tail
        context = hashlib.blake2b(array("Q", prompt[:start]).tobytes(), digest_size=8)
        for index in range(start, len(prompt)):
            said, token = word_token(_hash(context.digest(), fingerprint, seed), first=False), prompt[index]
            is_cut = index == len(prompt) - 1 and bool(_rest(said, token))
            if said != token and not (is_cut and (index > start or len(token_bytes(token)) >= _SURE_BYTES)):
                start = index + 1
            context.update(token.to_bytes(8, "little"))
        return len(prompt) - start

    def _say(self, value: int, fingerprint: bytes) -> int:
        """The next token of the answer, which then belongs to the context."""
        token = self._choose(value, fingerprint)
        self._position += 1
        self._begins = self._position == self._sampling.reasoning_tokens
        self._context.update(token.to_bytes(8, "little"))
        return token

    def _choose(self, value: int, fingerprint: bytes) -> int:
        spoken = self._position - self._sampling.reasoning_tokens
        if self._script is not None and spoken >= 0:
            if self._script_tokens is None:
                seed = _hash(self._digest_at_start, fingerprint, self._sampling.seed)
                self._script_tokens = self._script(random.Random(seed))
            return self._script_tokens[spoken] if spoken < len(self._script_tokens) else EOS_TOKEN
        is_over = spoken >= self._natural_length and self.produced >= self._sampling.min_tokens
        if is_over and not self._sampling.ignore_eos:
            return EOS_TOKEN
        return word_token(value, first=self._begins)

    def _finish(self, token: int, room: int) -> tuple[FinishReason | None, int | str | None]:
        if token == EOS_TOKEN and not self._sampling.ignore_eos:
            return FinishReason.STOP, None
        if self.produced >= self._sampling.min_tokens and token in self._sampling.stop_token_ids:
            return FinishReason.STOP, token
        if self.produced >= self._sampling.max_tokens or room <= 1:
            return FinishReason.LENGTH, None
        return None, None

    def _show(self, token: int, *, is_reasoning: bool, finished: bool) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that it completes."""
        piece = self._decoder.decode(self._owed + token_bytes(token), final=finished)
        self._owed = b""
        if is_reasoning:
            return piece, None
        searched = max(0, len(self._text) - self._held - 1)
        self._text += piece
        for stop in self._sampling.stop:
            found = self._text.find(stop, searched) if piece else -1
            if found >= 0:
                end = found + len(stop) if self._sampling.include_stop else found
                shown, self._shown = self._text[self._shown : end], end
                return shown, stop
        end = len(self._text) if finished else max(self._shown, len(self._text) - self._held)
        shown, self._shown = self._text[self._shown : end], end
        return shown, None


def _rest(said: int, token: int) -> bytes:
    """The bytes of `said` behind those of `token`; empty where they do not begin with them."""
    whole, part = token_bytes(said), token_bytes(token)
    return whole[len(part) :] if part and whole.startswith(part) else b""


def _hash(context: bytes, salt: bytes, seed: int) -> int:
    return int.from_bytes(hashlib.blake2b(context + salt + seed.to_bytes(16, "little", signed=True), digest_size=8).digest())


def _logprob(token: int, value: int, count: int) -> TokenLogprob:
    """The sampled token is always the likeliest; each alternative is a word about three times less likely."""
    sampled = -(value % 997) / 2000
    top = [(token, sampled)]
    alternative = value
    while len(top) < count:
        alternative = (alternative * 6364136223846793005 + 1442695040888963407) % 2**64
        candidate = word_token(alternative >> 16, first=False)
        if all(candidate != known for known, _ in top):
            top.append((candidate, top[-1][1] - 1.1))
    return TokenLogprob(sampled, tuple(top[: max(count, 1)]))
