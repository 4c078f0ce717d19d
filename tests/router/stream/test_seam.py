"""Events of the next replica as one stream with those before, and the end of a stream that lacks only that."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.outcome import ContinuationOutcome
from router.stream.continuable import NotContinuable
from router.stream.memory import Sent, StreamMemory
from router.stream.seam import SeamRewriter, is_finished
from tests.router.stream.samples import DONE, chat_stream, completion_stream, event, events_of

SENT = Sent(id="first", created=5, model="public", text="Well", token_ids=None, has_role=True, chunks=1)
HEAD = {"id": "second", "object": "chat.completion.chunk", "created": 9, "model": "m"}
OWN = {"id": "first", "object": "chat.completion.chunk", "created": 5, "model": "public"}
MARK = {"intellect": {"continuations": 1}}


def rewriter(sent: Sent = SENT, tokens_sent: int = 3, seams: int = 1) -> SeamRewriter:
    return SeamRewriter(sent, tokens_sent=tokens_sent, seams=seams)


def chat_chunk(head: dict[str, Any], delta: dict[str, Any], **rest: Any) -> bytes:
    return event({**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}], **rest})


def test_the_next_replicas_events_become_the_streams_own() -> None:
    """Its id and time are the stream's, its role is not repeated, the first chunk passed on is marked, the rest is not."""
    block = (
        chat_chunk(HEAD, {"role": "assistant", "content": ""}, prompt_token_ids=None, prompt_text=None)
        + b": keep-alive\n\n"
        + chat_chunk(HEAD, {"content": " é😀"})
        + chat_chunk(HEAD, {"content": "\u2028b"})
        + DONE
    )
    expected = (
        b": keep-alive\n\n" + chat_chunk(OWN, {"content": " é😀"}, **MARK) + chat_chunk(OWN, {"content": "\u2028b"}) + DONE
    )
    assert rewriter().rewrite(block) == expected


def test_the_order_of_keys_is_the_engines() -> None:
    """Only values change: whoever reads a chunk by eye finds everything where it was."""
    chunk = event({"choices": [{"text": "a"}], "model": "m", "x": {"b": 1, "a": 1.50}, "id": "second"})
    assert (
        rewriter(seams=0)
        .rewrite(chunk)
        .startswith(b'data: {"choices":[{"text":"a"}],"model":"public","x":{"b":1,"a":1.5},"id"')
    )


def test_a_role_that_was_not_sent_passes() -> None:
    """An answer that begins anew gets its first chunk, in the stream's own name if it has one already."""
    role = {"role": "assistant", "content": ""}
    assert rewriter(Sent(), 0).rewrite(chat_chunk(HEAD, role)) == chat_chunk(HEAD, role, **MARK)
    assert rewriter(Sent(id="first", created=5, model="public"), 0).rewrite(chat_chunk(HEAD, role)) == chat_chunk(
        OWN, role, **MARK
    )


def test_a_role_that_comes_with_text_is_taken_out_of_it() -> None:
    """No text is dropped with the role."""
    block = chat_chunk(HEAD, {"role": "assistant", "content": "a"})
    assert rewriter().rewrite(block) == chat_chunk(OWN, {"content": "a"}, **MARK)


@pytest.mark.parametrize(
    ("choice", "rest"),
    [
        ({"delta": {"content": ""}, "finish_reason": "stop"}, {}),
        ({"delta": {"content": ""}, "finish_reason": None, "token_ids": [4]}, {}),
        ({"delta": {"content": "a"}, "finish_reason": None}, {"prompt_text": "Hi Well", "prompt_token_ids": [1, 2]}),
    ],
)
def test_only_what_was_sent_before_is_taken_out(choice: dict[str, Any], rest: dict[str, Any]) -> None:
    """An end or token ids that come with a role pass without it; a prompt that contains the answer does not pass."""
    block = event({**HEAD, "choices": [{**choice, "delta": {"role": "assistant", **choice["delta"]}}], **rest})
    assert events_of([rewriter().rewrite(block)]) == [{**OWN, "choices": [choice], **MARK}]


def test_other_line_ends_are_understood() -> None:
    """An engine that ends lines with CR LF is rewritten like one that does not; what is not rewritten keeps its line ends."""
    block = chat_chunk(HEAD, {"content": "a"}) + chat_chunk(HEAD, {"content": "b"}) + DONE
    rewritten = rewriter().rewrite(block.replace(b"\n", b"\r\n"))
    assert rewritten == rewriter().rewrite(block).replace(DONE, DONE.replace(b"\n", b"\r\n"))


