"""What is known of the other routers, as metrics."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.edge.sharing import SharingReport, SharingState

PREFIX = "intellect_router_sharing_"


class SharingCollector(Collector):
    def __init__(self, report: Callable[[], SharingReport]) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        report = self._report()
        state = GaugeMetricFamily(
            PREFIX + "state", "1 for the state that sharing placements over redis is in, 0 for the others.", labels=["state"]
        )
        for one in SharingState:
            state.add_metric([one.value], float(report.state is one))
        yield state
        yield GaugeMetricFamily(PREFIX + "peers", "Other routers that are heard.", value=report.peers)
        yield GaugeMetricFamily(
            PREFIX + "remote_requests", "Placements of other routers that are reserved here.", value=report.remote_open
        )
        for name, text, count in (
            ("batches_sent", "Messages sent to the other routers.", report.batches_sent),
            ("batches_received", "Messages of other routers.", report.batches_received),
            ("messages_dropped", "Events not sent, or not known to have arrived.", report.messages_dropped),
            ("gaps", "Times that messages of a router were missing; its next snapshot mends it.", report.gaps),
            ("malformed", "Messages that could not be read.", report.malformed),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=count)
