"""Reading an engine's progress off its metrics."""

import threading

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.edge.engine_metrics import read_progress
from tests.sim import SimEngine, start_sim_engine
from tests.waiting import wait_until

HISTOGRAM = """\
# HELP vllm:iteration_tokens_total Histogram of number of tokens per engine_step.
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{{engine="{engine}",le="1.0",model_name="m"}} 901.0
vllm:iteration_tokens_total_bucket{{engine="{engine}",le="+Inf",model_name="m"}} 902.0
vllm:iteration_tokens_total_count{{engine="{engine}",model_name="m"}} {count}
vllm:iteration_tokens_total_sum{{engine="{engine}",model_name="m"}} 903.0
# HELP vllm:iteration_tokens_total_created Histogram of number of tokens per engine_step.
# TYPE vllm:iteration_tokens_total_created gauge
vllm:iteration_tokens_total_created{{engine="{engine}",model_name="m"}} 1.796e+09
"""


def metrics_of(engine: SimEngine) -> bytes:
    return engine.client.get("/metrics").content


def test_steps_and_running_requests_are_read_off_an_engines_own_text() -> None:
    """What the router reads is what the engine counts: it moves while a request runs, and stands still after it."""
    with start_sim_engine() as engine:
        assert read_progress(metrics_of(engine)) == (0.0, 0.0)
        model = engine.client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "hello", "max_tokens": 2000, "ignore_eos": True}
        with httpx.Client(base_url=engine.url) as client:

            def ask() -> None:
                client.post("/v1/completions", json=body, timeout=60.0).raise_for_status()

            asking = threading.Thread(target=ask)
            asking.start()
            try:
                seen: list[float] = []

                def has_moved_while_running() -> bool:
                    iterations, running = read_progress(metrics_of(engine))
                    if running == 1.0 and iterations is not None:
                        seen.append(iterations)
                    return len(set(seen)) >= 3

                wait_until(has_moved_while_running, 20.0, "the step counter to move")
            finally:
                asking.join()
        assert seen == sorted(seen)
        wait_until(lambda: read_progress(metrics_of(engine))[1] == 0.0, 10.0, "the request to end")
        iterations, running = read_progress(metrics_of(engine))
        assert (iterations, running) == (engine.metric("vllm:iteration_tokens_total_count"), 0.0)
        assert iterations is not None
        assert iterations >= 2000


def test_other_lines_of_the_histogram_are_not_taken_for_its_count() -> None:
    """A creation time that never changes, read as the counter, would make every busy engine look hung."""
    assert read_progress(HISTOGRAM.format(engine=0, count="17.0").encode()) == (17.0, None)


def test_the_engines_behind_one_port_are_added_up() -> None:
    """Data-parallel ranks share a port; any of them that steps is progress."""
    text = "".join(HISTOGRAM.format(engine=engine, count=f"{engine + 1}.0") for engine in range(3))
    text += "".join(f'vllm:num_requests_running{{engine="{engine}",model_name="m"}} {engine * 10}.0\n' for engine in range(3))
    assert read_progress(text.encode()) == (6.0, 30.0)


@pytest.mark.parametrize(
    ("line", "running"),
    [
        ("vllm:num_requests_running 3.0\n", 3.0),
        ("vllm:num_requests_running 3\r\n", 3.0),
        ("vllm:num_requests_running\t3 1796065834894\n", 3.0),  # with a timestamp
        ('vllm:num_requests_running{model_name="m"} 1.5e+06\n', 1_500_000.0),
        ('vllm:num_requests_running{model_name="m"} 2E3\n', 2000.0),
        ('vllm:num_requests_running{model_name="a}b{ 7"} 3.0\n', 3.0),
        ('vllm:num_requests_running{model_name="a\\"} 7 b\\\\"} 3.0\n', 3.0),
        ("vllm:num_requests_running{} 3.0\n", 3.0),
        ('vllm:num_requests_running{model_name="m"} NaN\n', None),
        ('vllm:num_requests_running{model_name="m"} +Inf\n', None),
        ('vllm:num_requests_running{model_name="m"} 12', None),  # cut off: it may have been 120
        ('vllm:num_requests_running{model_name="m', None),
        ("vllm:num_requests_running_by_lora 3.0\n", None),
        ("other:vllm:num_requests_running 3.0\n", None),
        ("# TYPE vllm:num_requests_running gauge\n", None),
        ("", None),
        ("<html>not metrics</html>", None),
    ],
)
@pytest.mark.parametrize("before", ["", "a_first_line 1.0\n"])
def test_only_a_whole_sample_with_a_number_counts(before: str, line: str, running: float | None) -> None:
    """Whatever stands behind the port, the router reads a true number or none."""
    assert read_progress((before + line).encode()) == (None, running)


@given(st.lists(st.tuples(st.text(st.characters(codec="utf-8"), max_size=20), st.floats(0, 1e15)), min_size=1, max_size=4))
def test_any_label_and_any_number_is_read(samples: list[tuple[str, float]]) -> None:
    """Model names may hold quotes, braces and line breaks, and numbers may have exponents."""
    lines = []
    for name, value in samples:
        escaped = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines.append(f'vllm:iteration_tokens_total_count{{engine="0",model_name="{escaped}"}} {value!r}\n')
    assert read_progress("".join(lines).encode()) == (sum(value for _, value in samples), None)


@given(st.binary(max_size=300))
def test_bytes_that_are_no_metrics_are_no_fault(text: bytes) -> None:
    """An engine that answers nonsense is one whose progress is not known."""
    assert read_progress(text) == (None, None)
