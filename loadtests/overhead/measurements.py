"""The measurements of one router, each on a freshly started one."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from intellect.problem import Problem
from loadtests.overhead.engine_answers import CHUNKS_PER_STREAM
from loadtests.overhead.figures import REQUEST_METRICS, Figure, Metric, Stage
from loadtests.overhead.open_loop import measure_latency
from loadtests.overhead.processes import ProcessTree, free_ports, running
from loadtests.overhead.routers import HOST, Launch, Router
from loadtests.overhead.streams import bytes_per_event, idle_stream_growth
from loadtests.overhead.upstreams import instant_upstreams, paced_upstreams
from loadtests.overhead.wrk import Load, Wrk

CONNECTIONS = 32
STREAMS = 128
IDLE_STREAMS = 1_000
# The shortest prompt: what streams cost must not hide behind what their requests cost.
STREAM_PROMPT_BYTES = 400
LATENCY_PROMPT_BYTES = 8_000
_WARM_UP_S = 1.0
# So that the answers of a measurement do not all begin with it: a stream takes two seconds.
_STREAM_WARM_UP_S = 2.0


@dataclass(frozen=True, slots=True)
class Bench:
    """`folder` holds logs and configurations, `source` is where our router is run, `rivals` their environment."""

    folder: Path
    source: Path
    rivals: Path
    wrk: Wrk
    seconds: int

    def measure(self, stage: Stage, router: Router, seed: int) -> list[Figure]:
        """The figures of one stage; `seed` draws the times of its requests. Raises Problem: something did not start, ended,
        or answered wrongly."""
        match stage:
            case Stage.REQUESTS:
                return self._requests(router)
            case Stage.CHUNKS:
                return self._chunks(router)
            case Stage.LATENCY:
                return self._latency(router, seed)
            case Stage.MEMORY:
                return self._memory(router)

    def _requests(self, router: Router) -> list[Figure]:
        figures: list[Figure] = []
        errors = 0
        with instant_upstreams(self.folder) as ports, self._running(router, ports) as (tree, port):
            for size, (cost, rate) in REQUEST_METRICS.items():
                self._load(port, size, _WARM_UP_S)
                before = tree.cpu_s()
                load = self._load(port, size, self.seconds)
                figures.append(Figure(cost, _micros(tree.cpu_s() - before, load.requests)))
                figures.append(Figure(rate, load.requests / self.seconds))
                errors += load.errors
        return [*figures, Figure(Metric.ERRORS, errors)]

    def _latency(self, router: Router, seed: int) -> list[Figure]:
        """Through the router and straight to an upstream, one after the other, with the same requests at the same times."""
        with instant_upstreams(self.folder) as ports, self._running(router, ports) as (_, port):
            self._load(port, LATENCY_PROMPT_BYTES, _WARM_UP_S)
            trial_s = max(1.0, self.seconds // 2)
            rate = self._load(port, LATENCY_PROMPT_BYTES, trial_s).requests / trial_s / 2
            direct, through = (
                measure_latency(
                    target, rate=rate, seconds=self.seconds, prompt_bytes=LATENCY_PROMPT_BYTES, rng=random.Random(seed)
                )
                for target in (ports[0], port)
            )
        return [
            Figure(Metric.LATENCY_RATE, rate),
            Figure(Metric.LATENCY_P50, (through.p50 - direct.p50) * 1e6),
            Figure(Metric.LATENCY_P99, (through.p99 - direct.p99) * 1e6),
            Figure(Metric.ERRORS, through.errors),
        ]

    def _chunks(self, router: Router) -> list[Figure]:
        with (
            paced_upstreams(self.folder, chunks=CHUNKS_PER_STREAM, held=False) as ports,
            self._running(router, ports) as (tree, port),
        ):
            size = bytes_per_event(port, prompt_bytes=STREAM_PROMPT_BYTES, events=CHUNKS_PER_STREAM)
            self._streamed_load(port, _STREAM_WARM_UP_S)
            before = tree.cpu_s()
            load = self._streamed_load(port, self.seconds)
            cpu_s = tree.cpu_s() - before
        delivered = load.bytes / size
        return [
            Figure(Metric.CHUNK, _micros(cpu_s, delivered)),
            Figure(Metric.CHUNK_RATE, delivered / self.seconds),
            Figure(Metric.ERRORS, load.errors),
        ]

    def _memory(self, router: Router) -> list[Figure]:
        with paced_upstreams(self.folder, chunks=1, held=True) as ports, self._running(router, ports) as (tree, port):
            growth, failed = idle_stream_growth(
                port, prompt_bytes=STREAM_PROMPT_BYTES, count=IDLE_STREAMS, rss_bytes=tree.rss_bytes
            )
        return [Figure(Metric.IDLE_STREAM, growth / 1000), Figure(Metric.ERRORS, failed)]

    @contextmanager
    def _running(self, router: Router, engine_ports: list[int]) -> Iterator[tuple[ProcessTree, int]]:
        port, second_port = free_ports(2)
        engines = [f"http://{HOST}:{engine}" for engine in engine_ports]
        command = router.command(Launch(port, second_port, engines, sys.executable, self.rivals))
        folder = self.source if router.is_ours else self.folder
        with running(router.title, command, log=self.folder / "router.log", folder=folder) as tree:
            tree.wait_ready(port)
            yield tree, port

    def _load(self, port: int, prompt_bytes: int, seconds: float) -> Load:
        load = self.wrk.run(port, prompt_bytes=prompt_bytes, stream=False, connections=CONNECTIONS, seconds=seconds)
        if load.requests == 0:
            raise Problem(f"no request was answered within {seconds:g} s under load, {load.errors} failed")
        return load

    def _streamed_load(self, port: int, seconds: float) -> Load:
        return self.wrk.run(port, prompt_bytes=STREAM_PROMPT_BYTES, stream=True, connections=STREAMS, seconds=seconds)


def _micros(seconds: float, count: float) -> float:
    return seconds * 1e6 / max(count, 1)
