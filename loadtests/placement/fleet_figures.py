"""What the comparison over HTTP looks at, of clients and engines and of the simulator alike. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from loadtests.placement.client import Seen
from router.sim.result import Result
from router.sim.statistics import percentile


class Counters(NamedTuple):
    """An engine's own counts of tokens, since it started."""

    prompt: float  # vllm:prompt_tokens
    hits: float  # vllm:prefix_cache_hits
    queries: float  # vllm:prefix_cache_queries

    @property
    def uncached(self) -> float:
        return self.prompt - self.hits

    def since(self, before: "Counters") -> "Counters":
        return Counters(*(now - then for now, then in zip(self, before, strict=True)))


class FleetFigures(NamedTuple):
    """Seconds, shares from 0 to 1, tokens."""

    requests: int
    ttft_p50_s: float
    ttft_p90_s: float
    hit_rate: float  # by the engines' counts
    uncached_tokens: float


def of_servers(seen: Sequence[Seen], counters: Sequence[Counters]) -> FleetFigures:
    waits = sorted(one.ttft_s for one in seen)
    queries = sum(counter.queries for counter in counters)
    hits = sum(counter.hits for counter in counters)
    uncached = sum(counter.uncached for counter in counters)
    return FleetFigures(len(seen), percentile(waits, 0.5), percentile(waits, 0.9), hits / queries, uncached)


def of_result(result: Result) -> FleetFigures:
    waits = sorted(record.ttft_s for record in result.requests if record.ttft_s is not None)
    prompts = sum(record.prompt_tokens for record in result.requests)
    hits = sum(record.cached_tokens for record in result.requests)
    return FleetFigures(len(waits), percentile(waits, 0.5), percentile(waits, 0.9), hits / prompts, float(prompts - hits))
