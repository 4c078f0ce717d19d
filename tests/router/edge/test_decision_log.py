"""The decision log's file."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from router.config import ConfigError
from router.edge.decision_log import DecisionLog, DecisionRecord


def record(number: int) -> DecisionRecord:
    return DecisionRecord(
        t=1.5,
        request_id=f"r{number}",
        outcome="completed",
        model="m",
        blocks=[2**64 - 1],
        block_bytes=1024,
        prompt_bytes=300,
        prompt_hash=7,
    )


async def test_lines_are_added_to_the_file(tmp_path: Path) -> None:
    """A router that starts again goes on where it was; what is not known is left out."""
    path = tmp_path / "decisions.jsonl"
    for number in range(2):
        log = DecisionLog(path)
        log.write(record(number))
        await asyncio.to_thread(log.close)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["request_id"] for line in lines] == ["r0", "r1"]
    assert lines[0]["blocks"] == [2**64 - 1]
    assert "ttft_s" not in lines[0]
    assert path.stat().st_mode & 0o007 == 0  # what was asked is nobody else's business


async def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    """The setting, the path and the reason."""
    with pytest.raises(ConfigError, match=f"^decision_log {tmp_path}: cannot be opened: Is a directory; give a file"):
        DecisionLog(tmp_path)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """A FIFO without a reader does not keep the router from starting, nor a slow one from answering."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    link = tmp_path / "link"
    link.symlink_to(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for path in (fifo, link, Path("/dev/null")):
            with pytest.raises(ConfigError, match=f"^decision_log {path}: is not a regular file; give a file"):
                DecisionLog(path)
    finally:
        os.close(reader)
