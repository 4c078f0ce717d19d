"""What the simulated model says."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.sim_generation import Emission, FinishReason, Generation, Sampling
from server.sim_text import EOS_TOKEN, STALE_KV_MARKER, decode, encode

OLD, NEW = b"old weights", b"new weights"


def run(generation: Generation, *, weights: bytes = OLD, room: int = 10_000) -> list[Emission]:
    emissions = [generation.advance(weights, room=room)]
    while emissions[-1].finish_reason is None:
        emissions.append(generation.advance(weights, room=room - len(emissions)))
    return emissions


def say(prompt: str, *, weights: bytes = OLD, answered: int = 0, script: list[int] | None = None, **sampling: object) -> str:
    settings = Sampling(**{"max_tokens": 40, **sampling})  # type: ignore[arg-type]
    write = None if script is None else lambda rng: script
    generation = Generation("s", encode(prompt), answered=answered, sampling=settings, script=write)
    return "".join(emission.text for emission in run(generation, weights=weights))


def test_the_same_prompt_under_the_same_weights_gets_the_same_answer() -> None:
    """Answers are deterministic."""
    assert say("Tell me") == say("Tell me")


@pytest.mark.parametrize("changed", [{"weights": NEW}, {"seed": 7}])
def test_other_weights_and_other_seeds_give_another_answer(changed: dict[str, object]) -> None:
    """Text depends on weights and seed."""
    assert say("Tell me", **changed) != say("Tell me")  # type: ignore[arg-type]


def test_another_prompt_gets_another_answer() -> None:
    """Text depends on the whole prompt."""
    assert say("Tell me") != say("Tell you")


@given(st.integers(1, 39))
def test_an_answer_continued_from_its_own_beginning_goes_on_as_before(cut: int) -> None:
    """Whoever sends back the first tokens of an answer gets exactly the rest, as long as the weights are the same."""
    prompt = encode("Tell me")
    whole = run(Generation("s", prompt, answered=0, sampling=Sampling(max_tokens=40)))
    begun = [emission.token for emission in whole[:cut] if emission.token is not None]
    rest = run(Generation("s", prompt + begun, answered=cut, sampling=Sampling(max_tokens=40 - cut)))
    assert [emission.token for emission in rest] == [emission.token for emission in whole[cut:]]
    assert "".join(emission.text for emission in rest) == "".join(emission.text for emission in whole[cut:])


def test_tokens_after_a_swap_come_from_the_new_weights_and_earlier_ones_stay() -> None:
    """A swap in the middle of an answer changes only what follows."""
    generation = Generation("s", encode("Tell me"), answered=0, sampling=Sampling(max_tokens=20))
    mixed = [generation.advance(OLD if index < 10 else NEW, room=100).token for index in range(20)]
    old = [emission.token for emission in run(Generation("s", encode("Tell me"), answered=0, sampling=Sampling(max_tokens=20)))]
    assert mixed[:10] == old[:10]
    assert mixed[10] != old[10]


def test_a_natural_answer_ends_with_a_token_that_has_no_text() -> None:
    """Without a limit that bites, the answer ends with finish reason stop after half to one and a half times the mean."""
    emissions = run(Generation("s", encode("x"), answered=0, sampling=Sampling(max_tokens=1000, answer_tokens_mean=20)))
    assert emissions[-1].finish_reason is FinishReason.STOP
    assert emissions[-1].token == EOS_TOKEN
    assert emissions[-1].text == ""
    assert 10 <= len(emissions) - 1 <= 30


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason"),
    [
        ({"max_tokens": 1}, 1, FinishReason.LENGTH),
        ({"max_tokens": 200, "ignore_eos": True, "answer_tokens_mean": 4}, 200, FinishReason.LENGTH),
        ({"max_tokens": 200, "min_tokens": 100, "answer_tokens_mean": 4}, 101, FinishReason.STOP),
    ],
)
def test_limits_end_an_answer(sampling: dict[str, int], tokens: int, reason: FinishReason) -> None:
    """max_tokens, min_tokens and ignore_eos mean what they mean in vLLM; the end token counts."""
    emissions = run(Generation("s", encode("x"), answered=0, sampling=Sampling(**sampling)))  # type: ignore[arg-type]
    assert (len(emissions), emissions[-1].finish_reason) == (tokens, reason)


def test_the_context_ends_an_answer() -> None:
    """The last token that fits into the context ends the answer with length."""
    sampling = Sampling(max_tokens=1000, ignore_eos=True)
    emissions = run(Generation("s", encode("x"), answered=0, sampling=sampling), room=5)
    assert (len(emissions), emissions[-1].finish_reason) == (5, FinishReason.LENGTH)


@pytest.mark.parametrize(("include", "shown"), [(False, "alpha beta gam"), (True, "alpha beta gamma")])
def test_a_stop_string_ends_the_answer_even_across_tokens(include: bool, shown: str) -> None:
    """The text ends before the stop string, or with it where the request wants it, and the reason names it."""
    sampling = Sampling(max_tokens=100, stop=("zzz", "ma"), include_stop=include)
    generation = Generation("s", [9], answered=0, sampling=sampling, script=lambda rng: encode("alpha beta gamma delta"))
    emissions = run(generation)
    assert "".join(emission.text for emission in emissions) == shown
    assert (emissions[-1].finish_reason, emissions[-1].stop_reason) == (FinishReason.STOP, "ma")


@given(st.text(alphabet="abc ", max_size=40), st.text(alphabet="abc ", min_size=1, max_size=4))
def test_no_part_of_a_stop_string_is_ever_shown(text: str, stop: str) -> None:
    """What streams is exactly the text before the first completed stop string."""
    shown = say("x", script=encode(text), max_tokens=200, stop=(stop,))
    assert shown == text.partition(stop)[0]


def test_a_stop_token_ends_the_answer_with_its_id() -> None:
    """stop_token_ids name the token in stop_reason."""
    script = encode("alpha beta")
    sampling = Sampling(max_tokens=100, stop_token_ids=frozenset({script[-1]}))
    last = run(Generation("s", [9], answered=0, sampling=sampling, script=lambda rng: script))[-1]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, script[-1])


def test_characters_cut_by_tokens_come_out_whole() -> None:
    """A token that ends inside a character shows nothing of it until the rest is there."""
    text = "größenwahnsinnige Käsefüße 🧀🧀🧀"
    assert say("x", script=encode(text), max_tokens=200) == text


def test_a_stale_answer_says_so_first() -> None:
    """An answer that reads KV of other weights begins with the marker, and then goes on."""
    generation = Generation("s", encode("x"), answered=0, sampling=Sampling(max_tokens=10))
    generation.mark_stale()
    assert decode(e.token for e in run(generation) if e.token is not None).startswith(f"{STALE_KV_MARKER} ")


def test_a_script_is_written_under_the_weights_of_its_first_token() -> None:
    """JSON answers depend on the weights like words do."""

    def write(rng: random.Random) -> list[int]:
        return encode(str(rng.getrandbits(64)))

    def under(weights: bytes) -> str:
        generation = Generation("s", [9], answered=0, sampling=Sampling(max_tokens=100), script=write)
        return "".join(emission.text for emission in run(generation, weights=weights))

    assert under(OLD) == under(OLD)
    assert under(OLD) != under(NEW)


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_log_probabilities_fall_from_the_sampled_token(count: int) -> None:
    """The sampled token is the likeliest, and no token is listed twice."""
    sampling = Sampling(max_tokens=5, top_logprobs=count)
    for emission in run(Generation("s", encode("x"), answered=0, sampling=sampling)):
        assert emission.logprob is not None
        tokens = [token for token, _ in emission.logprob.top]
        values = [value for _, value in emission.logprob.top]
        assert tokens[0] == emission.token
        assert len(set(tokens)) == len(tokens) == max(count, 1)
        assert values == sorted(values, reverse=True)
        assert values[0] == emission.logprob.logprob <= 0


def test_reasoning_comes_first_and_is_told_apart() -> None:
    """The first tokens are reasoning; what follows begins like an answer of its own."""
    sampling = Sampling(max_tokens=12, reasoning_tokens=5)
    emissions = run(Generation("s", encode("x"), answered=0, sampling=sampling))
    assert [emission.is_reasoning for emission in emissions] == [True] * 5 + [False] * 7
    assert not emissions[5].text.startswith(" ")
