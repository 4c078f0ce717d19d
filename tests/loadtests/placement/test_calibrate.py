"""How far a prediction is off is told as a share of what was measured."""

from random import Random

import pytest

from loadtests.placement.calibrate import compare, text, timing_of
from loadtests.placement.client import Seen
from loadtests.placement.scripts import Prefixes, Range, prefix_scripts
from loadtests.placement.simulated import run_simulated
from router.policy.catalogue import PolicyName
from router.sim.fleet import EngineLimits, FleetSettings
from router.sim.timing import StepTiming

TIMING = StepTiming(base_s=0.01, prefill_tokens_per_s=10_000.0, per_sequence_s=1e-4, per_context_token_s=0.0)


def test_a_server_twice_as_slow_shows_as_half() -> None:
    """First tokens and the time between tokens are predicted at half of what they took; what is cached, exactly."""
    shape = Prefixes(shared=2, tokens=300, question=Range(20, 200), output=Range(5, 9), rate=5.0)
    scripts = prefix_scripts(shape, 10.0, Random(1))
    fleet = FleetSettings(replicas=1, limits=EngineLimits(), timing=TIMING)
    simulated = run_simulated(scripts, fleet, PolicyName.RANDOM, bytes_per_token=1.0, seed=1)
    seen = []
    for record in simulated.requests:
        assert record.ttft_s is not None
        assert record.itl_mean_s is not None
        first, gap = record.arrives_at + 2 * record.ttft_s, 2 * record.itl_mean_s
        times = tuple(first + number * gap for number in range(record.output_tokens))
        seen.append(
            Seen(
                script=record.session,
                turn=0,
                sent_at=record.arrives_at,
                token_times=times,
                ended_at=times[-1],
                prompt_tokens=record.prompt_tokens,
                cached_tokens=record.cached_tokens,
                output_tokens=record.output_tokens,
                text="",
            )
        )
    found = compare(scripts, seen, simulated)
    assert found["ttft_error_median"] == pytest.approx(0.5)
    assert found["ttft_error_p90"] == pytest.approx(0.5)
    assert found["ttft_mean_error"] == pytest.approx(-0.5)
    assert found["itl_mean_error"] == pytest.approx(-0.5)
    assert found["cached_real"] == found["cached_simulated"] > 0
    assert found["cached_unequal"] == 0
    assert found["requests"] == len(scripts)


def test_what_was_written_can_be_read_and_shown() -> None:
    """The fitted times go from one check's file to the next."""
    scripts = prefix_scripts(Prefixes(1, 64, Range(5, 9), Range(2, 3), 5.0), 2.0, Random(1))
    fleet = FleetSettings(replicas=1, limits=EngineLimits(), timing=TIMING)
    simulated = run_simulated(scripts, fleet, PolicyName.RANDOM, bytes_per_token=1.0, seed=1)
    seen = [
        Seen(script.id, 0, script.at, (script.at + 1.0, script.at + 2.0), script.at + 2.0, 70, 0, 2, "") for script in scripts
    ]
    timing = {
        "base_s": 0.01,
        "prefill_tokens_per_s": 10_000.0,
        "per_sequence_s": 1e-4,
        "per_context_token_s": 0.0,
        "per_attended_pair_s": 0.0,
    }
    held_out = [{"rate": 5.0, **compare(scripts, seen, simulated)}]
    found = {"timing": timing, "request_s": 0.004, "fit_error_median": 0.1, "fit_error_p90": 0.2, "held_out": held_out}
    assert timing_of(found) == (TIMING, 0.004)
    shown = text(found)
    assert "10000 tokens/s" in shown
    assert "5/s" in shown
