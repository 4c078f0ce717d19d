"""What a client gets of an engine's stream, and what it does not."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.openai import Surface
from protocol.sse import DONE, event
from protocol.usage import Usage
from router.stream.editor import ChatEditor, NamedEditor, StreamFailure, UnusableAnswer, check_whole, editor_for, usage_at_end

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}


def chunk(content: str, finish: str | None = None, **more: object) -> bytes:
    return event(
        msgspec.json.encode({"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish}], **more})
    )


USAGE_CHUNK = event(msgspec.json.encode({"choices": [], "usage": USAGE}))
STREAM = chunk("a") + chunk("b", "stop") + USAGE_CHUNK + DONE


def test_usage_that_nobody_asked_for_is_kept_back_and_counted() -> None:
    """A client that reads `choices[0]` of every chunk never meets an empty list."""
    editor = ChatEditor(strips_usage=True, choices=1)
    assert editor.pass_on(STREAM) == chunk("a") + chunk("b", "stop") + DONE
    assert editor.usage == Usage(7, 3, 4)
    assert editor.is_done


def test_usage_that_was_asked_for_passes_byte_for_byte() -> None:
    """With include_usage the stream is the engine's own."""
    editor = ChatEditor(strips_usage=False, choices=1)
    assert editor.pass_on(STREAM) == STREAM
    assert editor.usage == Usage(7, 3, 4)


def test_the_last_usage_that_is_not_null_counts() -> None:
    """Continuous usage, or a null at the end, does not spoil the count."""
    editor = ChatEditor(strips_usage=False, choices=1)
    first = chunk("a", usage={"prompt_tokens": 7, "completion_tokens": 1})
    editor.pass_on(first + USAGE_CHUNK + chunk("", usage=None) + DONE)
    assert editor.usage == Usage(7, 3, 4)


@pytest.mark.parametrize(
    ("failed", "code"),
    [
        (b'data: {"error":{"message":"boom","type":"InternalServerError","param":null,"code":500}}\n\n', True),
        (b'data: {"error": {"message": "boom"}}\n\n', True),
        (chunk("", "abort"), False),
        (chunk("x", "error"), False),
    ],
)
def test_a_stream_that_says_it_failed_is_caught_before_its_done(failed: bytes, code: bool) -> None:
    """An answer that the engine gave up on is not taken for a whole one; what came before is passed on."""
    editor = ChatEditor(strips_usage=True, choices=1)
    with pytest.raises(StreamFailure) as caught:
        editor.pass_on(chunk("a") + failed + DONE)
    assert caught.value.passed == chunk("a")
    assert (caught.value.detail is not None) is code
    assert not editor.is_done


def test_nothing_follows_the_end() -> None:
    """[DONE] comes once, and last."""
    editor = ChatEditor(strips_usage=True, choices=1)
    assert editor.pass_on(chunk("a") + DONE + DONE + chunk("b")) == chunk("a") + DONE
    assert editor.pass_on(chunk("c")) == editor.pass_on(DONE) == b""


@pytest.mark.parametrize("choices", [1, 3])
def test_an_answer_is_finished_when_each_of_its_choices_is(choices: int) -> None:
    """Only then may a missing [DONE] be made good."""
    editor = ChatEditor(strips_usage=True, choices=choices)
    for index in range(choices):
        assert not editor.is_finished
        finished = {"index": index, "delta": {"content": "x"}, "finish_reason": "stop" if index else "length"}
        editor.pass_on(event(msgspec.json.encode({"choices": [finished]})) * 2)  # said twice, it is still one
    assert editor.is_finished


