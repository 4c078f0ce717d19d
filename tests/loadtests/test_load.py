"""The requests and answers that the benchmark works with."""

import json
import random
from pathlib import Path

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intellect.problem import Problem
from loadtests.overhead.engine_answers import (
    CHAT,
    MODELS,
    QUESTION,
    RENDERED,
    chat_body,
    chat_request,
    chunked,
    metrics,
    stream_end,
    stream_events,
)
from loadtests.overhead.open_loop import arrivals
from loadtests.overhead.routers import ROUTERS, Launch, RouterName
from loadtests.overhead.upstreams import nginx_configuration
from loadtests.overhead.wrk import Load, read_load


class Parsed:
    """A whole HTTP message, as httptools reads it."""

    def __init__(self) -> None:
        self.body = b""
        self.is_complete = False

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True


@given(st.integers(0, 70_000), st.booleans())
def test_a_request_has_the_prompt_that_its_size_says(size: int, stream: bool) -> None:
    """60 kB in the table means 60,000 bytes of system prompt, and one place for the question's number."""
    body = chat_body(size, stream)
    request = json.loads(body)
    assert len(request["messages"][0]["content"]) == size
    assert request.get("stream", False) is stream
    assert body.count(QUESTION) == 1


def test_a_request_is_whole() -> None:
    """A server finds the end of the body by its content-length."""
    parsed = Parsed()
    httptools.HttpRequestParser(parsed).feed_data(chat_request(400, stream=True, host="127.0.0.1:1"))
    assert parsed.is_complete
    assert parsed.body == chat_body(400, stream=True)


@pytest.mark.parametrize("with_usage", [False, True])
def test_a_stream_is_vllms_in_shape(with_usage: bool) -> None:
    """As many events as tokens, usage only where it was asked for, one end."""
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    parsed = Parsed()
    parser = httptools.HttpResponseParser(parsed)
    parser.feed_data(head + b"".join(map(chunked, stream_events(100))) + stream_end(with_usage))
    assert parsed.is_complete
    *events, done, rest = parsed.body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert sum(len(chunk["choices"]) for chunk in chunks) == 100
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks if "usage" in chunk] == [100] * with_usage


def test_fixed_answers_are_json_that_nginx_can_be_given(tmp_path: Path) -> None:
    """No quote or variable in them ends or changes its configuration."""
    for answer in (CHAT, MODELS, RENDERED):
        json.loads(answer)
    assert len(json.loads(RENDERED)["token_ids"]) == 100
    for text in (CHAT, MODELS, RENDERED, metrics(0, 0)):
        assert not set(b"'$\\") & set(text)
    configuration = nginx_configuration(tmp_path, [7001, 7002])
    assert configuration.count("listen 127.0.0.1:") == 2
    assert CHAT.decode() in configuration


@given(st.floats(1, 5_000), st.floats(0.1, 2), st.integers())
def test_requests_fall_due_within_the_time_and_in_order(rate: float, seconds: float, seed: int) -> None:
    """The same seed gives the same load to every router."""
    due = arrivals(rate, seconds, random.Random(seed))
    assert due == sorted(due) == arrivals(rate, seconds, random.Random(seed))
    assert all(0 <= at < seconds for at in due)


def test_requests_fall_due_at_the_rate_asked_for() -> None:
    """Half load is half load: 10,000 expected, and a Poisson count is within five of its deviations of 100."""
    assert abs(len(arrivals(1_000, 10, random.Random(3))) - 10_000) < 500


def test_what_wrk_counted_is_read() -> None:
    """The line that the script adds is found among wrk's own."""
    output = 'Running 4s test\n  1 threads\n\nresult {"requests":12,"bytes":3456,"errors":1}\n'
    assert read_load(output, "") == Load(requests=12, bytes=3456, errors=1)


@pytest.mark.parametrize(
    ("output", "complaint", "shown"), [("", "unable to connect", "unable to connect"), ("", "", "nothing")]
)
def test_a_wrk_that_failed_is_quoted(output: str, complaint: str, shown: str) -> None:
    """The user reads what wrk said."""
    with pytest.raises(Problem, match=shown):
        read_load(output, complaint)


@pytest.mark.parametrize("name", RouterName)
def test_every_router_gets_its_ports_and_all_engines(name: RouterName) -> None:
    """None is measured with fewer engines than the others, or on a port that something else may hold."""
    engines = ["http://127.0.0.1:7001", "http://127.0.0.1:7002"]
    command = ROUTERS[name].command(Launch(8123, 8124, engines, "python", Path("/rivals")))
    assert {*engines, "8123", "8124"} <= set(command)
    assert ("cache_aware" in command) == (name in (RouterName.VLLM, RouterName.SGLANG))
