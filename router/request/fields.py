"""What the router reads of a request body, refuses in it and changes in it. Everything else passes through unread."""

import re
from typing import NamedTuple

import msgspec
from msgspec import UNSET, Raw

from protocol.openai import InvalidRequestError, Surface, decode_body, find_remote_url
from router.outcome import ContinuationOutcome
from router.request.continuation_rules import never_continues, prompts_in
from router.request.prompt_bytes import NO_PROMPT, PromptPlace, prompt_place
from router.request.raw_fields import RawFields, read_fields
from router.request.schema import (
    ABSENT,
    DECODERS,
    REFUSED,
    ChatFields,
    CommonFields,
    EmbeddingsFields,
    GeneratingFields,
    MessagesFields,
    OpenAIFields,
    ResponsesFields,
    TokenizeFields,
)

SCHEMA_BYTES_MAX = 64 * 1024
TOOLS_BYTES_MAX = 1024 * 1024
REGEX_CHARS_MAX = 4096

_DIGITS_MAX = 10  # of a number of tokens
_SURFACE = ContinuationOutcome.SURFACE  # to look a member of an enum up takes 0.1 us, which every request would pay


class Media(NamedTuple):
    """Images, sounds and the like that a request carries, and how many bytes of it they are."""

    pieces: int = 0
    size: int = 0

    def plus(self, other: "Media") -> "Media":
        return Media(self.pieces + other.pieces, self.size + other.size)


NO_MEDIA = Media()


class RequestFacts(msgspec.Struct, frozen=True, gc=False):
    """What the router needs to know of a request in order to place it, bill it and continue it."""

    model: str  # as the client calls it
    stream: bool
    n: int
    choices: int  # answers of a stream that must finish: n for each prompt; 0: not counted
    strips_usage: bool  # the router asks the engine for usage that the client did not ask for
    prompt_cache_key: str | None  # the client's hint which requests share a prefix
    never_continues: ContinuationOutcome | None  # why another replica could not go on with a broken answer; None: it could
    sends_stream_options: bool  # the key stands in the body, be it with null
    sends_request_id: bool
    previous_response_id: str | None = None  # a stored response that this one follows
    prompt: PromptPlace = NO_PROMPT
    output_max: int | None = None  # tokens of each choice; None: no limit, or one that the engine will refuse
    media: Media = NO_MEDIA


def read_request(surface: Surface, body: bytes) -> RequestFacts:
    """Raises InvalidRequestError for a body that is not a request, asks for what is not served or is above a limit."""
    try:
        fields = decode_body(DECODERS[surface], body)
    except InvalidRequestError as error:
        raise _refusal(error) from error
    if fields.model is None:
        message = "You must provide a 'model'; GET /v1/models lists what is served."
        raise InvalidRequestError(message, "model", "missing_required_parameter")
    media = _check_urls(fields)
    stream, n, choices, strips_usage, sends_stream_options = False, 1, 1, False, False
    prompt_cache_key: str | None = None
    output_max: int | None = None
    refusal: ContinuationOutcome | None = _SURFACE
    if isinstance(fields, GeneratingFields):
        stream = fields.stream is True
        prompt_cache_key = fields.prompt_cache_key
        output_max = _output_max(fields)
        _check_sizes(fields)
        if isinstance(fields, OpenAIFields):
            n = 1 if fields.n is None else fields.n
            options = fields.stream_options
            sends_stream_options = options is not UNSET
            if stream:
                strips_usage = not (options and options.include_usage)
                refusal = never_continues(fields)
                choices = n if isinstance(fields, ChatFields) else n * prompts_in(fields)
            elif options:
                message = "'stream_options' is only allowed when 'stream' is true; leave it out or set 'stream' to true."
                raise InvalidRequestError(message, "stream_options", "invalid_value")
            if isinstance(fields, ChatFields) and fields.store:
                raise _unsupported("store")
    return RequestFacts(
        fields.model,
        stream,
        n,
        choices,
        strips_usage,
        prompt_cache_key,
        refusal,
        sends_stream_options,
        fields.request_id is not UNSET,
        fields.previous_response_id if isinstance(fields, ResponsesFields) else None,
        prompt_place(body, fields),
        output_max,
        media,
    )


