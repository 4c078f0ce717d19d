"""Whoever looks at a dashboard sees what waits, what was refused, and how well placement predicts."""

import random

from prometheus_client import CollectorRegistry

from protocol.usage import Usage
from router.admission.dispatcher import Dispatcher
from router.admission.priorities import AdmissionSettings, ClassLimits
from router.admission.waiting import Shed, Waiting
from router.edge.placement_metrics import PlacementMetrics
from router.policy.interface import PlacementRequest, Policy, Priority, ReplicaFacts
from router.policy.predicted import Predicted
from router.state.decisions import Decision
from tests.router.admission.slots import A, Slots, asks, at
from tests.router.policy.prompts import prompt, text

PREFIX = "intellect_router_"


def read(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(PREFIX + name, labels)


def ended(*, waited_s: float = 0.0, predicted_s: float | None = None, ttft_s: float | None = None) -> Decision:
    return Decision(
        time=1.0,
        request_id="r",
        outcome="completed",
        model="m",
        tenant="",
        session="",
        priority=Priority.BATCH,
        prompt_bytes=9,
        replica=A,
        rank=0,
        attempts=1,
        waited_s=waited_s,
        predicted_s=predicted_s,
        ttft_s=ttft_s,
        predicted_cached_tokens=None if predicted_s is None else 50.5,
        cached_tokens=60,
        expected_tokens=None,
        output_tokens=None,
    )


def registered(metrics: PlacementMetrics) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(metrics)
    return registry


def test_predictions_are_compared_with_what_came() -> None:
    """Early and late apart, so that a bias shows; a request of which nothing was predicted counts only as placed."""
    metrics = PlacementMetrics(Dispatcher(Policy()), Policy())
    for predicted_s, ttft_s in ((1.0, 1.25), (1.0, 0.5), (2.0, 0.5)):
        metrics.placed(Priority.BATCH, 0.0)
        metrics.noted(ended(predicted_s=predicted_s, ttft_s=ttft_s))
    metrics.placed(Priority.BATCH, 7.0)
    metrics.noted(ended(waited_s=7.0, ttft_s=1.0))
    registry = registered(metrics)
    assert read(registry, "predicted_first_token_error_seconds_count", came="late") == 1
    assert read(registry, "predicted_first_token_error_seconds_sum", came="late") == 0.25
    assert read(registry, "predicted_first_token_error_seconds_count", came="early") == 2
    assert read(registry, "predicted_first_token_error_seconds_sum", came="early") == 2.0
    assert read(registry, "predicted_cached_tokens_total", model="m") == 3 * 50.5
    assert read(registry, "found_cached_tokens_total", model="m") == 180
    assert read(registry, "queue_wait_seconds_count", priority="batch") == 4
    assert read(registry, "queue_wait_seconds_sum", priority="batch") == 7.0
    assert read(registry, "queue_wait_seconds_bucket", priority="batch", le="0.001") == 3
    assert read(registry, "queue_wait_seconds_bucket", priority="batch", le="10.0") == 4


def test_the_queue_shows_what_waits_and_how_waiting_ended() -> None:
    """By priority: how much waits now, what was refused and why, what went out of turn."""
    limits = {priority: ClassLimits(max_wait_s=20.0, promote_after_s=5.0, waiting_max=2) for priority in Priority}
    policy = Slots()
    dispatcher = Dispatcher(policy, AdmissionSettings(limits=limits))
    registry = registered(PlacementMetrics(dispatcher, policy))
    running = dispatcher.submit(asks(), at(A), 0.0)
    waiting = [dispatcher.submit(asks(tenant), at(A), 0.0) for tenant in "tu"]
    assert all(isinstance(one, Waiting) for one in waiting)
    assert isinstance(dispatcher.submit(asks("v"), at(A), 0.0), Shed)
    assert isinstance(dispatcher.submit(asks("v"), at(), 0.0), Shed)
    assert read(registry, "waiting_requests", priority="default") == 2
    tokens = read(registry, "waiting_tokens", priority="default")
    assert tokens is not None
    assert tokens >= 200
    assert read(registry, "waiting_requests", priority="interactive") == 0
    assert read(registry, "shed_requests_total", priority="default", reason="queue_full") == 1
    assert read(registry, "shed_requests_total", priority="default", reason="no_replica") == 1
    assert read(registry, "shed_requests_total", priority="default", reason="predicted_wait") == 0
    assert not isinstance(running, Waiting | Shed)
    assert isinstance(dispatcher.submit(asks("w", priority=Priority.INTERACTIVE), at(A), 5.9), Waiting)
    dispatcher.ended(running, Usage(100, 0), 6.0)
    assert len(dispatcher.due(6.0)) == 1
    assert len(dispatcher.expired(30.0)) == 2
    assert read(registry, "promoted_requests_total", priority="default") == 1
    assert read(registry, "queue_endings_total", priority="default", ending="dispatched") == 1
    assert read(registry, "queue_endings_total", priority="default", ending="expired") == 1
    assert read(registry, "waiting_requests", priority="default") == 0


def test_each_replica_shows_what_it_is_believed_to_hold() -> None:
    """Chunks in its cache, and the share of it that running requests need; all ranks of a replica together."""
    policy = Predicted(random.Random(1))
    policy.changed(ReplicaFacts(A, kv_capacity_tokens=10_000, ranks=2))
    registry = registered(PlacementMetrics(Dispatcher(policy), policy))
    assert read(registry, "index_chunks", replica=A) == 0
    assert read(registry, "predicted_kv_usage_ratio", replica=A) == 0
    ticket = policy.place(PlacementRequest("m", prompt(text("a", 16)), output_max=100), (A,), 1.0)
    assert ticket is not None
    assert read(registry, "index_chunks", replica=A) == 7
    usage = read(registry, "predicted_kv_usage_ratio", replica=A)
    assert usage is not None
    assert 0.05 < usage < 0.06  # about 1024 + 100 of 20 000 tokens
    policy.ended(ticket, None, 2.0)
    assert read(registry, "predicted_kv_usage_ratio", replica=A) == 0
    assert read(registered(PlacementMetrics(Dispatcher(Policy()), Policy())), "index_chunks", replica=A) is None
