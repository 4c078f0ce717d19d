"""Check B: over HTTP, before simulated engines, policies rank as they do in the simulator."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from loadtests.placement.client import player
from loadtests.placement.fleet_figures import FleetFigures, of_result, of_servers
from loadtests.placement.ranks import agreement, kendall
from loadtests.placement.scripts import Prefixes, Range, Script, Talks, in_order, jittered, prefix_scripts, talk_scripts
from loadtests.placement.simulated import run_simulated
from loadtests.placement.spelling import WORDS
from loadtests.placement.stack import running_router, simulated_engines
from loadtests.placement.tables import table
from router.policy.catalogue import PolicyName
from router.sim.fleet import EngineLimits, FleetSettings
from router.sim.timing import StepTiming

REPLICAS = 4
# A slow accelerator with a small cache: little work for the machine that simulates it, and yet queues and evictions. All
# beginnings fit into the caches of the fleet, but not into one replica's.
LIMITS = EngineLimits(kv_capacity_tokens=32_768, max_num_seqs=64, max_num_batched_tokens=2048, reserve_full_prompt=False)
TIMING = StepTiming(base_s=0.012, prefill_tokens_per_s=4000.0, per_sequence_s=4e-4, per_context_token_s=1e-7)
# Client, router and engines take so long for a request besides, there and back.
NETWORK_DELAY_S = 0.001
_SINGLES = Prefixes(shared=40, tokens=1600, question=Range(40, 200), output=Range(4, 16), rate=11.0, skew=1.0)
_TALKS = Talks(systems=6, system_tokens=800, step=Range(60, 240), output=Range(8, 24), turns=Range(2, 6), pause_s=1.5, rate=1.5)
# Policies whose figures differ by less are not told apart, whatever the simulator's seeds say.
APART = 0.05
SIMULATED_SEEDS = 10
# Times over HTTP are never the same twice; near saturation a little decides over much.
JITTER_S = 0.02
METRICS = ("ttft_p90_s", "hit_rate")


def traffic(seconds: float, seed: int) -> list[Script]:
    rng = Random(seed)
    singles = prefix_scripts(_SINGLES, seconds, rng)
    return in_order(singles, talk_scripts(_TALKS, seconds, rng))


def simulate_order(scripts: Sequence[Script], policies: Sequence[PolicyName]) -> dict[str, list[FleetFigures]]:
    """Each policy with several seeds of its own on the same traffic, but for a jitter of its times."""
    fleet = FleetSettings(replicas=REPLICAS, limits=LIMITS, timing=TIMING, network_delay_s=NETWORK_DELAY_S)
    return {
        policy: [
            of_result(
                run_simulated(
                    jittered(scripts, JITTER_S, Random(seed)),
                    fleet,
                    policy,
                    bytes_per_token=WORDS.bytes_per_token,
                    seed=seed,
                )
            )
            for seed in range(SIMULATED_SEEDS)
        ]
        for policy in policies
    }


async def measure_order(
    scripts: Sequence[Script], policies: Sequence[PolicyName], folder: Path, say: Callable[[str], None]
) -> dict[str, FleetFigures]:
    """Each policy on a router of its own, before the same engines with emptied caches. Raises Problem, PlayFailed."""
    found: dict[str, FleetFigures] = {}
    async with simulated_engines(folder, REPLICAS, LIMITS, TIMING) as engines:
        for policy in policies:
            for engine in engines:
                await engine.forget()
            before = [await engine.counters() for engine in engines]
            async with running_router(folder, engines, policy) as url, player(url) as client:
                seen = await client.play(scripts, WORDS)
            counts = [(await engine.counters()).since(then) for engine, then in zip(engines, before, strict=True)]
            found[policy] = of_servers(seen, counts)
            say(f"{policy}: {found[policy]}")
    return found


def judge(simulated: Mapping[str, Sequence[FleetFigures]], measured: Mapping[str, FleetFigures]) -> dict[str, Any]:
    """The rank correlation of each metric, and how many of the pairs that the simulator tells apart lie as it says."""
    verdict: dict[str, Any] = {}
    for metric in METRICS:
        runs = {policy: [getattr(run, metric) for run in own] for policy, own in simulated.items()}
        real = {policy: getattr(own, metric) for policy, own in measured.items()}
        pairs = agreement(runs, real, apart=APART)
        tau = kendall({policy: median(own) for policy, own in runs.items()}, real)
        verdict[metric] = {"kendall": tau, "pairs": pairs.pairs, "agreeing": pairs.agreeing}
    return verdict


def text(found: Mapping[str, Any]) -> str:
    head = ("policy", "TTFT p90 HTTP", "sim", "sim range", "p50 HTTP", "sim", "hit HTTP", "sim", "sim range")
    rows = []
    for policy, own in found["measured"].items():
        runs = found["simulated"][policy]
        waits, hits = [run["ttft_p90_s"] for run in runs], [run["hit_rate"] for run in runs]
        rows.append(
            (
                policy,
                f"{own['ttft_p90_s']:.3f} s",
                f"{median(waits):.3f} s",
                f"{min(waits):.3f}-{max(waits):.3f}",
                f"{own['ttft_p50_s']:.3f} s",
                f"{median(run['ttft_p50_s'] for run in runs):.3f} s",
                f"{own['hit_rate']:.1%}",
                f"{median(hits):.1%}",
                f"{min(hits):.1%}-{max(hits):.1%}",
            )
        )
    rows.sort(key=lambda row: row[2])
    lines = [table(head, rows), ""]
    for metric, verdict in found["verdict"].items():
        lines.append(
            f"{metric}: Kendall's tau {verdict['kendall']:.2f}; "
            f"{verdict['agreeing']} of {verdict['pairs']} pairs that the simulator tells apart are in its order"
        )
    return "\n".join(lines)
