"""Recognising the end of a stream."""

import msgspec
from hypothesis import assume, given
from hypothesis import strategies as st

from protocol.sse import DONE, StreamWatch, event, says_aborted


@given(
    body=st.binary(max_size=200),
    end=st.sampled_from([DONE, b"data: [DONE]\r\n\r\n", b"data: [DONE]", b"data: [DONE]\n"]),
    cuts=st.lists(st.integers(0, 250), max_size=10),
)
def test_the_end_is_seen_however_the_bytes_are_cut(body: bytes, end: bytes, cuts: list[int]) -> None:
    """A whole stream is never reported as broken."""
    data = body + end
    watch = StreamWatch()
    last = 0
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        watch.feed(data[last:cut])
        last = cut
    assert watch.is_done


@given(st.binary(max_size=100))
def test_a_stream_that_goes_on_or_stops_short_is_not_done(body: bytes) -> None:
    """A broken stream is never reported as whole."""
    for data in (body + DONE + event(b"{}"), body + DONE[:-3], body + b"data: [DONE"):
        watch = StreamWatch()
        watch.feed(data)
        assert not watch.is_done


TOKEN = b'data: {"choices":[{"delta":{"content":"he said \\"finish_reason\\":\\"abort\\""},"finish_reason":null}]}\n\n'
FAILED = (
    b'data: {"error":{"message":"boom","code":500}}\n\n',
    b'data: {"choices":[{"delta":{},"finish_reason":"abort"}]}\n\n',
)


@given(tokens=st.integers(0, 4), failed=st.sampled_from(FAILED), cuts=st.lists(st.integers(0, 700), max_size=6))
def test_a_stream_that_says_it_failed_is_caught_before_its_done(tokens: int, failed: bytes, cuts: list[int]) -> None:
    """An answer that the engine gave up on is not taken for a whole one, and what came before is still passed on."""
    data = TOKEN * tokens + failed + DONE
    watch = StreamWatch()
    last, passed = 0, b""
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        part = data[last:cut]
        last = cut
        failed_at = watch.feed(part)
        if failed_at is not None:
            passed += part[:failed_at]
            break
        passed += part
    else:
        raise AssertionError("the failure was not seen")
    assert b"[DONE]" not in passed
    assert passed.startswith(TOKEN * tokens)


@given(st.text(max_size=60))
def test_what_a_model_writes_is_never_taken_for_a_failure(text: str) -> None:
    """A model may write about errors."""
    assume("\x00" not in text)
    for words in (text, '"finish_reason":"abort"', 'data: {"error"'):
        answer = msgspec.json.encode({"choices": [{"delta": {"content": words}, "finish_reason": "stop"}]})
        assert StreamWatch().feed(event(answer)) is None
        assert not says_aborted(answer)