def test_numbers_that_json_has_not_are_mended() -> None:
    """A client's strict parser can read every chunk and every answer."""
    broken = b'data: {"choices":[{"delta":{},"logprobs":{"content":[{"logprob":-Infinity}]}}],"x":NaN}\n\n'
    passed = ChatEditor(strips_usage=True, choices=1).pass_on(broken)
    assert json.loads(passed[6:], parse_constant=pytest.fail)["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0
    whole, _ = check_whole(b'{"choices":[{"logprobs":{"content":[{"logprob":-Infinity}]},"finish_reason":"stop"}]}')
    assert b"-9999.0" in whole


@given(st.text(max_size=60))
def test_what_a_model_writes_is_passed_on_whatever_it_is(text: str) -> None:
    """A model may write about errors, usage and ends of streams."""
    for words in (text, '"finish_reason":"abort"', 'data: {"error"', '"usage"', "data: [DONE]", "-Infinity, NaN"):
        block = chunk(words) + chunk(words, "stop")
        editor = ChatEditor(strips_usage=True, choices=1)
        assert editor.pass_on(block) == block
        assert not editor.is_done
        answer = msgspec.json.encode({"choices": [{"message": {"content": words}, "finish_reason": "stop"}], "usage": USAGE})
        assert check_whole(answer) == (answer, Usage(7, 3, 4))


@pytest.mark.parametrize(
    ("body", "reason"),
    [(b"<html>", "not the JSON"), (b"[]", "not the JSON"), (b'{"choices":[{"finish_reason":"abort"}]}', "gave the answer up")],
)
def test_a_whole_answer_that_is_none_is_not_passed_on(body: bytes, reason: str) -> None:
    """Another replica is asked instead."""
    with pytest.raises(UnusableAnswer, match=reason):
        check_whole(body)


ANTHROPIC = (
    event(b'{"type":"message_start","message":{"usage":{"input_tokens":9,"output_tokens":0}}}', b"message_start")
    + event(b'{"type":"content_block_delta","delta":{"text":"event: error"}}', b"content_block_delta")
    + event(b'{"type":"message_delta","usage":{"output_tokens":5}}', b"message_delta")
    + event(b'{"type":"message_stop"}', b"message_stop")
)
RESPONSES = event(b'{"delta":"hi"}', b"response.output_text.delta") + event(
    b'{"response":{"usage":{"input_tokens":9,"output_tokens":5,"input_tokens_details":{"cached_tokens":2}}}}',
    b"response.completed",
)


@pytest.mark.parametrize(
    ("surface", "stream", "usage"),
    [(Surface.MESSAGES, ANTHROPIC, Usage(9, 5)), (Surface.RESPONSES, RESPONSES, Usage(9, 5, 2))],
)
def test_other_surfaces_end_with_their_own_event(surface: Surface, stream: bytes, usage: Usage) -> None:
    """Anthropic's and the responses' streams are whole without [DONE]."""
    editor = editor_for(surface, strips_usage=False, choices=1)
    assert isinstance(editor, NamedEditor)
    assert editor.pass_on(stream + DONE) == stream
    assert editor.is_done
    assert editor.usage == usage


def test_other_surfaces_say_that_they_failed_with_an_event() -> None:
    """It is put into one shape, and the stream is broken off behind it."""
    failed = event(b'{"type":"error","error":{"type":"x","message":"boom"}}', b"error")
    with pytest.raises(StreamFailure) as caught:
        NamedEditor().pass_on(failed)
    assert caught.value.detail is not None
    assert caught.value.detail.message == "boom"


def test_a_message_that_was_given_up_is_not_taken_for_whole() -> None:
    """vLLM ends an aborted message with a null stop reason and a clean end."""
    given_up = event(b'{"type":"message_delta","delta":{"stop_reason":null},"usage":{"output_tokens":2}}', b"message_delta")
    with pytest.raises(StreamFailure, match="gave the answer up"):
        NamedEditor().pass_on(given_up + event(b'{"type":"message_stop"}', b"message_stop"))
    with pytest.raises(UnusableAnswer, match="gave the answer up"):
        check_whole(b'{"type":"message","content":[],"usage":{"input_tokens":1,"output_tokens":1}}')
    body = b'{"type":"message","content":[],"stop_reason":"end_turn"}'
    assert check_whole(body) == (body, None)


def test_a_number_of_choices_that_nobody_knows_is_never_reached() -> None:
    """Of several prompts nobody has counted the answers, so a missing end is not made good."""
    editor = ChatEditor(strips_usage=True, choices=0)
    editor.pass_on(chunk("x", "stop"))
    assert not editor.is_finished


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (b'...,"usage":{"prompt_tokens":7,"completion_tokens":3},"x":null}', Usage(7, 3)),
        (b'"usage":null}', None),
        (b'"usage":{"prompt_', None),
        (b"nothing", None),
    ],
)
def test_usage_is_found_at_the_end_of_a_long_answer(tail: bytes, usage: Usage | None) -> None:
    """An answer too long to be read whole is counted all the same."""
    assert usage_at_end(tail) == usage
