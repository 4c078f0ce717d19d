"""The router's metrics: one function for each event; what the replica table knows is read when Prometheus asks.

Events are counted in plain numbers, because all of them happen on one event loop: prometheus_client's counters take a lock
each time and cost more than the rest of a request's bookkeeping. Its exposition is used as it is.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol.status import SwapOutcome
from protocol.usage import Usage
from router.outcome import ContinuationOutcome, Outcome
from router.state.replicas import ReplicaTable
from router.types import Health

PREFIX = "intellect_router_"

# Seconds. From a cached answer of a small model to a long agent turn.
DURATION_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
FIRST_BYTE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Distribution:
    """How many values fell into each bucket, and their sum."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def expose(self, family: HistogramMetricFamily, labels: list[str], *, zeros: int = 0) -> None:
        """`zeros`: how many more values there were, all of them 0."""
        total, buckets = zeros, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        family.add_metric(labels, buckets, self._sum)


class RouterMetrics:
    """Labels come from configuration only: routes, models that replicas serve, replica ids, and closed sets of words."""

    def __init__(self, registry: CollectorRegistry, table: ReplicaTable) -> None:
        self._requests: defaultdict[tuple[str, str, Outcome], int] = defaultdict(int)
        self._durations: dict[tuple[str, str], Distribution] = {}
        self._first_bytes: dict[tuple[str, str], Distribution] = {}
        self._prompt_tokens: defaultdict[str, int] = defaultdict(int)
        self._cached_tokens: defaultdict[str, int] = defaultdict(int)
        self._completion_tokens: defaultdict[str, int] = defaultdict(int)
        self._retries = Counter(
            PREFIX + "upstream_retries",
            "Requests sent to another replica because one failed before its first byte.",
            ["replica"],
            registry=registry,
        )
        self._continuations = Counter(
            PREFIX + "continuations",
            "Streams whose replica failed in the middle, by whether another went on with them, or why not.",
            ["outcome"],
            registry=registry,
        )
        self._swaps = Counter(PREFIX + "replica_swaps", "Checkpoint swaps asked of replicas.", ["outcome"], registry=registry)
        for outcome in SwapOutcome:
            self._swaps.labels(outcome)
        Info(PREFIX + "build", "Version of the router.", registry=registry).info({"version": version("intellect-serve")})
        registry.register(_EventCollector(self))
        registry.register(_TableCollector(table))
        ProcessCollector(namespace="intellect_router", registry=registry)

    def request_ended(self, route: str, model: str, outcome: Outcome, duration_s: float) -> None:
        self._requests[route, model, outcome] += 1
        key = (route, model)
        durations = self._durations.get(key)
        if durations is None:
            durations = self._durations[key] = Distribution(DURATION_BUCKETS)
        durations.add(duration_s)

    def first_byte(self, route: str, model: str, seconds: float) -> None:
        key = (route, model)
        first_bytes = self._first_bytes.get(key)
        if first_bytes is None:
            first_bytes = self._first_bytes[key] = Distribution(FIRST_BYTE_BUCKETS)
        first_bytes.add(seconds)

    def tokens(self, model: str, usage: Usage) -> None:
        self._prompt_tokens[model] += usage.prompt
        self._completion_tokens[model] += usage.completion
        if usage.cached:
            self._cached_tokens[model] += usage.cached

    def retried(self, replica: str) -> None:
        self._retries.labels(replica).inc()

    def continuation(self, outcome: ContinuationOutcome) -> None:
        self._continuations.labels(outcome).inc()

    def replica_swapped(self, outcome: SwapOutcome) -> None:
        self._swaps.labels(outcome).inc()

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(PREFIX + "requests", "Requests by ending.", labels=["route", "model", "outcome"])
        for (route, model, outcome), count in self._requests.items():
            requests.add_metric([route, model, outcome.value], count)
        yield requests
        for name, text, distributions in (
            ("request_duration_seconds", "From a request's head to its ending.", self._durations),
            (
                "first_byte_seconds",
                "From a request's head to the first byte of the engine's answer, for completed requests.",
                self._first_bytes,
            ),
        ):
            family = HistogramMetricFamily(PREFIX + name, text, labels=["route", "model"])
            for key, distribution in distributions.items():
                distribution.expose(family, list(key))
            yield family
        for name, text, counts in (
            ("prompt_tokens", "Tokens of prompts, as the engines count them.", self._prompt_tokens),
            ("cached_tokens", "Those of them that an engine had in its prefix cache.", self._cached_tokens),
            ("completion_tokens", "Tokens of answers, as the engines count them.", self._completion_tokens),
        ):
            tokens = CounterMetricFamily(PREFIX + name, text, labels=["model"])
            for model, count in counts.items():
                tokens.add_metric([model], count)
            yield tokens


class _EventCollector(Collector):
    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.collect()


class _TableCollector(Collector):
    def __init__(self, table: ReplicaTable) -> None:
        self._table = table

    def collect(self) -> Iterator[GaugeMetricFamily]:
        in_flight = GaugeMetricFamily(
            PREFIX + "in_flight_requests", "Requests that a replica has been given and that have not ended.", labels=["replica"]
        )
        health = GaugeMetricFamily(
            PREFIX + "replica_health", "1 for the health a replica is in, 0 for the others.", labels=["replica", "health"]
        )
        checkpoint = GaugeMetricFamily(
            PREFIX + "replica_checkpoint", "1 for the version that a replica says it serves.", labels=["replica", "checkpoint"]
        )
        for replica in self._table.all():
            in_flight.add_metric([replica.id], replica.in_flight)
            for state in Health:
                health.add_metric([replica.id, state], float(replica.health is state))
            if replica.checkpoint is not None:
                checkpoint.add_metric([replica.id, replica.checkpoint], 1)
        departing = GaugeMetricFamily(
            PREFIX + "departing_requests",
            "Requests still running on replicas that were removed.",
            value=sum(replica.in_flight for replica in self._table.departing()),
        )
        yield from (in_flight, health, checkpoint, departing)