def test_prompt_token_ids_are_sent_once() -> None:
    """Those of a continued request would contain the answer; later chunks of a completion carry null."""
    sent = replace(SENT, has_role=False, prompt_token_ids=(1, 2), token_ids=(3,))
    choice = {"index": 0, "text": "a", "finish_reason": None, "prompt_token_ids": [1, 2, 3], "token_ids": [4]}
    (chunk,) = events_of([rewriter(sent).rewrite(event({**HEAD, "choices": [choice]}))])
    assert chunk["choices"] == [{**choice, "prompt_token_ids": None}]


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (
            {"prompt_tokens": 13, "total_tokens": 20, "completion_tokens": 7},
            {"prompt_tokens": 10, "total_tokens": 20, "completion_tokens": 10},
        ),
        (
            {
                "prompt_tokens": 13,
                "total_tokens": 20,
                "completion_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 12, "created_cache_tokens": 1},
            },
            {
                "prompt_tokens": 10,
                "total_tokens": 20,
                "completion_tokens": 10,
                "prompt_tokens_details": {"cached_tokens": 10, "created_cache_tokens": 1},
            },
        ),
        (
            {"prompt_tokens": 13, "total_tokens": 13, "completion_tokens": None, "prompt_tokens_details": None},
            {"prompt_tokens": 10, "total_tokens": 13, "completion_tokens": 3, "prompt_tokens_details": None},
        ),
        (None, None),
    ],
)
def test_usage_is_that_of_one_answer(usage: object, expected: object) -> None:
    """What the replica got as prompt and the client as answer counts as answer; the sum stays."""
    (chunk,) = events_of([rewriter().rewrite(event({**HEAD, "choices": [], "usage": usage}))])
    assert chunk["usage"] == expected


@pytest.mark.parametrize(
    "block", [DONE, b": x\n\n", b'data: {"error":{"message":"x"}}\n\n', b"data: {half\n\n", b"data: [1]\n\n"]
)
def test_what_is_no_chunk_passes_unchanged(block: bytes) -> None:
    """Comments, the end mark and errors are not the rewriter's."""
    assert rewriter().rewrite(block) == block


@pytest.mark.parametrize("delta", [{"reasoning": "hm"}, {"reasoning_content": "hm", "content": None}])
def test_a_replica_that_starts_to_reason_after_the_text_is_not_passed_on(delta: dict[str, Any]) -> None:
    """Its prompt was read otherwise than it was meant, so the answer would not be one."""
    with pytest.raises(NotContinuable) as refusal:
        rewriter().rewrite(chat_chunk(HEAD, delta))
    assert refusal.value.reason is ContinuationOutcome.REASONING
    assert b"hm" in rewriter(replace(SENT, text=""), 0).rewrite(chat_chunk(HEAD, delta))


def test_text_that_looks_like_a_chunk_is_text() -> None:
    """Nothing that a model writes is taken for a field."""
    delta = {"content": '"role":"x","reasoning":"y","prompt_token_ids":[1]'}
    assert rewriter().rewrite(chat_chunk(HEAD, delta)) == chat_chunk(OWN, delta, **MARK)


@given(
    st.data(),
    st.sampled_from([chat_stream, completion_stream]),
    st.booleans(),
    st.lists(st.text(max_size=6), max_size=20),
)
def test_a_stream_of_its_own_rest_looks_uninterrupted(
    data: st.DataObject, build: Callable[..., list[bytes]], with_ids: bool, texts: list[str]
) -> None:
    """Cut anywhere, up to twice, and gone on with by a replica that repeats the role: the client sees the same events."""
    whole = build(texts, with_ids=with_ids)
    opening = whole[:1] if build is chat_stream else []
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), min_size=1, max_size=2)))
    memory, seen = StreamMemory(), list(whole[: cuts[0]])
    for block in seen:
        memory.add(block)
    for seams, (begin, end) in enumerate(zip(cuts, [*cuts[1:], len(whole)], strict=True), start=1):
        sent = memory.sent()
        again = opening if begin > 0 else []
        rewrite = SeamRewriter(sent, tokens_sent=0, seams=seams).rewrite
        for block in [*again, *whole[begin:end]]:
            other = block.replace(b'"id":"answer-1"', b'"id":"other"').replace(b'"created":1753800000', b'"created":1')
            block = rewrite(other if sent.id else block)
            seen.append(block)
            memory.add(block)
    unmarked = [{key: value for key, value in chunk.items() if key != "intellect"} for chunk in events_of(seen)]
    assert unmarked == events_of(whole)
    assert b"".join(seen).endswith(DONE)
    assert memory.sent().text == "".join(texts)


