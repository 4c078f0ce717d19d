"""JSON bodies: what is a request at all, how deep it is nested, and what in it points elsewhere."""

import json
import re
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.openai import NESTING_MAX, InvalidRequestError, decode_body, find_remote_url, is_nested_deeper


class Fields(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None
    n: Annotated[int, msgspec.Meta(le=8)] | None = None
    words: Annotated[list[str], msgspec.Meta(max_length=2)] | None = None


DECODER = msgspec.json.Decoder(Fields)

# Texts that look like structure once an escape is misread.
texts = st.text(st.sampled_from('[]{}"\\,: \nab\u00e9'), max_size=12)
documents = st.recursive(
    st.none() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=40,
)


def depth(value: Any) -> int:
    match value:
        case list():
            return 1 + max(map(depth, value), default=0)
        case dict():
            return 1 + max(map(depth, value.values()), default=0)
    return 0


def test_only_declared_fields_are_read_and_the_rest_is_left_alone() -> None:
    """Fields that nobody declared cannot make a request fail."""
    fields = decode_body(DECODER, b'{"messages": [{"x": 1e400}], "model": "m", "anything": {"deep": [1, null]}}')
    assert fields.model == "m"
    assert decode_body(DECODER, b'{"model": null}').model is None


def test_the_last_of_two_equal_keys_counts_as_it_does_for_the_engine() -> None:
    """Router and engine never read two different models out of one body, however the key is spelled."""
    assert decode_body(DECODER, b'{"model": "a", "mod\\u0065l": "b"}').model == "b"


@pytest.mark.parametrize(
    ("body", "message", "param", "code"),
    [
        (
            b'{"model": 1}',
            "Invalid type for 'model': expected a string, but got an integer (1) instead.",
            "model",
            "invalid_type",
        ),
        (b'{"n": 1.0}', "expected an integer, but got a number with a decimal point or exponent (1.0)", "n", "invalid_type"),
        (b'{"stream": "true"}', 'expected a boolean, but got a string ("true")', "stream", "invalid_type"),
        (b'{"n": 9}', "Expected a value <= 8, but got 9.", "n", "integer_above_max_value"),
        (b'{"n": ' + b"9" * 5000 + b"}", "Invalid value for 'n' (99999", "n", "invalid_value"),
        (b'{"words": ["a", "b", "c"]}', "at most 2 elements", "words", "array_above_max_length"),
        (b'{"words": ["a", 1]}', "expected a string, but got an integer", "words[1]", "invalid_type"),
        (b'{"stream": "' + b"x" * 1000 + b'"}', "xxx…)", "stream", "invalid_type"),
        (b'{"stream": 1, broken', "expected a boolean, but got an integer", "stream", "invalid_type"),
        (b"[1]", "must be a JSON object, but it is an array", None, None),
        (b"3", "must be a JSON object, but it is an integer", None, None),
        (b"null", "must be a JSON object, but it is null", None, None),
    ],
)
def test_a_fault_names_the_field_the_value_and_what_was_expected(
    body: bytes, message: str, param: str | None, code: str | None
) -> None:
    """The error points at what to change, with OpenAI's code, and quotes no more than the beginning of a long value."""
    with pytest.raises(InvalidRequestError) as error:
        decode_body(DECODER, body)
    assert message in error.value.message
    assert len(error.value.message) < 200
    assert (error.value.param, error.value.code) == (param, code)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b'{"a": 1}x', b"\xef\xbb\xbf{}", '{"model": "m"}'.encode("utf-16"), b'{"a": 01}', b'{"a": "\n"}'),
        *(b'{"a": NaN}', b'{"a": Infinity}', b'{"a": [-Infinity]}'),
        *(b'{"a": "\xff"}', b'{"\xff": 1}', b'{"a": "\xed\xa0\x80"}', b'{"a": "\xc0\xaf"}', b'{"model": "\xff"}'),
    ],
)
def test_what_is_not_json_in_utf_8_is_refused(body: bytes) -> None:
    """A body that the engine could read differently, or not at all, never gets to it, even where nobody reads the field."""
    with pytest.raises(InvalidRequestError, match="We could not parse the JSON body of your request: "):
        decode_body(DECODER, body)


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('{"a":[', "]}")])
@pytest.mark.parametrize("padding", [0, 10_000])
def test_the_limit_on_nesting_is_exact(opening: str, closing: str, padding: int) -> None:
    """A body as deep as is documented passes, one level more is an error, and a million levels are the same error."""
    levels = opening.count("[") + opening.count("{")

    def body(depth: int) -> bytes:
        inner = (depth - 1) // levels
        rest = (depth - 1) % levels
        nested = "[" * rest + opening * inner + "1" + closing * inner + "]" * rest
        return ('{"pad":"' + " " * padding + '","x":' + nested + "}").encode()

    decode_body(DECODER, body(NESTING_MAX))
    for too_deep in (NESTING_MAX + 1, 900, 2000, 1_000_000):
        with pytest.raises(InvalidRequestError, match=f"nested too deeply: at most {NESTING_MAX}"):
            decode_body(DECODER, body(too_deep))


