"""A public name for the model, in streams that are cut anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.model_alias import ModelAlias, StreamRenamer

ALIAS = ModelAlias(public="acme", engine="/models/secret path")


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@given(cuts=st.lists(st.integers(0, 400), max_size=12))
def test_no_part_of_the_engines_name_gets_through(end: bytes, cuts: list[int]) -> None:
    """However the network cuts it, and whatever line ends the engine uses, each event comes on with its own last byte."""
    event = b'data: {"model":"/models/secret path","text":"say \\"model\\""}' + end
    data = event * 3 + b"data: [DONE]" + end
    renamer = StreamRenamer(ALIAS)
    last, sent = 0, b""
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        sent += renamer.feed(data[last:cut])
        last = cut
    assert sent + renamer.finish() == data.replace(b"/models/secret path", b"acme")


def test_an_endless_line_is_passed_on_in_parts() -> None:
    """A line without end fills no memory."""
    renamer = StreamRenamer(ALIAS)
    part = b"x" * 65536
    sent = b"".join(renamer.feed(part) for _ in range(64))
    assert len(sent) >= 64 * len(part) - StreamRenamer.LINE_BYTES_MAX - len(part)
