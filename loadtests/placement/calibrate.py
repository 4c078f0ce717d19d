"""Check A: the simulator's replica, fitted to a real engine, predicts another load on it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

from loadtests.placement.client import Seen, player
from loadtests.placement.fit import fit_timing
from loadtests.placement.scripts import Prefixes, Range, Script, prefix_scripts
from loadtests.placement.simulated import run_simulated
from loadtests.placement.spelling import LETTERS
from loadtests.placement.stack import real_engines
from loadtests.placement.tables import table
from loadtests.placement.training_load import observe
from router.policy.catalogue import PolicyName
from router.sim.fleet import EngineLimits, FleetSettings
from router.sim.result import Result
from router.sim.statistics import percentile
from router.sim.timing import StepTiming

BATCH_TOKENS = 2048
BATCH_MAX = 32
# What is held out: shared prefixes of five of the CPU's KV blocks of 128 tokens.
_HELD_OUT = Prefixes(shared=12, tokens=700, question=Range(40, 900), output=Range(8, 64), rate=1.0)


class Pair(NamedTuple):
    """One request in both worlds. Seconds and tokens."""

    real_ttft_s: float
    simulated_ttft_s: float
    real_cached: int
    simulated_cached: int


async def calibrate(
    model: Path, folder: Path, *, core: int, rates: Sequence[float], seconds: float, seed: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Fits on one load and predicts others, one for each of `rates`. Raises Problem, PlayFailed."""
    limits = EngineLimits(max_num_seqs=BATCH_MAX, max_num_batched_tokens=BATCH_TOKENS)
    rng = Random(seed)
    async with real_engines(folder, model, [[core]], limits) as (engine,):
        say("engine ready, training load")
        async with player(engine.url) as client:
            observations = await observe(client, LETTERS, rng)
        fit = fit_timing(observations)
        cache = await engine.cache()
        assert cache.capacity_tokens is not None
        assert cache.block_tokens is not None
        limits = EngineLimits(
            kv_capacity_tokens=cache.capacity_tokens,
            kv_block_tokens=cache.block_tokens,
            max_num_seqs=BATCH_MAX,
            max_num_batched_tokens=BATCH_TOKENS,
        )
        fleet = FleetSettings(replicas=1, limits=limits, timing=fit.timing, network_delay_s=fit.request_s / 2)
        held_out = []
        for rate in rates:
            say(f"held-out load, {rate:g} requests/s for {seconds:g} s")
            scripts = prefix_scripts(_HELD_OUT._replace(rate=rate), seconds, rng)
            await engine.forget()
            async with player(engine.url) as client:
                seen = await client.play(scripts, LETTERS)
            simulated = run_simulated(
                scripts, fleet, PolicyName.ROUND_ROBIN, bytes_per_token=LETTERS.bytes_per_token, seed=seed
            )
            held_out.append({"rate": rate, **compare(scripts, seen, simulated)})
    return {
        "timing": asdict(fit.timing),
        "request_s": fit.request_s,
        "fit_error_median": median(map(abs, fit.errors)),
        "fit_error_p90": percentile(sorted(map(abs, fit.errors)), 0.9),
        "observations": [observation._asdict() for observation in observations],
        "held_out": held_out,
    }


