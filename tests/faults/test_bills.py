"""What the access log says of requests that met a fault: one line for each, with the tokens that its client was told of."""

import asyncio
import json
from typing import Any

from tests.faults.fault_proxy import Break, Fault
from tests.faults.stage import CHAT, STREAM, Stage
from tests.faults.test_retries import engine_error
from tests.waiting import await_until

_NO_USAGE = {**CHAT, "stream": True}


async def test_every_request_has_one_line_and_one_bill(two: Stage) -> None:
    """Whoever bills from the log never bills an answer twice, and never more than the client was told."""
    faults = [
        None,
        Fault(breaks=Break.RESET, after_events=0),
        engine_error(503),
        Fault(breaks=Break.CLOSE, after_events=0, after_bytes=100),
        Fault(breaks=Break.CLOSE, after_events=9),
    ]
    for fault in faults:
        for body in (CHAT, STREAM, _NO_USAGE):
            if fault is not None:
                two.faults.arm(fault)
            view = await two.ask(body)
            assert view.status == 200
            assert not view.is_broken
            await two.assert_well(2)
    lines = await logged(two)
    assert len(lines) == two.sent
    assert {line["outcome"] for line in lines} == {"completed"}
    assert [line["completion_tokens"] for line in lines] == [30] * two.sent
    assert len({line["prompt_tokens"] for line in lines}) == 1
    assert all(two.told[line["request_id"]] in (0, line["completion_tokens"]) for line in lines)
    assert sum(line["attempts"] for line in lines) == two.upstream


async def test_a_cut_answer_is_logged_with_its_end(one: Stage) -> None:
    """Its line says that it broke, and bills no more than what was sent."""
    one.faults.arm(Fault(breaks=Break.CLOSE, after_events=9))
    view = await one.ask(STREAM)
    assert view.is_broken
    (line,) = await logged(one)
    assert (line["outcome"], line["status"], line["attempts"]) == ("upstream_broken", 200, 1)
    assert line.get("completion_tokens", 0) <= 8
    assert line["error"]


async def logged(stage: Stage) -> list[dict[str, Any]]:
    """The log's lines of this stage's requests, once all are there; it is written every quarter of a second."""

    def lines() -> list[dict[str, Any]]:
        texts = [text for text in stage.router.log.splitlines() if '"request_id":"fault-' in text]
        return [line for line in map(json.loads, texts) if line["request_id"] in stage.told]

    await await_until(lambda: len(lines()) >= stage.sent, 3, "the log to be written")
    await asyncio.sleep(0.3)  # a second line, if there were one, would be written by now
    return lines()