def _output_max(fields: GeneratingFields) -> int | None:
    for value in (fields.max_completion_tokens, fields.max_tokens, fields.max_output_tokens):
        if value is not ABSENT:
            digits = bytes(value)
            return int(digits) if digits.isdigit() and len(digits) < _DIGITS_MAX else None
    return None


def engine_body(
    body: bytes, facts: RequestFacts, *, surface: Surface, model: str | None = None, request_id: str | None = None
) -> bytes:
    """The body for the engine: `body` itself when nothing changes.

    `model` is the engine's name for the model where it differs from the client's. `request_id` becomes the id of the answer on
    the one surface whose engine takes it from the body, responses. Where `facts.strips_usage`, usage is asked for.
    `facts` are those of `body`. A new key is spliced in behind the opening brace; a key that the client sent as well would win
    over it there, so then the top level is written anew, value by value as the client wrote them.
    """
    changes: dict[str, bytes] = {}
    is_spliced = True
    if facts.strips_usage:
        changes["stream_options"] = b'{"include_usage":true}'
        is_spliced = not facts.sends_stream_options
    if request_id is not None and surface is Surface.RESPONSES:
        changes["request_id"] = msgspec.json.encode(request_id)
        is_spliced = is_spliced and not facts.sends_request_id
    if model is not None and model != facts.model:
        changes["model"] = msgspec.json.encode(model)
        is_spliced = False
    if not changes:
        return body
    if is_spliced:
        inside = body.index(b"{") + 1
        inserted = [b'"%b":%b,' % (name.encode(), value) for name, value in changes.items()]
        return b"".join([body[:inside], *inserted, memoryview(body)[inside:]])
    fields = read_fields(body)
    if facts.strips_usage and facts.sends_stream_options:
        changes["stream_options"] = _with_usage(fields["stream_options"])
    fields.update((name, Raw(value)) for name, value in changes.items())
    return msgspec.json.encode(fields)


def _with_usage(stream_options: Raw) -> bytes:
    options = msgspec.json.decode(stream_options, type=RawFields | None) or {}
    options["include_usage"] = Raw(b"true")
    if "continuous_usage_stats" in options:
        # Without include_usage it has no effect; now it would put usage into every chunk.
        options["continuous_usage_stats"] = Raw(b"false")
    return msgspec.json.encode(options)


def _refusal(error: InvalidRequestError) -> InvalidRequestError:
    """What the decoder found, as the refusal that stands behind the declared type."""
    field = re.split(r"[.\[]", error.param or "", maxsplit=1)[0]
    if field not in REFUSED or error.param == "chat_template_kwargs" or field == "store":
        return error
    return _unsupported(field)


def _unsupported(field: str) -> InvalidRequestError:
    return InvalidRequestError(f"Unsupported parameter: '{field}'. {REFUSED[field]}", field, "unsupported_parameter")


class _StructuredOutputs(msgspec.Struct, gc=False):
    regex: str | None = None
    whitespace_pattern: str | None = None


_STRUCTURED_OUTPUTS = msgspec.json.Decoder(_StructuredOutputs | None)


def _check_sizes(fields: GeneratingFields) -> None:
    if fields.tools is not ABSENT:
        _check_size("tools", fields.tools, TOOLS_BYTES_MAX, "send fewer or shorter tools")
    _check_schema("structured_outputs", fields.structured_outputs)
    if fields.structured_outputs is not ABSENT:
        _check_regexes(fields.structured_outputs)
    if isinstance(fields, OpenAIFields):
        _check_schema("response_format", fields.response_format)
    elif isinstance(fields, ResponsesFields):
        _check_schema("text", fields.text)
    elif isinstance(fields, MessagesFields):
        _check_schema("output_config", fields.output_config)


