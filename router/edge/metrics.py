"""The router's metrics: one function for each event; what the replica table knows is read when Prometheus asks."""

from collections.abc import Iterator
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from protocol.status import SwapOutcome
from router.outcome import Outcome
from router.state.replicas import ReplicaTable
from router.types import Health

PREFIX = "intellect_router_"

# Seconds. From a cached answer of a small model to a long agent turn.
DURATION_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
FIRST_BYTE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class RouterMetrics:
    """Labels come from configuration only: routes, models that replicas serve, replica ids, and our own enums."""

    def __init__(self, registry: CollectorRegistry, table: ReplicaTable) -> None:
        self._requests = Counter(PREFIX + "requests", "Requests by ending.", ["route", "model", "outcome"], registry=registry)
        self._duration = Histogram(
            PREFIX + "request_duration_seconds",
            "From a request's head to its ending.",
            ["route", "model"],
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self._first_byte = Histogram(
            PREFIX + "first_byte_seconds",
            "From a request's head to the first byte of the engine's answer, for answers with status 200.",
            ["route", "model"],
            buckets=FIRST_BYTE_BUCKETS,
            registry=registry,
        )
        self._retries = Counter(
            PREFIX + "upstream_retries",
            "Requests sent to another replica because one failed before its first byte.",
            ["replica"],
            registry=registry,
        )
        self._swaps = Counter(PREFIX + "replica_swaps", "Checkpoint swaps asked of replicas.", ["outcome"], registry=registry)
        for outcome in SwapOutcome:
            self._swaps.labels(outcome)
        Info(PREFIX + "build", "Version of the router.", registry=registry).info({"version": version("intellect-serve")})
        registry.register(_TableCollector(table))
        ProcessCollector(namespace="intellect_router", registry=registry)
        self._by_ending: dict[tuple[str, str, Outcome], tuple[Counter, Histogram]] = {}
        self._by_route: dict[tuple[str, str], Histogram] = {}

    def request_ended(self, route: str, model: str, outcome: Outcome, duration_s: float) -> None:
        key = (route, model, outcome)
        pair = self._by_ending.get(key)
        if pair is None:
            pair = self._requests.labels(route, model, outcome), self._duration.labels(route, model)
            self._by_ending[key] = pair
        counter, histogram = pair
        counter.inc()
        histogram.observe(duration_s)

    def first_byte(self, route: str, model: str, seconds: float) -> None:
        histogram = self._by_route.get((route, model))
        if histogram is None:
            histogram = self._by_route[(route, model)] = self._first_byte.labels(route, model)
        histogram.observe(seconds)

    def retried(self, replica: str) -> None:
        self._retries.labels(replica).inc()

    def replica_swapped(self, outcome: SwapOutcome) -> None:
        self._swaps.labels(outcome).inc()


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
