"""Recorded traffic is played as it was recorded, and a fault in the file is told with its place and remedy."""

import json
from pathlib import Path
from random import Random

import pytest

from router.policy.interface import Priority
from router.sim.request import SimRequest
from router.sim.trace import TraceWorkload, read_trace
from router.sim.trace_lines import TraceError


def written(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def requests_of(path: Path, speed: float = 1.0, horizon_s: float | None = None) -> list[SimRequest]:
    workload = TraceWorkload("t", read_trace(path), ttft_target_s=2.0, speed=speed, horizon_s=horizon_s)
    return list(workload.initial(Random(1)))


def test_a_line_becomes_a_request(tmp_path: Path) -> None:
    """Everything a line says is what policies and engines see; times count from the first request."""
    full = {"t": 7.5, "prompt": "x" * 130, "output_tokens": 40, "max_tokens": 64}
    full |= {"session": "s", "tenant": "acme", "priority": "batch", "model": "big"}
    later, first = requests_of(written(tmp_path, {"t": 9, "prompt": "hello", "output_tokens": 3}, "", full))[::-1]
    assert (first.arrives_at, first.prompt_tokens, first.output_tokens, first.output_max) == (0.0, 33, 40, 64)
    assert (first.tenant, first.session, first.affinity, first.priority, first.model) == (
        *("acme", "s", "s", Priority.BATCH, "big"),
    )
    assert (first.prompt.size, len(first.blocks), len(first.answer_blocks)) == (130, 2, 2)
    assert (later.arrives_at, later.prompt_tokens, later.affinity, later.priority) == (1.5, 2, None, Priority.DEFAULT)
    assert (first.ttft_target_s, later.output_max) == (2.0, None)


def test_text_shares_blocks_as_far_as_it_is_equal(tmp_path: Path) -> None:
    """64 bytes make a block; another model shares nothing."""
    lines = [{"t": 0, "prompt": "a" * 200 + end, "output_tokens": 100, "model": model} for end, model in ("xm", "ym", "xn")]
    one, same, other = requests_of(written(tmp_path, *lines))
    assert list(one.blocks) == list(same.blocks)
    assert one.prompt.digest(200) == same.prompt.digest(200)
    assert one.prompt.digest(201) != same.prompt.digest(201)
    assert not set(one.answer_blocks) & set(same.answer_blocks)
    assert not set(one.blocks) & set(other.blocks)


def test_blocks_stand_for_the_prompt(tmp_path: Path) -> None:
    """Hashes may be numbers or strings; prompt_tokens tells of a block begun."""
    lines = [
        {"t": 0, "blocks": [1, 2, "c"], "output_tokens": 20},
        {"t": 1, "blocks": [1, 2, "d"], "output_tokens": 20, "prompt_tokens": 50},
    ]
    one, other = requests_of(written(tmp_path, *lines))
    assert (one.prompt_tokens, other.prompt_tokens) == (48, 50)
    assert [left == right for left, right in zip(one.blocks, other.blocks, strict=True)] == [True, True, False]
    assert (len(one.answer_blocks), len(other.answer_blocks)) == (1, 1)


def logged(*chunks: int, size: int, tokens: int, **more: object) -> dict[str, object]:
    line = {"t": 0, "outcome": "completed", "blocks": list(chunks), "block_bytes": 1024, "prompt_bytes": size}
    return line | {"prompt_tokens": tokens, "output_tokens": 20, "request_id": "r", "replica": "a:1", "model": "m", **more}


def test_a_decision_log_is_played_with_the_sizes_that_prompts_had(tmp_path: Path) -> None:
    """Chunks stay chunks; KV blocks follow from the model's mean bytes per token, the same for all of its prompts."""
    lines = [
        logged(1, 2, 3, size=2100, tokens=350, prompt_hash=9, cached_tokens=0, predicted_s=0.1, ttft_s=0.2, waited_s=0.0),
        logged(1, 2, 4, size=2100, tokens=350, prompt_hash=8, attempts=1, session="s", priority="batch"),
    ]
    one, other = requests_of(written(tmp_path, *lines))
    assert (one.prompt.size, one.prompt_tokens, one.output_tokens, len(one.blocks)) == (2100, 350, 20, 21)
    assert [left == right for left, right in zip(one.prompt.chunks, other.prompt.chunks, strict=True)] == [True, True, False]
    # 6 bytes a token: 1536 bytes that are equal are 16 blocks of 96 bytes.
    assert [left == right for left, right in zip(one.blocks, other.blocks, strict=True)] == [*[True] * 16, *[False] * 5]
    assert len(one.answer_blocks) == len(other.answer_blocks) == 2
    assert not set(one.answer_blocks) & set(other.answer_blocks)
    assert (other.affinity, other.priority) == ("s", Priority.BATCH)


def test_requests_whose_answer_was_not_counted_are_left_out_of_a_decision_log(tmp_path: Path) -> None:
    """Nobody knows how long the answers of failed requests would have been."""
    failed = {
        key: value for key, value in logged(1, size=1100, tokens=180).items() if key not in ("output_tokens", "prompt_tokens")
    }
    path = written(tmp_path, logged(1, size=1100, tokens=180), failed | {"outcome": "client_gone"})
    assert len(requests_of(path)) == 1
    with pytest.raises(TraceError, match="has no requests"):
        read_trace(written(tmp_path, failed))


def test_mooncakes_shape_is_read(tmp_path: Path) -> None:
    """Milliseconds, and one id for each 512 tokens, the last of which may be cut."""
    lines = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 30, "hash_ids": [0, 1, 2]},
        {"timestamp": 3500, "input_length": 1024, "output_length": 9, "hash_ids": [0, 1], "type": "chat"},
    ]
    one, other = requests_of(written(tmp_path, *lines))
    assert (one.arrives_at, other.arrives_at) == (0.0, 2.5)
    assert (one.prompt_tokens, one.output_tokens, len(one.blocks)) == (1100, 30, 68)
    assert list(one.blocks[:64]) == list(other.blocks)


