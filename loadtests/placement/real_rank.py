"""Check C: before two real engines, policies rank by uncached prompt tokens as they do in the simulator."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from loadtests.placement.calibrate import BATCH_MAX, BATCH_TOKENS
from loadtests.placement.client import player
from loadtests.placement.fleet_figures import FleetFigures, of_result, of_servers
from loadtests.placement.ranks import agreement
from loadtests.placement.scripts import Prefixes, Range, Script, round_scripts
from loadtests.placement.simulated import run_simulated
from loadtests.placement.spelling import LETTERS
from loadtests.placement.stack import real_engines, running_router
from loadtests.placement.tables import table
from router.policy.catalogue import PolicyName
from router.sim.fleet import EngineLimits, FleetSettings
from router.sim.timing import StepTiming

REPLICAS = 2
POLICIES = (PolicyName.PREDICTED, PolicyName.LEAST_LOADED, PolicyName.RANDOM)
USERS = 10
# Ten KV blocks of 128 tokens before each user's own question. The rate leaves one or two requests in flight.
TRAFFIC = Prefixes(shared=12, tokens=1300, question=Range(60, 200), output=Range(8, 8), rate=4.0)
SIMULATED_SEEDS = 10
APART = 0.05
# A fit on two cores; `--timing` gives another.
TIMING = StepTiming(base_s=0.0045, prefill_tokens_per_s=25_000.0, per_sequence_s=2e-4, per_context_token_s=0.0)
REQUEST_S = 0.005


def traffic(seed: int) -> list[Script]:
    return round_scripts(TRAFFIC, USERS, Random(seed))


def simulate_rank(
    scripts: Sequence[Script], limits: EngineLimits, timing: StepTiming, request_s: float
) -> dict[str, list[FleetFigures]]:
    fleet = FleetSettings(replicas=REPLICAS, limits=limits, timing=timing, network_delay_s=request_s / 2)
    return {
        policy: [
            of_result(run_simulated(scripts, fleet, policy, bytes_per_token=LETTERS.bytes_per_token, seed=seed))
            for seed in range(SIMULATED_SEEDS)
        ]
        for policy in POLICIES
    }


async def rank_on_real(
    model: Path,
    folder: Path,
    *,
    cores: Sequence[int],
    rounds: int,
    seed: int,
    timing: StepTiming,
    request_s: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """`rounds` times all policies, each on a router of its own and with emptied caches. Raises Problem, PlayFailed."""
    scripts = traffic(seed)
    limits = EngineLimits(max_num_seqs=BATCH_MAX, max_num_batched_tokens=BATCH_TOKENS)
    measured: dict[str, list[FleetFigures]] = {policy: [] for policy in POLICIES}
    async with real_engines(folder, model, [[core] for core in cores], limits) as engines:
        cache = await engines[0].cache()
        assert cache.capacity_tokens is not None
        assert cache.block_tokens is not None
        for number in range(rounds):
            for policy in POLICIES:
                for engine in engines:
                    await engine.forget()
                before = [await engine.counters() for engine in engines]
                async with running_router(folder, engines, policy) as url, player(url) as client:
                    seen = await client.play(scripts, LETTERS)
                counts = [(await engine.counters()).since(then) for engine, then in zip(engines, before, strict=True)]
                figures = of_servers(seen, counts)
                measured[policy].append(figures)
                say(f"round {number + 1}, {policy}: {figures.uncached_tokens:.0f} tokens not cached, {figures}")
    limits = EngineLimits(
        kv_capacity_tokens=cache.capacity_tokens,
        kv_block_tokens=cache.block_tokens,
        max_num_seqs=BATCH_MAX,
        max_num_batched_tokens=BATCH_TOKENS,
    )
    simulated = simulate_rank(scripts, limits, timing, request_s)
    return {"timing": asdict(timing), **judged(simulated, measured)}


def judged(simulated: Mapping[str, Sequence[FleetFigures]], measured: Mapping[str, Sequence[FleetFigures]]) -> dict[str, Any]:
    runs = {policy: [run.uncached_tokens for run in own] for policy, own in simulated.items()}
    means = {policy: fmean(run.uncached_tokens for run in own) for policy, own in measured.items()}
    pairs = agreement(runs, means, apart=APART)
    return {
        "measured": {policy: [run._asdict() for run in own] for policy, own in measured.items()},
        "simulated": {policy: [run._asdict() for run in own] for policy, own in simulated.items()},
        "pairs": pairs.pairs,
        "agreeing": pairs.agreeing,
    }


def text(found: Mapping[str, Any]) -> str:
    rows = []
    for policy, own in found["measured"].items():
        real = [run["uncached_tokens"] for run in own]
        model = [run["uncached_tokens"] for run in found["simulated"][policy]]
        hit, hit_model = fmean(run["hit_rate"] for run in own), fmean(run["hit_rate"] for run in found["simulated"][policy])
        rows.append(
            (
                policy,
                f"{fmean(real):.0f}",
                f"{min(real):.0f}-{max(real):.0f}",
                f"{fmean(model):.0f}",
                f"{min(model):.0f}-{max(model):.0f}",
                f"{hit:.1%}",
                f"{hit_model:.1%}",
            )
        )
    shown = table(("policy", "not cached, real", "range", "sim", "range", "hit real", "sim"), rows)
    return f"{shown}\n\n{found['agreeing']} of {found['pairs']} pairs that the simulator tells apart are in its order"
