"""Metrics of several worker processes as those of one router: what counts is added up, what describes is taken once."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

# Gauges in these units count what each worker has of its own; the others describe what all workers see alike.
_ADDED_UNITS = ("_requests", "_tokens", "_bytes", "_fds")


class Family(msgspec.Struct, frozen=True, array_like=True):
    """One metric with its series, as prometheus_client collects it."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]  # name, labels, value

    @property
    def counts_on(self) -> bool:
        """Whether it counts from the start of its process, so that its value must not be lost with it."""
        return self.kind in ("counter", "histogram", "summary")


class _Last(msgspec.Struct, array_like=True):
    incarnation: int
    families: list[Family]


class WorkerMetrics(msgspec.Struct):
    """What each worker said last, and what those counted that have been started anew since."""

    last: dict[int, _Last] = {}
    ended: list[Family] = []

    def heard(self, worker: int, incarnation: int, families: list[Family]) -> None:
        before = self.last.get(worker)
        if before is not None and before.incarnation != incarnation:
            self.ended = merged([self.ended, _counting(before.families)])
        self.last[worker] = _Last(incarnation, families)

    def missed(self, worker: int) -> None:
        """It did not answer: what it counted stays, but nothing is in flight there that anyone knows of."""
        before = self.last.get(worker)
        if before is not None:
            before.families = _counting(before.families)

    def all(self) -> list[Family]:
        return merged([*(last.families for _, last in sorted(self.last.items())), self.ended])


def families_of(registry: CollectorRegistry) -> list[Family]:
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [(sample.name, sample.labels, sample.value) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def merged(parts: Iterable[Sequence[Family]]) -> list[Family]:
    """Counters and histograms added up, gauges too where each worker has its own; of the others the greatest value."""
    heads: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for part in parts:
        for family in part:
            heads.setdefault(family.name, family)
            of_family = values.setdefault(family.name, {})
            is_added = family.counts_on or family.name.endswith(_ADDED_UNITS)
            for name, labels, value in family.samples:
                key = (name, tuple(labels.items()))
                before = of_family.get(key)
                if before is None:
                    of_family[key] = value
                elif name.endswith("_created"):
                    of_family[key] = min(before, value)
                else:
                    of_family[key] = before + value if is_added else max(before, value)
    return [
        Family(name, head.text, head.kind, [(sample, dict(labels), value) for (sample, labels), value in values[name].items()])
        for name, head in heads.items()
    ]


class _Exposed(Collector):
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels, value)
            yield metric


def as_registry(families: Sequence[Family]) -> CollectorRegistry:
    """For prometheus_client's exposition."""
    registry = CollectorRegistry()
    registry.register(_Exposed(families))
    return registry


def _counting(families: Sequence[Family]) -> list[Family]:
    return [family for family in families if family.counts_on]
