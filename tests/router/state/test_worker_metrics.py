"""One scrape of a router with several workers reads like one of a single process, and its counters never fall."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from router.state.worker_metrics import Family, WorkerMetrics, as_registry, families_of


def worker(requests: int, *, in_flight: int = 0, is_ready: bool = True) -> list[Family]:
    registry = CollectorRegistry()
    Counter("x_requests", "Requests.", ["route"], registry=registry).labels("/v1").inc(requests)
    durations = Histogram("x_seconds", "Time.", buckets=(1, 5), registry=registry)
    for _ in range(requests):
        durations.observe(2)
    Gauge("x_in_flight_requests", "Now.", ["replica"], registry=registry).labels("a:1").set(in_flight)
    Gauge("x_health", "Health.", ["replica"], registry=registry).labels("a:1").set(is_ready)
    return families_of(registry)


def value(metrics: WorkerMetrics, series: str) -> float:
    lines = generate_latest(as_registry(metrics.all())).decode().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{series} ")]
    return float(line.rpartition(" ")[2])


def test_what_counts_is_added_and_what_describes_is_not() -> None:
    """Two workers with three requests each have six in flight, behind one replica that is healthy once."""
    metrics = WorkerMetrics()
    metrics.heard(0, 1, worker(10, in_flight=3))
    metrics.heard(1, 1, worker(5, in_flight=3, is_ready=False))
    assert value(metrics, 'x_requests_total{route="/v1"}') == 15
    assert value(metrics, 'x_seconds_bucket{le="1.0"}') == 0
    assert value(metrics, 'x_seconds_bucket{le="5.0"}') == value(metrics, "x_seconds_count") == 15
    assert value(metrics, "x_seconds_sum") == 30
    assert value(metrics, 'x_in_flight_requests{replica="a:1"}') == 6
    assert value(metrics, 'x_health{replica="a:1"}') == 1


def test_one_worker_alone_reads_as_its_own_registry_does() -> None:
    """Nothing is lost or renamed on the way."""
    registry = CollectorRegistry()
    Counter("x_requests", "Requests.", ["route"], registry=registry).labels("/v1").inc(3)
    Histogram("x_seconds", "Time.", registry=registry).observe(0.3)
    Gauge("x_health", 'With "quotes" and \\ in it.', ["replica"], registry=registry).labels('a"b\\c').set(1)
    metrics = WorkerMetrics()
    metrics.heard(0, 1, families_of(registry))
    assert generate_latest(as_registry(metrics.all())) == generate_latest(registry)


def test_a_worker_that_was_started_anew_goes_on_counting_where_it_was() -> None:
    """Prometheus would take a falling sum for a restart of everything and count all of it again."""
    metrics = WorkerMetrics()
    metrics.heard(0, 1, worker(10))
    metrics.heard(1, 1, worker(7, in_flight=4))
    metrics.missed(1)
    assert value(metrics, 'x_requests_total{route="/v1"}') == 17
    assert value(metrics, 'x_in_flight_requests{replica="a:1"}') == 0
    metrics.missed(1)
    for incarnation, requests in ((2, 1), (2, 2), (3, 1)):
        metrics.heard(1, incarnation, worker(requests, in_flight=1))
    assert value(metrics, 'x_requests_total{route="/v1"}') == 10 + 7 + 2 + 1
    assert value(metrics, 'x_in_flight_requests{replica="a:1"}') == 1


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("count"), st.integers(0, 2), st.integers(0, 5)),
            st.tuples(st.sampled_from(["restart", "miss", "keep"]), st.integers(0, 2), st.just(0)),
        ),
        max_size=20,
    )
)
def test_the_sum_never_falls_and_misses_no_request_that_was_seen(steps: list[tuple[str, int, int]]) -> None:
    """Whichever workers die, worker 0 with its memory included."""
    metrics = WorkerMetrics()
    counts, incarnations, total = [0, 0, 0], [1, 1, 1], 0
    for index in range(3):
        metrics.heard(index, 1, worker(0))
    for action, index, number in steps:
        if action == "miss":
            metrics.missed(index)
        elif action == "keep":
            metrics = msgspec.msgpack.decode(msgspec.msgpack.encode(metrics), type=WorkerMetrics)
        elif action == "restart":
            counts[index] = 0
            incarnations[index] += 1
        else:
            counts[index] += number
            total += number
        if action != "miss":
            metrics.heard(index, incarnations[index], worker(counts[index]))
        assert value(metrics, 'x_requests_total{route="/v1"}') == total
