"""What is known from the engines' KV events, as metrics."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.edge.kv_events import KvEvents
from router.edge.prompt_tokens import PromptTokens
from router.state.kv_source import KvMode
from router.state.replicas import ReplicaTable

PREFIX = "intellect_router_kv_"
_LABELS = ["replica", "rank"]


class KvCollector(Collector):
    """`events` and `prompts` are None where events are not followed: every source is off then."""

    def __init__(self, table: ReplicaTable, events: KvEvents | None = None, prompts: PromptTokens | None = None) -> None:
        self._table = table
        self._events = events
        self._prompts = prompts

    def collect(self) -> Iterator[Metric]:
        yield self._modes()
        blocks = GaugeMetricFamily(PREFIX + "blocks", "Blocks that a rank is known to hold.", labels=_LABELS)
        gaps = CounterMetricFamily(PREFIX + "event_gaps", "Times that messages of a rank were missing.", labels=_LABELS)
        losses = CounterMetricFamily(
            PREFIX + "event_losses", "Times that they were missing for good, and what was known was forgotten.", labels=_LABELS
        )
        malformed = CounterMetricFamily(PREFIX + "events_malformed", "Messages that could not be read.", labels=_LABELS)
        unrooted = CounterMetricFamily(
            PREFIX + "blocks_unrooted",
            "Blocks told of that cannot be used: those before them are not known.",
            labels=_LABELS,
        )
        for source in () if self._events is None else self._events.sources():
            labels = [source.replica, str(source.rank)]
            blocks.add_metric(labels, source.blocks)
            gaps.add_metric(labels, source.gaps)
            losses.add_metric(labels, source.losses)
            malformed.add_metric(labels, source.malformed)
            unrooted.add_metric(labels, source.unrooted)
        yield from (blocks, gaps, losses, malformed, unrooted)
        tokenizations = CounterMetricFamily(
            PREFIX + "prompt_tokenizations", "Prompts whose tokens an engine was asked for.", labels=["outcome"]
        )
        prompts = self._prompts
        for outcome, count in (
            ("asked", 0 if prompts is None else prompts.asked),
            ("failed", 0 if prompts is None else prompts.failed),
            ("skipped", 0 if prompts is None else prompts.skipped),
        ):
            tokenizations.add_metric([outcome], count)
        yield tokenizations

    def _modes(self) -> Metric:
        family = GaugeMetricFamily(
            PREFIX + "events_mode",
            "1 for how far a rank's KV events tell what it holds, 0 for the others.",
            labels=[*_LABELS, "mode"],
        )
        for replica in self._table.all():
            for rank in range(max(1, replica.facts.ranks)):
                mode = KvMode.OFF if self._events is None else self._events.mode(replica.id, rank)
                for one in KvMode:
                    family.add_metric([replica.id, str(rank), one.value], float(mode is one))
        return family
