"""What is learned while requests run."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.estimates import Line, Mean, OutputLengths


@pytest.mark.parametrize(("intercept", "slope"), [(0.03, 1 / 16000), (0.2, 1 / 900), (0.0, 1e-5), (0.05, 0.0)])
def test_a_line_is_found_through_noise_whatever_was_assumed(intercept: float, slope: float) -> None:
    """Wait times are predicted from what this fleet does, not from the engine that the defaults assume."""
    line, rng = Line(0.02, 1 / 8000, typical_x=4000), random.Random(1)
    for _ in range(400):
        x = rng.uniform(10, 12_000)
        line.add(x, (intercept + slope * x) * rng.uniform(0.8, 1.25))
    for x in (500, 4000, 12_000):
        assert line.at(x) == pytest.approx(intercept + slope * x, rel=0.12)


def test_a_line_follows_when_the_engine_changes() -> None:
    """After an upgrade the old pace is forgotten within some hundred requests."""
    line, rng = Line(0.02, 1 / 8000, typical_x=4000), random.Random(2)
    for rate in (16_000, 4_000):
        for _ in range(800):
            x = rng.uniform(10, 8000)
            line.add(x, 0.05 + x / rate)
        assert line.at(6000) == pytest.approx(0.05 + 6000 / rate, rel=0.1)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e4)), max_size=60))
def test_a_line_never_predicts_a_negative_duration(samples: list[tuple[float, float]]) -> None:
    """Whatever is measured, a prediction is a time: finite, not negative, and no shorter for more work."""
    line = Line(0.02, 1e-4, typical_x=4000)
    for x, y in samples:
        line.add(x, y)
        assert 0 <= line.at(0) <= line.at(1000) < float("inf")


def test_one_stuck_request_hardly_moves_a_line() -> None:
    """A client that paused for an hour does not make a replica look slow."""
    line, rng = Line(0.02, 1 / 8000, typical_x=4000), random.Random(3)
    for _ in range(200):
        x = rng.uniform(10, 8000)
        line.add(x, 0.05 + x / 8000)
    line.add(4000, 3600.0)
    assert line.at(4000) == pytest.approx(0.55, rel=0.1)


def test_the_same_work_again_and_again_still_gives_a_pace() -> None:
    """A fleet that only ever sees one length of prompt is predicted right at that length."""
    line = Line(0.02, 1 / 8000, typical_x=4000)
    for _ in range(2000):
        line.add(7200.0, 0.9)
    assert line.at(7200) == pytest.approx(0.9, rel=0.02)


def test_what_is_known_to_grow_is_not_taken_for_constant() -> None:
    """Clients that all send prompts of one length do not make ten of them look as quick as one."""
    line = Line(0.02, 1 / 8000, typical_x=4000, rises_from=256)
    for _ in range(2000):
        line.add(640.0, 3.2)
    assert line.at(640) == pytest.approx(3.2, rel=0.05)
    assert line.at(6400) > 10


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=300))
def test_a_mean_stays_within_what_was_seen(values: list[float]) -> None:
    """No estimate lies outside of the measurements."""
    mean = Mean(5.0, memory=20)
    for value in values:
        mean.add(value)
    assert min(values) * (1 - 1e-9) - 1e-9 <= mean.value <= max(values) * (1 + 1e-9) + 1e-9


def test_the_length_of_an_answer_is_expected_by_its_kind() -> None:
    """Short extractions and long reasoning on one model are told apart by how their prompts begin."""
    lengths = OutputLengths(256.0)
    assert lengths.expected("m", 1, None) == 256.0
    assert lengths.expected("m", 1, 20) == 20.0, "the client's limit"
    for _ in range(50):
        lengths.add("m", 1, 10)
        lengths.add("m", 2, 4000)
    assert lengths.expected("m", 1, None) == pytest.approx(10, rel=0.05)
    assert lengths.expected("m", 2, None) == pytest.approx(4000, rel=0.05)
    assert 1000 < lengths.expected("m", 3, None) < 3000, "of a new kind the model's mean"


def test_kinds_without_end_take_bounded_memory() -> None:
    """Clients whose prompts never repeat do not fill the router's memory."""
    lengths = OutputLengths(256.0)
    for kind in range(10_000):
        lengths.add("m", kind, 5)
    assert lengths.kinds <= 4096
