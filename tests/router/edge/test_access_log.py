"""The access log when whoever reads it is slow, stuck or gone."""

import asyncio
import json
import os

import pytest

from router.edge.access_log import WAITING_BYTES_MAX, AccessLog, AccessRecord
from tests.waiting import await_until


def record(number: int, size: int = 0) -> AccessRecord:
    return AccessRecord(
        time=1.0,
        request_id=f"r{number}",
        route="/v1/completions",
        outcome="completed",
        status=200,
        duration_ms=1.0,
        error="x" * size,
    )


async def test_lines_arrive_whole_and_in_order() -> None:
    """Each request is one line of JSON."""
    reader, writer = os.pipe()
    log = AccessLog(writer)
    for number in range(500):
        log.write(record(number))
    await asyncio.to_thread(log.close)
    os.close(writer)
    with os.fdopen(reader) as lines:
        assert [json.loads(line)["request_id"] for line in lines] == [f"r{number}" for number in range(500)]


async def test_a_reader_that_is_stuck_holds_up_nobody_and_fills_no_memory() -> None:
    """Requests go on; what cannot be written is dropped and counted."""
    reader, writer = os.pipe()
    log = AccessLog(writer)
    for number in range(3 * WAITING_BYTES_MAX // 100_000):
        log.write(record(number, size=100_000))
    assert 0 < log.dropped_bytes < 3 * WAITING_BYTES_MAX
    os.close(reader)  # ends the write that is stuck
    await asyncio.to_thread(log.close)
    os.close(writer)


@pytest.mark.parametrize("gone", ["closed pipe", "full disk"])
async def test_a_stream_that_takes_nothing_is_an_error_of_the_log_only(gone: str) -> None:
    """A full disk does not fail requests."""
    if gone == "full disk":
        writer = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, writer = os.pipe()
        os.close(reader)
    log = AccessLog(writer)
    for number in range(5):
        log.write(record(number))
    await await_until(lambda: log.dropped_bytes > 0, 2, "the lines to be dropped")
    log.write(record(6))
    await asyncio.to_thread(log.close)
    os.close(writer)
