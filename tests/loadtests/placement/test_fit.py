"""The simulator's step times are recovered from what they would have been measured as."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.placement.client import Seen
from loadtests.placement.fit import Observation, fit_timing, nonnegative_least_squares
from loadtests.placement.training_load import decode_observation, mixed_observation
from router.sim.timing import StepTiming

TRUE = StepTiming(
    base_s=0.004,
    prefill_tokens_per_s=20_000.0,
    per_sequence_s=2e-4,
    per_context_token_s=3e-8,
    per_attended_pair_s=1e-9,
)
REQUEST_S = 0.006


def observations(timing: StepTiming, request_s: float, noise: float = 0.0) -> list[Observation]:
    """As the training load makes them: prompts alone, decoding alone, and prompts beside it."""
    rng = random.Random(3)
    shapes = [(tokens, 0, 0, 1.0) for tokens in range(20, 1900, 60)]
    shapes += [(0, batch, batch * context, 0.0) for batch in (1, 2, 4, 8, 16) for context in (64, 600, 1200)]
    shapes += [(tokens, batch, batch * 100, 0.0) for batch in (2, 16) for tokens in (100, 700, 1600)]
    made = []
    for tokens, batch, reads, requests in shapes:
        seconds = timing.seconds(prefill_tokens=tokens, attended_pairs=tokens**2, sequences=batch, context_tokens=reads)
        seconds = (seconds + requests * request_s) * rng.gauss(1.0, noise)
        made.append(Observation(seconds, 1.0, tokens, batch, reads, tokens**2, requests))
    return made


def test_what_went_in_comes_out() -> None:
    """Every coefficient, also where they differ by five orders of magnitude."""
    fit = fit_timing(observations(TRUE, REQUEST_S))
    for name in ("base_s", "prefill_tokens_per_s", "per_sequence_s", "per_context_token_s", "per_attended_pair_s"):
        assert getattr(fit.timing, name) == pytest.approx(getattr(TRUE, name), rel=1e-6)
    assert fit.request_s == pytest.approx(REQUEST_S, rel=1e-6)
    assert max(map(abs, fit.errors)) < 1e-6


def test_noise_moves_it_little() -> None:
    """A tenth of noise on each measurement leaves predictions within a tenth."""
    fit = fit_timing(observations(TRUE, REQUEST_S, noise=0.1))
    for seen in observations(TRUE, REQUEST_S):
        step = fit.timing.seconds(
            prefill_tokens=int(seen.prefill_tokens),
            attended_pairs=int(seen.attended_pairs),
            sequences=int(seen.sequences),
            context_tokens=int(seen.context_tokens),
        )
        assert step + seen.requests * fit.request_s == pytest.approx(seen.seconds, rel=0.1)


def test_what_was_disturbed_counts_little() -> None:
    """Every seventh measurement took three times as long, because the machine did something else."""
    made = [
        seen._replace(seconds=seen.seconds * (3.0 if number % 7 == 0 else 1.0))
        for number, seen in enumerate(observations(TRUE, REQUEST_S))
    ]
    fit = fit_timing(made)
    assert fit.timing.base_s == pytest.approx(TRUE.base_s, rel=0.05)
    assert fit.timing.prefill_tokens_per_s == pytest.approx(TRUE.prefill_tokens_per_s, rel=0.05)
    assert fit.timing.per_sequence_s == pytest.approx(TRUE.per_sequence_s, rel=0.05)


def test_a_part_that_does_not_exist_is_found_to_be_nothing() -> None:
    """Not a small negative time, which the simulator would refuse."""
    without = StepTiming(base_s=0.004, prefill_tokens_per_s=20_000.0, per_sequence_s=2e-4, per_context_token_s=0.0)
    fit = fit_timing(observations(without, 0.0, noise=0.02))
    assert fit.timing.per_context_token_s >= 0
    assert fit.request_s == pytest.approx(0.0, abs=3e-4)


@pytest.mark.parametrize(
    ("given_observations", "complaint"),
    [
        ([Observation(1.0)] * 3, "3 observations"),
        ([Observation(1.0)] * 10, "is zero in all"),
        ([Observation(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)] * 10, "tell the coefficients apart"),
    ],
)
def test_too_little_to_fit_is_said(given_observations: list[Observation], complaint: str) -> None:
    """Rather than numbers that mean nothing."""
    with pytest.raises(ValueError, match=complaint):
        fit_timing(given_observations)


@given(st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=8, max_size=8), st.integers(0, 1000))
def test_no_other_point_fits_better(noise: list[list[float]], seed: int) -> None:
    """The residual is the least that coefficients of 0 or more can reach, by comparison with points around it."""
    rng = random.Random(seed)
    rows = [[value + rng.gauss(0, 5) for value in row] for row in noise]
    wanted = [rng.gauss(0, 5) for _ in rows]

    def residual(point: list[float]) -> float:
        return sum((sum(a * b for a, b in zip(row, point, strict=True)) - y) ** 2 for row, y in zip(rows, wanted, strict=True))

    found = nonnegative_least_squares(rows, wanted)
    assert min(found) >= 0
    best = residual(found)
    for column in range(3):
        for step in (-1e-2, 1e-2, 1.0):
            moved = list(found)
            moved[column] = max(0.0, moved[column] + step)
            assert residual(moved) >= best - 1e-6


def answer(times: list[float], sent_at: float = 0.0) -> Seen:
    return Seen("", 0, sent_at, tuple(times), times[-1], 10, 0, len(times), "")


def test_a_decode_step_is_taken_where_all_decode() -> None:
    """What one did before the last had begun, or after the first had ended, does not count."""
    early = answer([0.0, 0.5, 1.0, 1.1, 1.2, 1.3])
    late = answer([1.0, 1.1, 1.2, 1.3, 2.0, 3.0])
    seen = decode_observation([early, late], context=100)
    assert seen.seconds == pytest.approx(0.1)
    assert seen.sequences == 2
    assert seen.context_tokens == 2 * (100 + 2)
    with pytest.raises(ValueError, match="steps in common"):
        decode_observation([answer([0.0, 0.1]), answer([1.0, 1.1])], context=100)


def test_a_prompt_beside_decoding_is_seen_in_the_longest_gap() -> None:
    """Of those that lie in its time; a stall before it is none of its."""
    decoding = answer([0.0, 5.0, 5.1, 5.2, 5.6, 5.7])
    alone = Seen("", 0, 5.15, (5.6,), 5.6, 700, 0, 1, "")
    seen = mixed_observation([decoding], alone, context=64, tokens=700)
    assert seen.seconds == pytest.approx(0.4)
    assert (seen.prefill_tokens, seen.attended_pairs, seen.sequences) == (700, 490_000, 1)
    with pytest.raises(ValueError, match="had ended"):
        mixed_observation([decoding], alone._replace(sent_at=6.0, ended_at=7.0), context=64, tokens=700)
