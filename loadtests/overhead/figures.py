"""What is measured, and how many measurements become one figure. Pure."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """A group of figures that are measured together."""

    REQUESTS = "requests"
    CHUNKS = "chunks"
    LATENCY = "latency"
    MEMORY = "memory"


class Metric(StrEnum):
    REQUEST_400 = "cpu_us_per_request_400"
    REQUEST_8000 = "cpu_us_per_request_8000"
    REQUEST_60000 = "cpu_us_per_request_60000"
    RATE_400 = "requests_per_s_400"
    RATE_8000 = "requests_per_s_8000"
    RATE_60000 = "requests_per_s_60000"
    CHUNK = "cpu_us_per_chunk"
    CHUNK_RATE = "chunks_per_s"
    LATENCY_RATE = "latency_requests_per_s"
    LATENCY_P50 = "added_latency_p50_us"
    LATENCY_P99 = "added_latency_p99_us"
    IDLE_STREAM = "idle_stream_kb"
    ERRORS = "errors"


# By the bytes of the prompt: what a request costs, and how many pass.
REQUEST_METRICS = {
    400: (Metric.REQUEST_400, Metric.RATE_400),
    8_000: (Metric.REQUEST_8000, Metric.RATE_8000),
    60_000: (Metric.REQUEST_60000, Metric.RATE_60000),
}


@dataclass(frozen=True, slots=True)
class Figure:
    metric: Metric
    value: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One figure of one router in one round."""

    router: str
    round: int
    metric: Metric
    value: float


Summary = Mapping[str, Mapping[Metric, float]]


def summarize(samples: Iterable[Sample]) -> Summary:
    """By router and metric the median over the rounds; of the errors their sum, since a single one counts."""
    values: defaultdict[str, defaultdict[Metric, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        values[sample.router][sample.metric].append(sample.value)
    return {
        router: {
            metric: sum(taken) if metric is Metric.ERRORS else statistics.median(taken) for metric, taken in of_router.items()
        }
        for router, of_router in values.items()
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the ascending values that at least `share` (0 to 1) of them do not exceed.

    Raises:
        ValueError: there are no values.
    """
    if not ordered:
        raise ValueError("no values to take a percentile of")
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
