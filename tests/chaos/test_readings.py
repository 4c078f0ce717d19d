"""How the soak's clients read answers: what counts as the same, and what no stream may do."""

import json
import random
from typing import Any

import pytest

from loadtests.soak.answers import StreamReading, normalized, read_json
from loadtests.soak.faults import DISABLING, FaultDeck, FaultName
from loadtests.soak.requests import catalogue, encode
from server.sim_faults import decode_faults

CHAT = "/v1/chat/completions"
HEAD = {"id": "a", "created": 1, "model": "m", "object": "chat.completion.chunk"}


def chunk(text: str | None = None, *, finish: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({**HEAD, "choices": [choice], **fields}).encode() + b"\n\n"


def read(*parts: bytes, path: str = CHAT, asks_usage: bool = False) -> StreamReading:
    reading = StreamReading(path, asks_usage=asks_usage)
    for part in parts:
        reading.feed(part)
    return reading


DONE = b"data: [DONE]\n\n"


def test_a_stream_is_read_whole_however_its_bytes_are_cut() -> None:
    """Text, finish reason and end, through comments and seams."""
    whole = chunk("one ") + b": keep-alive\n\n" + chunk("two", intellect={"continuations": 1}) + chunk(finish="stop") + DONE
    for reading in (read(whole), read(*(whole[place : place + 1] for place in range(len(whole))))):
        assert reading.said.texts == {"0.content": "one two"}
        assert reading.said.finishes == {"0": ["stop", None]}
        assert (reading.is_done, reading.has_error, reading.has_half_event) == (True, False, False)
        assert (reading.continuations, reading.faults) == (1, [])


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ([chunk("x"), DONE, DONE], "something follows the end"),
        ([chunk("x"), b'data: {"error": {}}\n\n', DONE], "something follows the end"),
        ([chunk("x"), chunk("y", id="b")], "id changes"),
        ([chunk("x"), chunk("y", created=2)], "created changes"),
        ([chunk(finish="stop"), chunk("y")], "goes on after its finish reason"),
        ([chunk("x", usage={"prompt_tokens": 1})], "usage that nobody asked for"),
        ([b"data: {\n\n"], "not JSON"),
        ([b'data: {"choices": []}\n\n'], "without choices or usage"),
        ([_two_roles := chunk("x").replace(b'"delta": {', b'"delta": {"role": "assistant", '), _two_roles], "begins twice"),
    ],
)
def test_what_no_stream_may_do_is_noted(parts: list[bytes], fault: str) -> None:
    """Whatever has happened to the engine."""
    assert fault in " ".join(read(*parts).faults)


@pytest.mark.parametrize(
    ("path", "events", "texts"),
    [
        (
            "/v1/messages",
            [
                {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "one "}},
                {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "two"}},
                {"type": "message_stop"},
            ],
            {"0.text_delta": "one two"},
        ),
        (
            "/v1/responses",
            [
                {"type": "response.output_text.delta", "output_index": 0, "delta": "one"},
                {"type": "response.completed", "response": {"status": "completed", "usage": {"output_tokens": 1}}},
            ],
            {"0.response.output_text.delta": "one"},
        ),
    ],
)
def test_the_named_events_of_other_surfaces_are_read(path: str, events: list[dict[str, Any]], texts: dict[str, str]) -> None:
    """Messages end with message_stop, responses with response.completed."""
    parts = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events]
    assert not read(*parts[:-1], path=path).is_done
    reading = read(*parts, path=path)
    assert (reading.is_done, reading.said.texts, reading.faults) == (True, texts, [])


def test_what_differs_between_two_askings_does_not_count() -> None:
    """Ids, times and cached tokens; everything else does."""
    answer = {"id": "a", "created": 1, "choices": [{"text": "x"}], "usage": {"prompt_tokens": 2, "prompt_tokens_details": {}}}
    assert normalized(answer) == {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 2}}
    assert read_json(json.dumps(answer).encode()) == normalized(answer)


def test_the_same_seed_asks_the_same() -> None:
    """A violation can be looked at again with the seed of its run."""
    assert catalogue(random.Random(3)) == catalogue(random.Random(3))
    assert catalogue(random.Random(3)) != catalogue(random.Random(4))


def test_a_request_is_encoded_with_the_length_of_what_is_sent() -> None:
    """Also where it is compressed."""
    for asked in catalogue(random.Random(1)):
        head, _, body = encode(asked, "id-1", "h:1").partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head.splitlines()
        assert (b"content-encoding: gzip" in head) is asked.is_gzipped


def test_every_fault_is_dealt_before_any_comes_again_and_one_replica_is_always_left_alone() -> None:
    """So that a short soak meets them all, and requests can always be answered."""
    deck = FaultDeck(random.Random(1), replicas=3)
    for _ in range(3):
        strikes = [deck.deal(()) for _ in FaultName]
        assert {strike.name for strike in strikes if strike is not None} == set(FaultName)
        for strike in strikes:
            assert strike is not None
            if strike.fault is not None:
                assert decode_faults(json.dumps(strike.fault))
    left = [deck.deal({0, 2}) for _ in FaultName]
    dealt = [strike for strike in left if strike is not None]
    assert {strike.name for strike in dealt} == set(FaultName) - DISABLING
    assert {strike.replica for strike in dealt} == {1}
