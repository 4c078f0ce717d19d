"""Prometheus metrics of the simulated engine under vLLM's names and labels, on a registry of their own.

One function per event. Gauges are read from the scheduler when somebody scrapes, so they are never behind.
"""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from server.sim_generation import FinishReason
from server.sim_scheduler import Scheduler, SequenceState, StepResult
from server.sim_settings import SchedulerSettings

# The bucket families of vLLM 0.32 (v1/metrics/buckets.py).
_LATENCY_BUCKETS = (
    (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
    + (120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
)  # fmt: skip
_FIRST_TOKEN_BUCKETS = (
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
    + (10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
)  # fmt: skip
_INTER_TOKEN_BUCKETS = (
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
)  # fmt: skip
_ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
_N_BUCKETS = (1, 2, 5, 10, 20)
_ADMISSION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")


class EngineMetrics:
    def __init__(self, *, model_name: str, settings: SchedulerSettings) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        token_buckets = _one_two_five(settings.max_model_len)

        self._queries = self._counter("prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.")
        self._hits = self._counter("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.")
        self._preemptions = self._counter("num_preemptions", "Cumulative number of preemption from the engine.")
        self._prompt_tokens = self._counter("prompt_tokens", "Number of prefill tokens processed.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Number of cached prompt tokens (local + external).")
        self._generated = self._counter("generation_tokens", "Number of generation tokens processed.")
        by_source = self._labelled_counter("prompt_tokens_by_source", "Number of prompt tokens by source.", "source")
        self._computed_by_source = by_source("local_compute")
        self._cached_by_source = by_source("local_cache_hit")
        by_source("external_kv_transfer")
        success = self._labelled_counter("request_success", "Count of successfully processed requests.", "finished_reason")
        self._success = {reason: success(reason.value) for reason in FinishReason}
        rejections = Counter(
            "vllm:admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
            ["model_name", "reason"],
            registry=self._registry,
        )
        for reason in _ADMISSION_REASONS:
            rejections.labels(model_name=model_name, reason=reason)

        self._iteration_tokens = self._histogram(
            "iteration_tokens_total", "Histogram of number of tokens per engine_step.", _ITERATION_BUCKETS
        )
        self._prompt_sizes = self._histogram("request_prompt_tokens", "Number of prefill tokens processed.", token_buckets)
        self._answer_sizes = self._histogram(
            "request_generation_tokens", "Number of generation tokens processed.", token_buckets
        )
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "Histogram of the max_tokens request parameter.", token_buckets
        )
        self._n = self._histogram("request_params_n", "Histogram of the n request parameter.", _N_BUCKETS)
        self._prefill_computed = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
            token_buckets,
        )
        self._request_preemptions = self._histogram(
            "request_num_preemptions", "Histogram of the number of times a request was preempted.", _PREEMPTION_BUCKETS
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Histogram of time to first token in seconds.", _FIRST_TOKEN_BUCKETS
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", _INTER_TOKEN_BUCKETS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Histogram of time_per_output_token_seconds per request.",
            _INTER_TOKEN_BUCKETS,
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", _LATENCY_BUCKETS
        )
        self._queue_time = self._histogram(
            "request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", _LATENCY_BUCKETS
        )
        self._inference_time = self._histogram(
            "request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", _LATENCY_BUCKETS
        )
        self._prefill_time = self._histogram(
            "request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", _LATENCY_BUCKETS
        )
        self._decode_time = self._histogram(
            "request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", _LATENCY_BUCKETS
        )
        self._describe_cache(settings)

    def watch(self, scheduler: Scheduler, ending: Callable[[], int] = lambda: 0) -> None:
        """Registers the gauges that are read at scrape time; `ending` counts sequences that only wait to be shown."""
        self._gauge(
            "num_requests_running",
            "Number of requests in model execution batches.",
            lambda: scheduler.running + ending(),
        )
        self._gauge("num_requests_waiting", "Number of requests waiting to be processed.", lambda: scheduler.waiting)
        self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", lambda: scheduler.kv_usage)
        by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests by reason.",
            [*self._labels, "reason"],
            registry=self._registry,
        )
        by_reason.labels(**self._labels, reason="capacity").set_function(lambda: scheduler.waiting)
        by_reason.labels(**self._labels, reason="deferred").set(0)

    def on_submitted(self, *, n: int) -> None:
        self._n.observe(n)

    def on_step(self, step: StepResult) -> None:
        self._iteration_tokens.observe(step.prefilled_tokens + step.generated_tokens)
        self._generated.inc(step.generated_tokens)
        self._preemptions.inc(step.preempted)
        for sequence in step.admitted:
            self._queries.inc(sequence.prompt_tokens)
            self._hits.inc(sequence.cached_tokens or 0)
        for sequence in step.started:
            self._on_first_token(sequence)
        for sequence in step.finished:
            self._observe_times(sequence)

    def on_token(self, sequence: SequenceState, now: float) -> None:
        """A token of `sequence` reaches its client at `now` (the scheduler's clock)."""
        if sequence.last_token_at is not None:
            self._inter_token.observe(now - sequence.last_token_at)
        sequence.last_token_at = now

    def on_finished(self, reason: FinishReason) -> None:
        self._success[reason].inc()

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type, in the format that the scraper's Accept header asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _on_first_token(self, sequence: SequenceState) -> None:
        cached = sequence.cached_tokens or 0
        self._prompt_tokens.inc(sequence.prompt_tokens)
        self._cached_tokens.inc(cached)
        self._computed_by_source.inc(sequence.prompt_tokens - cached)
        self._cached_by_source.inc(cached)
        if sequence.first_token_at is not None:
            self._first_token.observe(sequence.first_token_at - sequence.arrived_at)

    def _observe_times(self, sequence: SequenceState) -> None:
        scheduled, first, finished = sequence.scheduled_at, sequence.first_token_at, sequence.finished_at
        assert scheduled is not None
        assert first is not None
        assert finished is not None
        self._e2e.observe(finished - sequence.arrived_at)
        self._queue_time.observe(scheduled - sequence.arrived_at)
        self._prefill_time.observe(first - scheduled)
        self._inference_time.observe(finished - scheduled)
        self._decode_time.observe(finished - first)
        self._per_token.observe((finished - first) / max(sequence.output_tokens - 1, 1))
        self._prompt_sizes.observe(sequence.prompt_tokens)
        self._answer_sizes.observe(sequence.output_tokens)
        self._max_tokens.observe(sequence.max_tokens)
        self._prefill_computed.observe(sequence.prompt_tokens - (sequence.cached_tokens or 0))
        self._request_preemptions.observe(sequence.preemptions)

    def _describe_cache(self, settings: SchedulerSettings) -> None:
        """vllm:cache_config_info: the labels of vLLM's that describe a cache of this kind."""
        labels = {
            "block_size": str(settings.block_size),
            "cache_dtype": "auto",
            "enable_prefix_caching": str(settings.prefix_caching),
            "engine": "0",
            "gpu_memory_utilization": "0.9",
            "kv_cache_size_tokens": str(settings.capacity_tokens),
            "num_gpu_blocks": str(settings.num_blocks),
            "num_gpu_blocks_override": str(settings.num_blocks),
            "prefix_caching_hash_algo": "blake2b",
        }
        info = Gauge(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", list(labels), registry=self._registry
        )
        info.labels(**labels).set(1)

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        gauge = Gauge(f"vllm:{name}", text, list(self._labels), registry=self._registry)
        gauge.labels(**self._labels).set_function(read)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, list(self._labels), registry=self._registry).labels(**self._labels)

    def _labelled_counter(self, name: str, text: str, label: str) -> Callable[[str], Counter]:
        counter = Counter(f"vllm:{name}", text, [*self._labels, label], registry=self._registry)
        return lambda value: counter.labels(**self._labels, **{label: value})

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, list(self._labels), buckets=tuple(buckets), registry=self._registry)
        return histogram.labels(**self._labels)


def _one_two_five(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`."""
    buckets: list[float] = []
    power = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * power > limit:
                return buckets
            buckets.append(mantissa * power)
        power *= 10
