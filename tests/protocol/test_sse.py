"""Events out of bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.sse import DONE, KEEP_ALIVE, EventBuffer, EventTooLongError, data_of, event, split

END = st.sampled_from([b"\n\n", b"\r\n\r\n"])
EVENT = st.builds(lambda text, end: b"data: " + text.encode() + end, st.text("ab\u00e9\u4f60 {}", max_size=20), END)


@given(events=st.lists(EVENT, max_size=8), rest=st.sampled_from([b"", b"d", b"data: {\n", b"data: x\r\n"]), data=st.data())
def test_events_come_out_whole_however_the_bytes_are_cut(events: list[bytes], rest: bytes, data: st.DataObject) -> None:
    """No client gets half an event, and no byte is lost, doubled or moved."""
    stream = b"".join(events) + rest
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    buffer, blocks = EventBuffer(1000), []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        blocks.append(buffer.feed(stream[begin:end]))
        assert blocks[-1] == b"" or blocks[-1].endswith((b"\n\n", b"\r\n\r\n"))
    assert b"".join(blocks) == b"".join(events)
    assert buffer.rest == rest
    assert split(b"".join(blocks)) == events


def test_an_event_without_end_is_cut_off() -> None:
    """An engine that never ends an event fills no memory."""
    buffer = EventBuffer(100)
    buffer.feed(b"x" * 100)
    with pytest.raises(EventTooLongError, match="100 bytes"):
        buffer.feed(b"x")


@pytest.mark.parametrize(
    ("one", "data"),
    [
        (DONE, b"[DONE]"),
        (event(b"{}"), b"{}"),
        (event(b"{}", b"message_stop"), b"{}"),
        (b"data:{}\r\n\r\n", b"{}"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (KEEP_ALIVE, None),
        (b"event: ping\n\n", None),
    ],
)
def test_an_events_data_is_read_as_the_standard_says(one: bytes, data: bytes | None) -> None:
    """Comments carry nothing; several lines are one text."""
    assert data_of(one) == data