def test_speed_and_horizon_bend_time(tmp_path: Path) -> None:
    """--load plays faster, --duration stops earlier; turns of a session are counted."""
    path = written(tmp_path, *({"t": t, "prompt": "p", "output_tokens": 1, "session": "s"} for t in (10, 20, 30)))
    assert [(one.arrives_at, one.turn) for one in requests_of(path, speed=2.0)] == [(0.0, 0), (5.0, 1), (10.0, 2)]
    assert [one.arrives_at for one in requests_of(path, horizon_s=10.0)] == [0.0]


GOOD = {"t": 0, "prompt": "p", "output_tokens": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({**GOOD, "t": -1}, "line 2: t is -1; give a number, 0 or more"),
        ('{"t": NaN, "prompt": "p", "output_tokens": 1}', "line 2: t is NaN; give a number, 0 or more"),
        ({**GOOD, "t": "noon"}, 'line 2: t is "noon"; give a number'),
        ({"prompt": "p", "output_tokens": 1}, "line 2: t is missing; give a number"),
        ({"t": 0, "prompt": "p"}, "line 2: output_tokens is missing; give a whole number of tokens"),
        ({**GOOD, "output_tokens": 0}, "line 2: output_tokens is 0; give a whole number of tokens, 1 to 10000000"),
        ({**GOOD, "output_tokens": 10_000_001}, "line 2: output_tokens is 10000001; give a whole number of tokens, 1 to"),
        ({**GOOD, "output_tokens": True}, "line 2: output_tokens is true; "),
        ({**GOOD, "output_tokens": 1.5}, "line 2: output_tokens is 1.5; "),
        ({**GOOD, "max_tokens": 0}, "line 2: max_tokens is 0; "),
        ({**GOOD, "priority": "urgent"}, 'line 2: priority is "urgent"; give one of interactive, default, batch'),
        ({**GOOD, "tenant": 3}, "line 2: tenant is 3; give a string"),
        ({**GOOD, "prompt": ""}, 'line 2: prompt is ""; give its text'),
        ({**GOOD, "prompt": 5}, "line 2: prompt is 5; give a string"),
        ({**GOOD, "prompt_tokens": 5}, "line 2: prompt_tokens is 5; a prompt given as text"),
        ({**GOOD, "blocks": [1]}, 'line 2: prompt is "p"; give either prompt (text) or blocks (hashes)'),
        ({"t": 0, "output_tokens": 1}, "line 2: prompt is missing; give either prompt (text) or blocks (hashes)"),
        ({**GOOD, "user": "me"}, 'line 2: user is "me"; there is no such field; fields are blocks, '),
        ({"t": 0, "blocks": 7, "output_tokens": 1}, "line 2: blocks is 7; give a list"),
        ({"t": 0, "blocks": [1, None], "output_tokens": 1}, "line 2: blocks is [1, null]; its element null is neither"),
        ({"t": 0, "blocks": [], "output_tokens": 1}, "line 2: blocks is []; 0 whole blocks of 16 tokens do not make"),
        ({"t": 0, "blocks": [1], "output_tokens": 1, "prompt_tokens": 40}, "line 2: prompt_tokens is 40; 1 whole blocks"),
        (
            logged(1, size=1100, tokens=180) | {"block_bytes": 64},
            "line 2: block_bytes is 64; give 1024, the only grid there is",
        ),
        (logged(1, size=600, tokens=50), "line 2: prompt_bytes is 600; a prompt of 1 chunks has at least 1024 bytes"),
        (logged(1, size=-1, tokens=50), "line 2: prompt_bytes is -1; give a whole number of bytes"),
        ({"timestamp": 0, "hash_ids": [1], "input_length": 9}, "line 2: output_length is missing; lines with hash_ids have"),
        (
            {"timestamp": 0, "hash_ids": [1], "input_length": 513, "output_length": 1},
            "line 2: hash_ids is [1]; 513 tokens need 2 ids, one for each 512 tokens; it has 1",
        ),
        ("[1]", "line 2: is no JSON object; write one object per line"),
        ("{", "line 2: is not JSON ("),
    ],
)
def test_a_fault_names_file_line_field_value_and_remedy(tmp_path: Path, line: object, message: str) -> None:
    """Whoever made the file can mend it."""
    path = written(tmp_path, GOOD, line)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}, {message}")


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """Missing, a folder, empty, or not text."""
    binary = tmp_path / "binary"
    binary.write_bytes(b"{\xff")
    for path, message in (
        (tmp_path / "none", "does not exist; check the path"),
        (tmp_path, "cannot be read ("),
        (written(tmp_path, ""), "has no requests; write one JSON object per line"),
        (binary, "is not UTF-8 at byte 1;"),
    ):
        with pytest.raises(TraceError) as error:
            read_trace(path)
        assert str(error.value).startswith(f"{path}: {message}")