def test_many_brackets_side_by_side_or_in_a_text_are_not_deep() -> None:
    """A long conversation about code is no nesting."""
    messages = [{"content": 'f(x[0]){ return "\\{[" }' * 20}] * 500
    decode_body(DECODER, json.dumps({"messages": messages}).encode())


@given(document=documents, limit=st.integers(0, 8), ascii_only=st.booleans())
@example(document=["\\", ['\\\\"', {'"]': "["}]], limit=2, ascii_only=True)
def test_nesting_is_counted_as_a_parser_would(document: Any, limit: int, ascii_only: bool) -> None:
    """Brackets and quotes inside texts, escaped in any way, never change the depth."""
    encoded = json.dumps([document], ensure_ascii=ascii_only).encode()
    assert is_nested_deeper(encoded, limit) == (depth([document]) > limit)


@given(
    shape=st.lists(st.integers(1, 12), max_size=30), limit=st.integers(0, 40), close=st.lists(st.integers(1, 12), max_size=30)
)
def test_nesting_is_counted_in_rugged_documents(shape: list[int], limit: int, close: list[int]) -> None:
    """Deep and wide at once is counted as well as either."""
    text, open_now, deepest = "[", 1, 1
    for up, down in zip(shape, close, strict=False):
        text += ("," if text[-1] == "]" else "") + "[" * up
        open_now += up
        deepest = max(deepest, open_now)
        down = min(down, open_now - 1)
        text += "]" * down
        open_now -= down
    document = (text + "]" * open_now).encode()
    json.loads(document)
    assert is_nested_deeper(document, limit) == (deepest > limit)


def parts(*contents: Any) -> list[Any]:
    return [{"role": "user", "content": content} for content in contents]


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (parts("hi", [{"type": "image_url", "image_url": {"url": "https://a/b.png"}}]), "messages[1].content[0].image_url"),
        (parts([{"image_url": "http://a/b.png"}]), "messages[0].content[0].image_url"),
        (
            parts([{"type": "text"}, {"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}]),
            "messages[0].content[1].audio_url",
        ),
        (parts([{"type": "video_url", "video_url": {"url": " data:video/mp4;base64,AA"}}]), "messages[0].content[0].video_url"),
        (parts([{"type": "video_url", "video_url": {"url": "d\tata:,"}}]), "messages[0].content[0].video_url"),
        (parts([{"type": "image_url", "image_url": ["https://a"]}]), "messages[0].content[0].image_url"),
        (parts([{"type": "image_url", "image_url": {"url": {"url": "https://a"}}}]), "messages[0].content[0].image_url"),
        (parts([{"type": "image_url", "image_url": ""}]), "messages[0].content[0].image_url"),
        (parts({"type": "image_url", "image_url": "//a/b"}), "messages[0].content.image_url"),
        (
            [{"type": "message", "content": [{"type": "input_file", "file_url": "https://a"}]}],
            "messages[0].content[0].file_url",
        ),
        ([{"type": "computer_call_output", "output": {"image_url": "https://a"}}], "messages[0].output.image_url"),
        (parts([{"type": "file", "file": {"url": "gopher://a"}}]), "messages[0].content[0].file"),
        (parts([{"type": "image", "source": {"type": "url", "url": "https://a"}}]), "messages[0].content[0].source"),
        (
            parts([{"type": "tool_result", "content": [{"type": "image", "source": {"url": "https://a"}}]}]),
            "messages[0].content[0].content[0].source",
        ),
        ([parts([{"image_url": "https://a"}])], "messages[0][0].content[0].image_url"),
    ],
)
def test_content_that_lies_elsewhere_is_found(value: Any, where: str) -> None:
    """A URL in any content part of any of the surfaces is found, unless it is one that carries its content."""
    found = find_remote_url(value, "messages")
    assert found is not None
    assert found[0] == where


@pytest.mark.parametrize(
    "value",
    [
        "https://a/b.png",
        None,
        parts("see https://a/b.png", None, [{"type": "text", "text": "https://a/b.png"}], ["https://a/b.png"]),
        parts([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}}]),
        parts([{"type": "image_url", "image_url": "DATA:image/png;base64,AA"}]),
        parts([{"type": "image_url", "image_url": None}]),
        parts([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}]),
        parts([{"type": "search_result", "source": "https://a", "content": [{"type": "text", "text": "x"}]}]),
        parts([{"type": "tool_use", "input": {"url": "https://a", "image_url": "https://a"}}]),
        parts([{"type": "output_text", "text": "x", "annotations": [{"type": "url_citation", "url": "https://a"}]}]),
        [{"type": "web_search_call", "action": {"type": "open_page", "url": "https://a"}}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"image_url": "https://a"}'}}]}],
    ],
)
def test_a_url_that_nobody_would_fetch_is_no_fault(value: Any) -> None:
    """Texts, arguments of tools and citations may name any URL, and a data: URL carries its content."""
    assert find_remote_url(value, "messages") is None


def test_a_long_url_is_quoted_by_its_beginning() -> None:
    """An error does not carry a whole image."""
    found = find_remote_url(parts([{"image_url": "x" * 10_000}]), "messages")
    assert found is not None
    assert re.fullmatch("x+…", found[1])
    assert len(found[1]) < 50