def _check_schema(field: str, value: Raw) -> None:
    if value is not ABSENT:
        _check_size(field, value, SCHEMA_BYTES_MAX, "send a smaller schema")


def _check_size(field: str, value: Raw, bytes_max: int, remedy: str) -> None:
    size = len(memoryview(value))
    if size > bytes_max:
        message = f"Invalid '{field}': {size} bytes are above the maximum of {bytes_max}; {remedy}."
        raise InvalidRequestError(message, field, "string_above_max_length")


def _check_regexes(structured_outputs: Raw) -> None:
    try:
        regexes = _STRUCTURED_OUTPUTS.decode(structured_outputs)
    except msgspec.DecodeError as error:
        what = str(error).replace("`$.", "`structured_outputs.").replace("`$`", "`structured_outputs`")
        raise InvalidRequestError(f"Invalid 'structured_outputs': {what}.", "structured_outputs", "invalid_type") from error
    for regex in () if regexes is None else (regexes.regex, regexes.whitespace_pattern):
        if regex is not None and len(regex) > REGEX_CHARS_MAX:
            message = (
                f"Invalid 'structured_outputs': a regular expression of {len(regex)} characters is above the maximum of "
                f"{REGEX_CHARS_MAX}; send a shorter one or a JSON schema."
            )
            raise InvalidRequestError(message, "structured_outputs", "string_above_max_length")


def _check_urls(fields: CommonFields) -> Media:
    """Content must come with the request: an engine that fetched URLs for clients could be sent anywhere."""
    media = NO_MEDIA
    if isinstance(fields, (ChatFields, MessagesFields, TokenizeFields)):
        for index, message in enumerate(fields.messages or ()):
            if message.content is not ABSENT and memoryview(message.content)[0] != _QUOTE:
                media = media.plus(_check_content(f"messages[{index}].content", message.content))
        if isinstance(fields, MessagesFields):
            _check_content("system", fields.system)
    elif isinstance(fields, (ResponsesFields, EmbeddingsFields)):
        media = _check_content("input", fields.input)
        if isinstance(fields, EmbeddingsFields):
            _check_content("messages", fields.messages)
    return media


_QUOTE = ord('"')
# A letter or underscore that is written as an escape could hide the name of a field from a search of the bytes.
_ESCAPED_LETTER = re.compile(rb"\\u00(?:5[fF]|6[0-9a-fA-F]|7[0-9aA])")


# What stands behind a data: URL's head, or as Anthropic's clients send it. Shorter ones are as good as text.
_BASE64 = re.compile(rb'(?:;base64,|"data"\s*:\s*")([A-Za-z0-9+/=_-]{256,})')


def _media_in(content: bytes) -> Media:
    if b"base64" not in content:
        return NO_MEDIA
    sizes = [found.end(1) - found.start(1) for found in _BASE64.finditer(content)]
    return Media(len(sizes), sum(sizes))


def _check_content(path: str, raw: Raw) -> Media:
    if raw is ABSENT or memoryview(raw)[0] == _QUOTE:
        return NO_MEDIA
    content = bytes(raw)
    media = _media_in(content)
    if b'url"' not in content and not (b"\\u00" in content and _ESCAPED_LETTER.search(content)):
        return media
    try:
        value = msgspec.json.decode(content)
    except msgspec.DecodeError as error:  # a number out of range
        raise InvalidRequestError(f"Invalid value in '{path}': {error}.", path, "invalid_value") from error
    if found := find_remote_url(value, path):
        param, url = found
        message = f"Unsupported URL in '{param}' ({url}): nothing is fetched; send the content itself as a data: URL."
        raise InvalidRequestError(message, param, "unsupported_parameter")
    return media
