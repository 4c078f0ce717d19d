"""Recognising the end of a stream."""

from hypothesis import given
from hypothesis import strategies as st

from protocol.sse import DONE, DoneDetector, event


@given(
    body=st.binary(max_size=200),
    end=st.sampled_from([DONE, b"data: [DONE]\r\n\r\n", b"data: [DONE]", b"data: [DONE]\n"]),
    cuts=st.lists(st.integers(0, 250), max_size=10),
)
def test_the_end_is_seen_however_the_bytes_are_cut(body: bytes, end: bytes, cuts: list[int]) -> None:
    """A whole stream is never reported as broken."""
    data = body + end
    detector = DoneDetector()
    last = 0
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        detector.feed(data[last:cut])
        last = cut
    assert detector.is_done


@given(st.binary(max_size=100))
def test_a_stream_that_goes_on_or_stops_short_is_not_done(body: bytes) -> None:
    """A broken stream is never reported as whole."""
    for data in (body + DONE + event(b"{}"), body + DONE[:-3], body + b"data: [DONE"):
        detector = DoneDetector()
        detector.feed(data)
        assert not detector.is_done
