"""JSON bodies of OpenAI-style requests: what is asked for, and what makes a body no request at all.

Nothing here knows which fields a service supports: `decode_body` reads those that its caller's type declares and skips others.
"""

import enum
import re
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

NESTING_MAX = 128


class Surface(enum.StrEnum):
    """The routes that take a JSON body for an engine. The value is the public path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    EMBEDDINGS = "/v1/embeddings"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"


class InvalidRequestError(ValueError):
    """The body is not a request. `param` names the field at fault, if there is one; `code` is OpenAI's word for the fault."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The fields that the decoder's type declares; of two equal keys the last one counts, as it does for the engine.

    Raises InvalidRequestError for what is not a JSON object in UTF-8 (NaN and Infinity are not JSON), for a field of the wrong
    type or above a declared maximum, and for nesting deeper than NESTING_MAX.
    """
    try:
        value = decoder.decode(body)
        if not body.isascii():
            str(body, "utf-8")  # what is skipped is not checked by the decoder
    except msgspec.ValidationError as error:
        raise _explain(str(error), body) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"We could not parse the JSON body of your request: {error}.") from error
    except RecursionError as error:
        raise _too_deep() from error
    # Nothing can be nested deeper than it has opening brackets, which settles most bodies.
    if _has_more_openings(body, NESTING_MAX) and is_nested_deeper(body, NESTING_MAX):
        raise _too_deep()
    return value


def _too_deep() -> InvalidRequestError:
    return InvalidRequestError(
        f"The JSON body of your request is nested too deeply: at most {NESTING_MAX} objects and arrays may enclose each other."
    )


# Both kinds of bracket count alike once the JSON is known to be well-formed.
_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_STRUCTURE = b'{}[]"'
_NOT_STRUCTURE = bytes(set(range(256)) - set(_STRUCTURE))
# What may follow a backslash stays beside it for as long as escapes matter.
_NOT_STRUCTURE_NOR_ESCAPES = bytes(set(_NOT_STRUCTURE) - set(rb"\/bfnrtu"))
_SMALL_BYTES = 2048
_STEP = {ord("["): 1, ord("]"): -1}


def is_nested_deeper(document: bytes, limit: int) -> bool:
    """Whether objects and arrays lie more than `limit` deep inside each other. `document` is well-formed JSON.

    Linear in the size of the document and mostly in C, for it meets every long conversation.
    """
    if b"\\" in document:
        document = document.translate(None, _NOT_STRUCTURE_NOR_ESCAPES).replace(rb"\\", b"").replace(rb"\"", b"")
    brackets = b"".join(document.translate(_TO_SQUARE, _NOT_STRUCTURE).split(b'"')[::2])
    # Each round takes off the innermost level, and mostly nearly everything with it; the count is for what resists.
    while brackets:
        if limit == 0:
            return True
        rest = brackets.replace(b"[]", b"")
        if len(rest) * 4 > len(brackets) * 3:
            return max(accumulate(map(_STEP.__getitem__, brackets))) > limit
        brackets, limit = rest, limit - 1
    return False


def _has_more_openings(document: bytes, limit: int) -> bool:
    if len(document) < _SMALL_BYTES:
        return document.count(b"{") + document.count(b"[") > limit
    for bracket in (b"{", b"["):  # stops at the first too many, and skips fast where there are few
        at = document.find(bracket)
        while at >= 0:
            if limit == 0:
                return True
            limit -= 1
            at = document.find(bracket, at + 1)
    return False


_PATH = re.compile(r"(?s)(.*) - at `\$\.?(.*)`$")
_WRONG_TYPE = re.compile(r"Expected `(.+)`, got `(.+)`$")
_ABOVE = re.compile(r"Expected `(int|array)` (?:of length )?<= (\d+)$")
_WORDS = {
    "bool": "a boolean",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_VALUE_CHARS = 40


def _explain(problem: str, body: bytes) -> InvalidRequestError:
    """From msgspec's "Expected `str | null`, got `int` - at `$.model`" to a sentence, the field's name and a code."""
    where = _PATH.match(problem)
    what, param = (where[1], where[2]) if where else (problem, "")
    wrong = _WRONG_TYPE.match(what)
    if not param:
        got = f", but it is {_WORDS.get(wrong[2], wrong[2])}" if wrong else ""
        return InvalidRequestError(f"The body of your request must be a JSON object{got}.")
    value = _value_of(param, body)
    quoted = value and f" ({value})"
    if wrong:
        expected = " or ".join(_WORDS.get(word, word) for word in wrong[1].split(" | ") if word != "null") or "null"
        got = "a number with a decimal point or exponent" if wrong[2] == "float" else _WORDS.get(wrong[2], wrong[2])
        message = f"Invalid type for '{param}': expected {expected}, but got {got}{quoted} instead."
        return InvalidRequestError(message, param, "invalid_type")
    if above := _ABOVE.match(what):
        if above[1] == "int":
            message = (
                f"Invalid '{param}': integer above maximum value. Expected a value <= {above[2]}, but got {value or 'more'}."
            )
            return InvalidRequestError(message, param, "integer_above_max_value")
        message = f"Invalid '{param}': array too long. Expected an array with at most {above[2]} elements."
        return InvalidRequestError(message, param, "array_above_max_length")
    return InvalidRequestError(f"Invalid value for '{param}'{quoted}: {what}.", param, "invalid_value")


def _value_of(field: str, body: bytes) -> str:
    """The beginning of the field's value as the client wrote it; nothing where the field lies deeper."""
    try:
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).get(field)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the body breaks off after the fault
        return ""
    if raw is None:
        return ""
    text = bytes(raw).decode("utf-8", "replace")
    return text if len(text) <= _VALUE_CHARS else text[:_VALUE_CHARS] + "…"


# Where a URL that an engine would fetch may stand in a conversation, and what may hold such a place.
_URL_FIELDS = ("image_url", "audio_url", "video_url", "file_url")
_URL_HOLDERS = ("source", "file")
_CONTENT_FIELDS = ("content", "output", *_URL_HOLDERS)


def find_remote_url(value: Any, path: str) -> tuple[str, str] | None:
    """The first place in a conversation that points at content elsewhere instead of carrying it, and what stands there.

    `value` is the decoded `messages` or `input` of any of the surfaces, `path` its name. Walks content parts only: the
    arguments of tool calls, citations and texts may name any URL. The spelling of `data:` is what vLLM takes without
    fetching; whatever else stands in such a field is reported, so that no other reading of it can be a way around.
    """
    if isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, (dict, list)) and (found := find_remote_url(item, f"{path}[{index}]")):
                return found
        return None
    if not isinstance(value, dict):
        return None
    for field in _URL_FIELDS:
        if field in value and (found := _remote(value[field], f"{path}.{field}")):
            return found
    for field in _CONTENT_FIELDS:
        item = value.get(field)
        if field in _URL_HOLDERS and isinstance(item, dict) and (found := _remote(item.get("url"), f"{path}.{field}")):
            return found
        if isinstance(item, (dict, list)) and (found := find_remote_url(item, f"{path}.{field}")):
            return found
    return None


def _remote(url: Any, path: str) -> tuple[str, str] | None:
    if isinstance(url, dict):
        url = url.get("url")
    if url is None or (isinstance(url, str) and url[:5].lower() == "data:"):
        return None
    if not isinstance(url, str):
        return path, "not a string"
    return path, url if len(url) <= _VALUE_CHARS else url[:_VALUE_CHARS] + "…"