def compare(scripts: Sequence[Script], seen: Sequence[Seen], simulated: Result) -> dict[str, float]:
    """Errors are relative to what the real engine did; those of means and totals with their sign."""
    records = {(record.session, record.turn): record for record in simulated.requests}
    pairs = []
    for one in seen:
        record = records[one.script, one.turn]
        assert record.ttft_s is not None
        pairs.append(Pair(one.ttft_s, record.ttft_s, one.cached_tokens, record.cached_tokens))
    errors = sorted(abs(pair.simulated_ttft_s / pair.real_ttft_s - 1.0) for pair in pairs)
    real = sorted(pair.real_ttft_s for pair in pairs)
    model = sorted(pair.simulated_ttft_s for pair in pairs)
    tokens = sum(one.output_tokens for one in seen)
    began = scripts[0].at
    real_span_s, model_span_s = max(one.ended_at for one in seen) - began, simulated.ended_at - began
    real_itl = fmean((one.token_times[-1] - one.token_times[0]) / (one.output_tokens - 1) for one in seen)
    model_itl = fmean(record.itl_mean_s for record in simulated.requests if record.itl_mean_s is not None)
    real_e2e = fmean(one.ended_at - one.sent_at for one in seen)
    model_e2e = fmean(record.ended_at - record.arrives_at for record in simulated.requests)
    return {
        "requests": float(len(pairs)),
        "ttft_error_median": percentile(errors, 0.5),
        "ttft_error_p90": percentile(errors, 0.9),
        "ttft_mean_real_s": fmean(real),
        "ttft_mean_simulated_s": fmean(model),
        "ttft_mean_error": fmean(model) / fmean(real) - 1.0,
        "ttft_p50_real_s": percentile(real, 0.5),
        "ttft_p50_simulated_s": percentile(model, 0.5),
        "ttft_p90_real_s": percentile(real, 0.9),
        "ttft_p90_simulated_s": percentile(model, 0.9),
        "itl_mean_real_s": real_itl,
        "itl_mean_simulated_s": model_itl,
        "itl_mean_error": model_itl / real_itl - 1.0,
        "e2e_mean_real_s": real_e2e,
        "e2e_mean_simulated_s": model_e2e,
        "e2e_mean_error": model_e2e / real_e2e - 1.0,
        "output_tokens_per_s_real": tokens / real_span_s,
        "output_tokens_per_s_simulated": tokens / model_span_s,
        "throughput_error": real_span_s / model_span_s - 1.0,
        "cached_real": float(sum(pair.real_cached for pair in pairs)),
        "cached_simulated": float(sum(pair.simulated_cached for pair in pairs)),
        "cached_unequal": float(sum(pair.real_cached != pair.simulated_cached for pair in pairs)),
    }


def timing_of(found: Mapping[str, Any]) -> tuple[StepTiming, float]:
    """Of a result that was written as JSON: the fitted timing, and the seconds of each request outside the engine's steps."""
    return StepTiming(**found["timing"]), float(found["request_s"])


def text(found: Mapping[str, Any]) -> str:
    timing, request_s = timing_of(found)
    lines = [
        f"step {timing.base_s * 1e3:.2f} ms + prefill at {timing.prefill_tokens_per_s:.0f} tokens/s "
        f"+ {timing.per_attended_pair_s * 1e9:.2f} ns a pair + {timing.per_sequence_s * 1e6:.0f} us a sequence "
        f"+ {timing.per_context_token_s * 1e9:.1f} ns a context token; {request_s * 1e3:.1f} ms a request outside",
        f"errors of the fit: median {found['fit_error_median']:.1%}, p90 {found['fit_error_p90']:.1%}",
        "",
    ]
    head = (
        *("held out", "requests", "TTFT err p50", "p90", "mean real", "sim", "p90 real", "sim", "ITL err", "e2e err"),
        *("tok/s real", "sim", "cached real", "sim", "unequal"),
    )
    rows = [
        (
            f"{run['rate']:g}/s",
            f"{run['requests']:.0f}",
            f"{run['ttft_error_median']:.1%}",
            f"{run['ttft_error_p90']:.1%}",
            f"{run['ttft_mean_real_s'] * 1e3:.1f} ms",
            f"{run['ttft_mean_simulated_s'] * 1e3:.1f} ms",
            f"{run['ttft_p90_real_s'] * 1e3:.1f} ms",
            f"{run['ttft_p90_simulated_s'] * 1e3:.1f} ms",
            f"{run['itl_mean_error']:+.1%}",
            f"{run['e2e_mean_error']:+.1%}",
            f"{run['output_tokens_per_s_real']:.1f}",
            f"{run['output_tokens_per_s_simulated']:.1f}",
            f"{run['cached_real']:.0f}",
            f"{run['cached_simulated']:.0f}",
            f"{run['cached_unequal']:.0f}",
        )
        for run in found["held_out"]
    ]
    return "\n".join(lines) + table(head, rows)
