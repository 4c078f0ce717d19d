"""What a stream has given its client, however the events came and whenever they were read."""

import tracemalloc
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.stream import memory as stream_memory
from router.stream.memory import FOLD_BYTES, Sent, StreamMemory
from tests.router.stream.samples import DONE, chat_stream, completion_stream, event, events_of, text_of

HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1753800000, "model": "m"}


def chunk(delta: Mapping[str, Any], **rest: Any) -> bytes:
    return event({**HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **rest}]})


def remember(*blocks: bytes) -> Sent:
    memory = StreamMemory()
    for block in blocks:
        memory.add(block)
    return memory.sent()


@given(st.data(), st.sampled_from([chat_stream, completion_stream]), st.booleans(), st.integers(0, 2000))
def test_what_was_sent_and_the_rest_are_the_whole(data: st.DataObject, build: Any, with_ids: bool, fold_bytes: int) -> None:
    """A stream that is cut between any two events has given exactly the text of the events before the cut."""
    tokens = data.draw(st.lists(st.text(max_size=8), max_size=40))
    stream = build(tokens, with_ids=with_ids)
    cut = data.draw(st.integers(0, len(stream)))
    memory = StreamMemory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_memory, "FOLD_BYTES", fold_bytes)
        begin = 0
        while begin < cut:
            end = data.draw(st.integers(begin + 1, cut))
            memory.add(b"".join(stream[begin:end]))
            begin = end
    sent = memory.sent()
    assert sent.text + text_of(stream[cut:]) == text_of(stream) == "".join(tokens)
    assert sent == remember(b"".join(stream[:cut])) == memory.sent()
    assert sent.is_readable
    assert sent.id == ("" if cut == 0 else "answer-1")
    assert sent.is_done == (cut == len(stream))
    if with_ids:
        ids = [id_ for chunk in events_of(stream[:cut]) for c in chunk["choices"] for id_ in c.get("token_ids") or ()]
        assert sent.token_ids == tuple(ids)
    elif sent.text:
        assert sent.token_ids is None


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([], Sent()),
        (
            [chunk({"role": "assistant", "content": ""})],
            Sent(id="chatcmpl-1", created=1753800000, model="m", has_role=True),
        ),
        (
            [chunk({"reasoning": "hm"})],
            Sent(id="chatcmpl-1", created=1753800000, model="m", has_reasoning=True),
        ),
        (
            [chunk({"reasoning_content": "hm", "content": None})],
            Sent(id="chatcmpl-1", created=1753800000, model="m", has_reasoning=True),
        ),
        (
            [chunk({"tool_calls": [{"index": 0, "function": {"name": "f"}}]})],
            Sent(id="chatcmpl-1", created=1753800000, model="m", has_tool_calls=True),
        ),
        (
            [chunk({"content": "a"}, token_ids=[1]), chunk({"content": "b"}, token_ids=None)],
            Sent(id="chatcmpl-1", created=1753800000, model="m", text="ab", token_ids=None, chunks=2),
        ),
        (
            [chunk({"content": "a"}, token_ids=[1]), chunk({"content": ""}, token_ids=[2])],
            Sent(
                id="chatcmpl-1",
                created=1753800000,
                model="m",
                text="a",
                token_ids=(1, 2),
                chunks=1,
                has_textless_tokens=True,
            ),
        ),
        (
            [event({**HEAD, "choices": [], "usage": {"prompt_tokens": 1}}), DONE],
            Sent(
                id="chatcmpl-1",
                created=1753800000,
                model="m",
                usage={"prompt_tokens": 1},
                has_usage_chunk=True,
                is_done=True,
            ),
        ),
    ],
)
def test_what_is_remembered_of_each_kind_of_chunk(blocks: list[bytes], expected: Sent) -> None:
    """Roles, reasoning, tool calls, ids and the end each leave their mark."""
    assert remember(*blocks) == expected


def test_a_finish_chunk_with_stop_reason() -> None:
    """How an answer ended is known, with the stop string that ended it."""
    sent = remember(chunk({"content": "a"}), chunk({"content": ""}, finish_reason="stop", stop_reason="\n\n"))
    assert (sent.text, sent.finish_reason, sent.stop_reason) == ("a", "stop", "\n\n")


def test_an_empty_list_of_ids_holds_nothing_back() -> None:
    """A chunk without text and without tokens says nothing about the text before."""
    sent = remember(chunk({"content": "a"}, token_ids=[1]), chunk({"content": ""}, token_ids=[]))
    assert (sent.token_ids, sent.has_textless_tokens) == ((1,), False)


def test_comments_and_other_line_ends_change_nothing() -> None:
    """Keep-alive comments between events, and an engine that ends lines with CR LF, are understood."""
    plain = [chunk({"content": "a"}), chunk({"content": "b data: \n\n c"})]
    commented = [b": keep-alive\n\n", plain[0], b": keep-alive\n\n", plain[1]]
    assert remember(*commented) == remember(*plain) == remember(*(p.replace(b"\n\n", b"\r\n\r\n") for p in plain))


@pytest.mark.parametrize(
    "block",
    [
        b"data: {half\n\n",
        b'data: {"choices":[{"text":3}]}\n\n',
        b"data: \xff\n\n",
        chunk({"content": "a"}, token_ids=[2**64]),
        chunk({"content": "a"}, token_ids=[2**63]),
        chunk({"content": "a"})[:-30],
    ],
)
def test_what_is_not_understood_is_never_taken_for_an_answer(block: bytes) -> None:
    """A stream with one event that is no chunk counts as unreadable, not as shorter than it was; relaying it goes on."""
    sent = remember(chunk({"content": "a"}), block, chunk({"content": "b"}))
    assert not sent.is_readable
    assert not sent.is_empty


def test_memory_is_about_the_text_and_not_the_events() -> None:
    """A stream of 20,000 events of 250 bytes keeps less than a twentieth of them."""
    stream = chat_stream([f" word{i:04}" for i in range(20_000)], with_ids=False)
    memory = StreamMemory()
    tracemalloc.start()
    try:
        for block in stream:
            memory.add(block)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    text = len(memory.sent().text)
    assert kept < 2 * text + 4 * FOLD_BYTES
    assert kept < sum(map(len, stream)) / 20


def test_a_json_number_of_a_float_is_no_token() -> None:
    """Ids that are not whole numbers make the stream unreadable."""
    assert not remember(event({**HEAD, "choices": [{"text": "a", "token_ids": [1.5]}]})).is_readable


def test_the_first_chunk_names_the_stream() -> None:
    """Later chunks with another id do not rename it."""
    first, second = chunk({"content": "a"}), chunk({"content": "b"}).replace(b"chatcmpl-1", b"chatcmpl-2")
    assert remember(first, second).id == "chatcmpl-1"
    assert msgspec.json.decode(second[6:])["id"] == "chatcmpl-2"