CHAT_BODY = {"messages": [], "stream": True, "stream_options": {"include_usage": True}}
TEXT_BODY = {"prompt": "x", "stream": True}


def ended(body: dict[str, Any], sent: Sent, tokens_sent: int | None = 3, prompt_tokens: int | None = 10) -> list[Any] | None:
    end = is_finished(msgspec.json.encode(body), sent, tokens_sent, prompt_tokens=prompt_tokens)
    assert end is None or end == b"" or end.endswith(DONE)
    return None if end is None else events_of([end])


USAGE = {"prompt_tokens": 10, "total_tokens": 13, "completion_tokens": 3}


def test_an_answer_that_is_not_finished_goes_on() -> None:
    """While tokens are left to generate there is no end to send."""
    assert ended(CHAT_BODY, SENT) is None
    assert ended({**CHAT_BODY, "max_tokens": 4}, SENT) is None
    assert ended({**CHAT_BODY, "max_tokens": 4}, SENT, tokens_sent=None) is None
    assert ended(TEXT_BODY, SENT, tokens_sent=15) is None
    assert ended({**CHAT_BODY, "max_tokens": 1}, Sent(id="first", has_role=True), tokens_sent=0) is None


def test_an_answer_as_long_as_it_may_be_ends_with_length() -> None:
    """The finish chunk that the engine owed, then usage if asked for, then [DONE]."""
    finish = {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert ended({**CHAT_BODY, "max_tokens": 3}, SENT) == [
        {**OWN, "choices": [finish]},
        {**OWN, "choices": [], "usage": USAGE},
    ]
    (chunk,) = ended(TEXT_BODY, SENT, tokens_sent=16) or [None]
    assert (chunk["object"], chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) == (
        "text_completion",
        "",
        "length",
    )


@pytest.mark.parametrize(
    ("sent", "tokens_sent", "prompt_tokens", "usage"),
    [
        (replace(SENT, finish_reason="length"), 3, 10, USAGE),
        (replace(SENT, finish_reason="stop", stop_reason="x"), 3, 10, USAGE),
        (replace(SENT, finish_reason="stop"), 2, 10, USAGE),
        (replace(SENT, finish_reason="stop", token_ids=(1, 2, 3), prompt_token_ids=tuple(range(10))), 3, None, USAGE),
        (replace(SENT, finish_reason="stop", token_ids=(1, 2, 3), prompt_token_ids=tuple(range(10))), None, None, USAGE),
        (replace(SENT, finish_reason="stop", usage=USAGE), 99, 99, USAGE),
        (replace(SENT, finish_reason="stop"), None, 10, None),
        (replace(SENT, finish_reason="stop"), 3, None, None),
        (replace(SENT, finish_reason="stop", usage=USAGE, has_usage_chunk=True), 3, 10, None),
    ],
)
def test_an_answer_that_lacks_only_its_end_gets_it(
    sent: Sent, tokens_sent: int | None, prompt_tokens: int | None, usage: object
) -> None:
    """Usage is told where it is known and was not sent yet; a hidden end-of-sequence token counts, as in the engine."""
    assert ended(CHAT_BODY, sent, tokens_sent, prompt_tokens) == (
        [] if usage is None else [{**OWN, "choices": [], "usage": usage}]
    )


def test_usage_that_was_not_asked_for_is_not_sent() -> None:
    """Then the stream ends with [DONE] alone."""
    assert is_finished(msgspec.json.encode(TEXT_BODY), replace(SENT, finish_reason="stop"), 3, prompt_tokens=10) == DONE


def test_a_stream_that_was_done_gets_nothing_more() -> None:
    """[DONE] is sent once."""
    assert is_finished(msgspec.json.encode(TEXT_BODY), replace(SENT, is_done=True), 3) == b""


def test_an_unreadable_stream_is_never_called_finished() -> None:
    """What was not understood may have been text of another choice."""
    assert ended(CHAT_BODY, replace(SENT, finish_reason="stop", is_readable=False)) is None
