"""Metrics of placement: what waits, what was refused, and how well first tokens and cached tokens were predicted.

Events are counted in plain numbers, as in `router.edge.metrics`; the rest is read when Prometheus asks.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from router.admission.counts import Counts
from router.admission.priorities import RANKED
from router.edge.metrics import FIRST_BYTE_BUCKETS, PREFIX, Distribution
from router.policy.interface import Policy, Priority
from router.policy.predicted import Predicted
from router.state.decisions import Decision

# Seconds. Most requests do not wait at all; batch ones may for ten minutes.
WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Queue(Protocol):
    """The requests that wait in the router."""

    @property
    def counts(self) -> Counts: ...

    def waiting_of(self, priority: Priority) -> int: ...

    def tokens_of(self, priority: Priority) -> float: ...


class PlacementMetrics(Collector):
    """Labels are closed sets of words, served models and replica ids."""

    def __init__(self, queue: Queue, policy: Policy) -> None:
        self._queue = queue
        self._policy = policy if isinstance(policy, Predicted) else None  # others keep no accounts
        self._waits = {priority: Distribution(WAIT_BUCKETS) for priority in Priority}
        self._unwaited = dict.fromkeys(Priority, 0)  # the common case, at a fraction of the cost
        self._early = Distribution(FIRST_BYTE_BUCKETS)
        self._late = Distribution(FIRST_BYTE_BUCKETS)
        self._predicted_cached: defaultdict[str, float] = defaultdict(float)
        self._found_cached: defaultdict[str, int] = defaultdict(int)

    def placed(self, priority: Priority, waited_s: float) -> None:
        """Each request that was placed, when it ends."""
        if waited_s:
            self._waits[priority].add(waited_s)
        else:
            self._unwaited[priority] += 1

    def noted(self, decision: Decision) -> None:
        """Those of them whose decision is noted."""
        predicted_s, ttft_s = decision.predicted_s, decision.ttft_s
        if predicted_s is None:
            return
        if ttft_s is not None:
            if ttft_s > predicted_s:
                self._late.add(ttft_s - predicted_s)
            else:
                self._early.add(predicted_s - ttft_s)
        predicted, found = decision.predicted_cached_tokens, decision.cached_tokens
        if predicted is not None and found is not None:
            self._predicted_cached[decision.model] += predicted
            self._found_cached[decision.model] += found

    def collect(self) -> Iterator[Metric]:
        yield from self._of_predictions()
        yield from self._of_the_queue()
        yield from self._of_replicas()

    def _of_predictions(self) -> Iterator[Metric]:
        errors = HistogramMetricFamily(
            PREFIX + "predicted_first_token_error_seconds",
            "By how much a first token came before or after its prediction.",
            labels=["came"],
        )
        self._early.expose(errors, ["early"])
        self._late.expose(errors, ["late"])
        yield errors
        for name, text, counts in (
            (
                "predicted_cached_tokens",
                "Tokens of prompts predicted to be cached, where engines tell.",
                self._predicted_cached,
            ),
            ("found_cached_tokens", "Tokens of the same prompts that were cached.", self._found_cached),
        ):
            tokens = CounterMetricFamily(PREFIX + name, text, labels=["model"])
            for model, count in counts.items():
                tokens.add_metric([model], count)
            yield tokens

    def _of_the_queue(self) -> Iterator[Metric]:
        queue = self._queue
        waits = HistogramMetricFamily(
            PREFIX + "queue_wait_seconds", "From arrival until a replica could start a request.", labels=["priority"]
        )
        requests = GaugeMetricFamily(PREFIX + "waiting_requests", "Requests that wait in the router.", labels=["priority"])
        tokens = GaugeMetricFamily(
            PREFIX + "waiting_tokens", "Their estimated tokens, those of answers counted twice.", labels=["priority"]
        )
        promoted = CounterMetricFamily(
            PREFIX + "promoted_requests", "Requests that went out of turn, having waited long.", labels=["priority"]
        )
        for priority in RANKED:
            labels = [priority.value]
            self._waits[priority].expose(waits, labels, zeros=self._unwaited[priority])
            requests.add_metric(labels, queue.waiting_of(priority))
            tokens.add_metric(labels, queue.tokens_of(priority))
            promoted.add_metric(labels, queue.counts.promoted[priority])
        shed = CounterMetricFamily(PREFIX + "shed_requests", "Requests refused on arrival.", labels=["priority", "reason"])
        for (priority, reason), count in queue.counts.shed.items():
            shed.add_metric([priority.value, reason.value], count)
        ended = CounterMetricFamily(
            PREFIX + "queue_endings", "Requests that waited, by how that ended.", labels=["priority", "ending"]
        )
        for (priority, ending), count in queue.counts.ended.items():
            ended.add_metric([priority.value, ending.value], count)
        yield from (waits, requests, tokens, promoted, shed, ended)

    def _of_replicas(self) -> Iterator[Metric]:
        chunks = GaugeMetricFamily(
            PREFIX + "index_chunks", "Chunks of prompts that a replica is believed to have cached.", labels=["replica"]
        )
        usage = GaugeMetricFamily(
            PREFIX + "predicted_kv_usage_ratio",
            "Share of a replica's KV cache that its requests need when their answers are whole.",
            labels=["replica"],
        )
        if self._policy is not None:
            for account in self._policy.accounts():
                chunks.add_metric([account.replica], account.chunks)
                if account.capacity_tokens:
                    usage.add_metric([account.replica], account.kv_tokens / account.capacity_tokens)
        yield from (chunks, usage)
