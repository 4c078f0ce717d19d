"""The agent's metrics. One method per event; the registry is the caller's."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from protocol.status import ReplicaState, ReplicaStatus, SwapOutcome, SwapReport

# From a cache reset (milliseconds) to loading 213 GB from a network disk.
_PHASE_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800)


class AgentMetrics:
    def __init__(self, registry: CollectorRegistry, *, version: str, preset: str) -> None:
        self._state = Gauge(
            "intellect_replica_state", "1 for the state the replica is in, 0 for the others", ["state"], registry=registry
        )
        self._engine_up = Gauge("intellect_replica_engine_up", "1 while the engine answers", registry=registry)
        self._restarts = Counter("intellect_replica_engine_restarts", "Engine starts after the first one", registry=registry)
        self._swaps = Counter("intellect_replica_swaps", "Checkpoint swaps by how they ended", ["outcome"], registry=registry)
        for outcome in SwapOutcome:
            self._swaps.labels(outcome)  # so that a rate over the first failure is not missing its zero
        self._phases = Histogram(
            "intellect_replica_swap_phase_seconds",
            "Time spent in each phase of a checkpoint swap",
            ["phase"],
            buckets=_PHASE_BUCKETS_S,
            registry=registry,
        )
        self._checkpoint = Gauge(
            "intellect_replica_checkpoint_info", "The checkpoint served; always 1", ["version", "epoch"], registry=registry
        )
        Info("intellect_replica_build", "What this agent is", registry=registry).info({"version": version, "preset": preset})

    def engine_restarted(self) -> None:
        self._restarts.inc()

    def swap_ended(self, report: SwapReport) -> None:
        self._swaps.labels(report.outcome).inc()
        for phase, seconds in report.phases.items():
            self._phases.labels(phase).observe(seconds)

    def show(self, status: ReplicaStatus, *, engine_up: bool) -> None:
        """Sets the gauges to what is true now; called before each scrape."""
        for state in ReplicaState:
            self._state.labels(state).set(state is status.state)
        self._engine_up.set(engine_up)
        self._checkpoint.clear()  # only one version is served at a time
        self._checkpoint.labels(status.checkpoint, str(status.epoch)).set(1)
