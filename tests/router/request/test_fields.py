"""Request bodies: what is refused before an engine sees it, what routing learns from them, and what the engine gets."""

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.openai import InvalidRequestError, Surface
from router.outcome import ContinuationOutcome as Outcome
from router.request.fields import (
    REGEX_CHARS_MAX,
    SCHEMA_BYTES_MAX,
    TOOLS_BYTES_MAX,
    RequestFacts,
    engine_body,
    read_request,
)
from router.request.schema import BAD_WORDS_MAX, CHOICES_MAX, REFUSED

GENERATING = [Surface.CHAT, Surface.COMPLETIONS, Surface.RESPONSES, Surface.MESSAGES]
OPENAI = [Surface.CHAT, Surface.COMPLETIONS]
OPERATORS_ONLY = [
    *("kv_transfer_params", "ec_transfer_params", "chat_template", "mm_processor_kwargs", "media_io_kwargs", "vllm_xargs"),
    *("request_id", "prompt_embeds", "allowed_token_ids", "cache_salt", "priority"),
]
GUIDED = [
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend"),
    "guided_whitespace_pattern",
]
CHAT_ONLY = ["functions", "function_call", "audio", "modalities", "web_search_options", "verbosity"]
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def read(surface: Surface = Surface.CHAT, **fields: Any) -> RequestFacts:
    return read_request(surface, body_of(**fields))


def refused(surface: Surface, **fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as error:
        read(surface, **fields)
    return error.value


@pytest.mark.parametrize(
    ("surface", "field"),
    [
        *((surface, field) for surface in Surface for field in OPERATORS_ONLY),
        *((surface, field) for surface in GENERATING for field in GUIDED),
        *((surface, field) for surface in OPENAI for field in CHAT_ONLY),
        (Surface.RESPONSES, "conversation"),
    ],
)
@pytest.mark.parametrize("value", [{"a": 1}, "word", 7, ["text", "audio"], True])
def test_a_field_that_is_not_served_is_refused_by_name(surface: Surface, field: str, value: Any) -> None:
    """What would silently have no effect, or is the operator's to set, is a 400 that names the field and says what to do."""
    error = refused(surface, **{field: value})
    assert (error.param, error.code) == (field, "unsupported_parameter")
    assert error.message == f"Unsupported parameter: '{field}'. {REFUSED[field]}"
    assert read(surface, **{field: None}).model == "m"  # null counts as absent


def test_a_chat_template_is_refused_wherever_it_hides() -> None:
    """The template is code that runs in the engine; other template arguments pass."""
    for surface in Surface:
        error = refused(surface, chat_template_kwargs={"enable_thinking": False, "chat_template": "{{ x }}"})
        assert (error.param, error.code) == ("chat_template_kwargs", "unsupported_parameter")
        assert read(surface, chat_template_kwargs={"enable_thinking": False, "chat_template": None}).model == "m"
        assert refused(surface, chat_template_kwargs="x").code == "invalid_type"


def test_store_is_refused_for_chat_alone() -> None:
    """A chat completion that the client expects to find again is not silently dropped; responses are the engine's matter."""
    error = refused(Surface.CHAT, store=True)
    assert (error.param, error.code) == ("store", "unsupported_parameter")
    assert refused(Surface.CHAT, store="yes").code == "invalid_type"
    assert read(Surface.CHAT, store=False).model == "m"
    assert read(Surface.RESPONSES, store=True).model == "m"


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto", "safety_identifier": "s"},
        {"prompt_cache_retention": "24h", "prompt_cache_options": {}, "prediction": {"type": "content"}, "moderation": 1},
        {"modalities": ["text"], "verbosity": "medium", "nobody_knows": [1, {"this": None}]},
        {"previous_response_id": "resp_1", "background": True, "max_tokens": "leave it to the engine"},
    ],
)
@pytest.mark.parametrize("surface", Surface)
def test_hints_and_unknown_fields_pass(surface: Surface, fields: dict[str, Any]) -> None:
    """What cannot change the answer, or is the engine's to judge, is no fault."""
    assert read(surface, **fields).model == "m"


@pytest.mark.parametrize("surface", Surface)
@pytest.mark.parametrize("body", [b"{}", b'{"model": null}', b'{"model": "m", "model": null}'])
def test_a_request_without_a_model_is_refused(surface: Surface, body: bytes) -> None:
    """The router does not guess a model."""
    with pytest.raises(InvalidRequestError) as error:
        read_request(surface, body)
    assert (error.value.param, error.value.code) == ("model", "missing_required_parameter")


@pytest.mark.parametrize(
    ("surface", "field", "value"),
    [
        *((surface, "model", 1) for surface in Surface),
        *((surface, "stream", "true") for surface in GENERATING),
        *((surface, "prompt_cache_key", 1) for surface in GENERATING),
        *((surface, field, value) for surface in OPENAI for field in ("n", "best_of", "seed") for value in (1.0, "1", True)),
        *((surface, "stream_options", []) for surface in OPENAI),
        (Surface.CHAT, "logprobs", "yes"),
        (Surface.CHAT, "messages", "hello"),
        (Surface.COMPLETIONS, "logprobs", 1.0),
    ],
)
def test_a_wrong_type_names_its_field(surface: Surface, field: str, value: Any) -> None:
    """Nothing is converted: an engine that converts otherwise would serve another request than the one that was billed."""
    error = refused(surface, **{field: value})
    assert (error.param, error.code) == (field, "invalid_type")


@pytest.mark.parametrize(
    ("surface", "field", "at_limit", "above", "code"),
    [
        *((surface, "n", CHOICES_MAX, CHOICES_MAX + 1, "integer_above_max_value") for surface in OPENAI),
        *((surface, "best_of", CHOICES_MAX, 10**30, "integer_above_max_value") for surface in OPENAI),
        *((surface, "bad_words", ["a"] * BAD_WORDS_MAX, ["a"] * 129, "array_above_max_length") for surface in OPENAI),
        *((s, "tools", "x" * (TOOLS_BYTES_MAX - 2), "x" * TOOLS_BYTES_MAX, "string_above_max_length") for s in GENERATING),
        *(
            (
                surface,
                field,
                {"s": "x" * (SCHEMA_BYTES_MAX - 9)},
                {"s": "x" * (SCHEMA_BYTES_MAX - 8)},
                "string_above_max_length",
            )
            for surface, field in [
                *((surface, "structured_outputs") for surface in GENERATING),
                *((surface, "response_format") for surface in OPENAI),
                *((Surface.RESPONSES, "text"), (Surface.MESSAGES, "output_config")),
            ]
        ),
        *(
            (
                surface,
                "structured_outputs",
                {key: "é" * REGEX_CHARS_MAX},
                {key: "a" * (REGEX_CHARS_MAX + 1)},
                "string_above_max_length",
            )
            for surface in GENERATING
            for key in ("regex", "whitespace_pattern")
        ),
    ],
)
def test_a_limit_lets_its_own_value_pass_and_nothing_above(
    surface: Surface, field: str, at_limit: Any, above: Any, code: str
) -> None:
    """What could exhaust an engine is refused with the field and the maximum."""
    assert read(surface, **{field: at_limit}).model == "m"
    error = refused(surface, **{field: above})
    assert (error.param, error.code) == (field, code)


def test_structured_outputs_of_another_shape_are_refused() -> None:
    """A regular expression that is no string cannot slip past its limit."""
    for value in ("a+", ["a"], {"regex": 1}):
        assert refused(Surface.CHAT, structured_outputs=value).param == "structured_outputs"
    assert read(structured_outputs={"json": {"type": "object"}, "choice": None}).model == "m"
    assert read(structured_outputs=None).model == "m"


def test_stream_options_belong_to_streams() -> None:
    """As at OpenAI, they are an error where nothing is streamed."""
    for surface in OPENAI:
        for stream in (False, None):
            error = refused(surface, stream=stream, stream_options={})
            assert error.param == "stream_options"
        assert not read(surface, stream_options=None).strips_usage
        assert read(surface, stream=True, stream_options={"include_usage": True}).stream


@pytest.mark.parametrize(
    ("surface", "fields", "param"),
    [
        (Surface.CHAT, {"messages": [{"content": "url"}, {"content": [IMAGE]}]}, "messages[1].content[0].image_url"),
        (Surface.TOKENIZE, {"messages": [{"content": [{"type": "text"}, IMAGE]}]}, "messages[0].content[1].image_url"),
        (Surface.EMBEDDINGS, {"messages": [{"content": [IMAGE]}]}, "messages[0].content[0].image_url"),
        (Surface.EMBEDDINGS, {"input": [[{"content": [IMAGE]}]]}, "input[0][0].content[0].image_url"),
        (
            Surface.RESPONSES,
            {"input": [{"content": [{"type": "input_image", "image_url": "https://a"}]}]},
            "input[0].content[0].image_url",
        ),
        *(
            (
                surface,
                {"messages": [{"content": [{"type": "image", "source": {"url": "https://a"}}]}]},
                "messages[0].content[0].source",
            )
            for surface in (Surface.MESSAGES, Surface.COUNT_TOKENS)
        ),
        (Surface.MESSAGES, {"system": [{"type": "image", "source": {"url": "https://a"}}]}, "system[0].source"),
    ],
)
@pytest.mark.parametrize("is_escaped", [False, True])
def test_no_engine_is_sent_to_fetch_a_url(surface: Surface, fields: dict[str, Any], param: str, is_escaped: bool) -> None:
    """Media must come as data:, on every surface that takes media, and however the name of the field is written."""
    body = body_of(**fields)
    if is_escaped:
        body = body.replace(b"_url", b"\\u005F\\u0075rl").replace(b'"url"', b'"ur\\u006C"')
    with pytest.raises(InvalidRequestError) as error:
        read_request(surface, body)
    assert (error.value.param, error.value.code) == (param, "unsupported_parameter")
    assert "https://" in error.value.message
    accepted = body.replace(b"https://", b"data:image/png;base64,")
    assert read_request(surface, accepted).model == "m"


def test_a_number_that_no_engine_could_hold_is_refused_beside_media() -> None:
    """Only content that could name a URL is built at all, and what cannot be built is an error of the request."""
    with pytest.raises(InvalidRequestError) as error:
        read_request(Surface.CHAT, b'{"model": "m", "messages": [{"content": [{"x": 1e999, "url": 1}]}]}')
    assert error.value.param == "messages[0].content"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"stream": False}, Outcome.SURFACE),
        ({"n": 1, "best_of": 1, "echo": False, "min_tokens": 0, "bad_words": []}, None),
        ({"n": 2}, Outcome.SEVERAL_CHOICES),
        ({"best_of": 2}, Outcome.SEVERAL_CHOICES),
        ({"use_beam_search": True}, Outcome.SEVERAL_CHOICES),
        ({"logprobs": None, "prompt_logprobs": None}, None),
        ({"prompt_logprobs": 0}, Outcome.LOGPROBS),
        ({"logprob_token_ids": [1]}, Outcome.LOGPROBS),
        ({"seed": None}, None),
        ({"seed": 0}, Outcome.SEED),
        ({"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1}, None),
        ({"presence_penalty": 0.1}, Outcome.PENALTIES),
        ({"frequency_penalty": -1}, Outcome.PENALTIES),
        ({"repetition_penalty": 1.1}, Outcome.PENALTIES),
        ({"bad_words": ["a"]}, Outcome.PENALTIES),
        ({"repetition_detection": {"max_pattern_size": 3}}, Outcome.PENALTIES),
        ({"logit_bias": {"1": 2}}, Outcome.LOGIT_BIAS),
        ({"logit_bias": {}, "tools": None, "structured_outputs": None, "response_format": None}, None),
        ({"tools": []}, None),
        ({"tools": [{"type": "function"}]}, Outcome.TOOLS),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Outcome.GRAMMAR),
        ({"response_format": "json"}, Outcome.GRAMMAR),
        ({"structured_outputs": {"regex": "a+"}}, Outcome.GRAMMAR),
        ({"echo": True}, Outcome.ECHO),
        ({"min_tokens": 1}, Outcome.MIN_TOKENS),
        ({"truncate_prompt_tokens": 5}, Outcome.PROMPT_FORM),
        ({"temperature": 0.3, "top_p": 0.9, "top_k": 5, "max_tokens": 9, "stop": ["x"], "ignore_eos": True}, None),
    ],
)
@pytest.mark.parametrize("surface", OPENAI)
def test_what_could_not_be_continued_is_known_beforehand(
    surface: Surface, fields: dict[str, Any], reason: Outcome | None
) -> None:
    """An answer is only ever continued where the rest is what the first replica would have written."""
    assert read(surface, **{"stream": True, "prompt": "p", **fields}).never_continues is reason


NO_PROMPTS: list[Any] = [None, [], [[]], {}, 3, [["p"]], [None]]


def begun(content: Any) -> dict[str, Any]:
    """A chat whose last message the engine is told to go on with."""
    return {"continue_final_message": True, "add_generation_prompt": False, "messages": [{"content": content}]}


@pytest.mark.parametrize(
    ("surface", "fields", "reason"),
    [
        (Surface.CHAT, {"logprobs": False, "include_reasoning": True}, None),
        (Surface.CHAT, {"logprobs": True}, Outcome.LOGPROBS),
        (Surface.CHAT, {"include_reasoning": False}, Outcome.REASONING),
        (Surface.CHAT, {"add_generation_prompt": True, "continue_final_message": False}, None),
        (Surface.CHAT, {"add_generation_prompt": False}, Outcome.PROMPT_FORM),
        (Surface.CHAT, begun("Sure: "), None),
        (Surface.CHAT, begun([{"type": "image_url"}, {"type": "text", "text": "Sure: "}]), None),
        (Surface.CHAT, {**begun("Sure: "), "add_generation_prompt": None}, Outcome.PROMPT_FORM),
        (Surface.CHAT, {**begun("Sure: "), "messages": []}, Outcome.PROMPT_FORM),
        *((Surface.CHAT, begun(content), Outcome.PROMPT_FORM) for content in (None, 3, [], ["a"], [{"type": "image_url"}])),
        (Surface.CHAT, begun([{"type": "text", "text": 3}]), Outcome.PROMPT_FORM),
        (Surface.COMPLETIONS, {"prompt": "p", "logprobs": 0}, Outcome.LOGPROBS),
        (Surface.COMPLETIONS, {"prompt": "p", "suffix": "s"}, Outcome.PROMPT_FORM),
        (Surface.COMPLETIONS, {"prompt": ["p"]}, None),
        (Surface.COMPLETIONS, {"prompt": "p", "return_token_ids": True}, None),
        (Surface.COMPLETIONS, {"prompt": ["p", "q"]}, Outcome.SEVERAL_CHOICES),
        (Surface.COMPLETIONS, {"prompt": [[1], [2]], "return_token_ids": True}, Outcome.SEVERAL_CHOICES),
        (Surface.COMPLETIONS, {"prompt": [1, 2]}, Outcome.TOKEN_IDS),
        (Surface.COMPLETIONS, {"prompt": [[1, 2]], "return_token_ids": False}, Outcome.TOKEN_IDS),
        (Surface.COMPLETIONS, {"prompt": [1, 2], "return_token_ids": True}, None),
        (Surface.COMPLETIONS, {"prompt": [[1, 2]], "return_token_ids": True}, None),
        *((Surface.COMPLETIONS, {"prompt": prompt}, Outcome.PROMPT_FORM) for prompt in NO_PROMPTS),
        (Surface.COMPLETIONS, {}, Outcome.PROMPT_FORM),
        (Surface.RESPONSES, {}, Outcome.SURFACE),
        (Surface.MESSAGES, {}, Outcome.SURFACE),
    ],
)
def test_what_could_not_be_continued_depends_on_the_surface(
    surface: Surface, fields: dict[str, Any], reason: Outcome | None
) -> None:
    """Text is appended to a text and token ids to token ids; other surfaces and several prompts have no such prefix."""
    assert read(surface, stream=True, **fields).never_continues is reason


def test_the_facts_are_those_of_the_request() -> None:
    """Model, streaming, number of choices and the affinity hint are read as the client wrote them."""
    facts = read(stream=True, n=3, prompt_cache_key="k", messages=[])
    assert (facts.model, facts.stream, facts.n, facts.prompt_cache_key) == ("m", True, 3, "k")
    plain = read(stream=None, n=None, prompt_cache_key=None)
    assert (plain.stream, plain.n, plain.prompt_cache_key, plain.strips_usage) == (False, 1, None, False)


def test_usage_is_asked_for_right_behind_the_opening_brace() -> None:
    """The rest of the body reaches the engine byte for byte."""
    body = b' {\n"model" : "m", "x": 1.50, "stream":true, "messages":[ ]}\n'
    facts = read_request(Surface.CHAT, body)
    assert facts.strips_usage
    assert engine_body(body, facts, surface=Surface.CHAT) == b' {"stream_options":{"include_usage":true},' + body[2:]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": False, "stream_options": None},
    ],
)
@pytest.mark.parametrize("surface", OPENAI)
def test_a_body_that_needs_no_change_is_not_copied(surface: Surface, fields: dict[str, Any]) -> None:
    """Bodies pass as they are."""
    body = body_of(**fields)
    facts = read_request(surface, body)
    assert not facts.strips_usage
    assert engine_body(body, facts, surface=surface, model="m", request_id="only responses have it") is body


def test_what_the_client_sent_as_well_does_not_win() -> None:
    """The engine reads the last of two equal keys, so a key of ours replaces the client's, repeated or null as that may be."""
    body = (
        b'{"model": "a", "stream": true, "stream_options": null, "a": 1.50, "model": "m",'
        b' "stream_options": {"x": 1.50, "include_usage": false, "continuous_usage_stats": true}}'
    )
    facts = read_request(Surface.CHAT, body)
    changed = engine_body(body, facts, surface=Surface.CHAT, model='eng"ine')
    assert changed == (
        b'{"model":"eng\\"ine","stream":true,"stream_options":{"x":1.50,"include_usage":true,"continuous_usage_stats":false},"a":1.50}'
    )
    body = b'{"stream": true, "model": "m", "stream_options": null}'
    changed = engine_body(body, read_request(Surface.CHAT, body), surface=Surface.CHAT)
    assert json.loads(changed)["stream_options"] == {"include_usage": True}


def test_a_response_gets_the_routers_id() -> None:
    """The id of an answer is the router's, whatever null the client sent."""
    for body in (b'{"model":"m","input":"x"}', b'{"model":"m","input":"x","request_id":null}'):
        changed = engine_body(body, read_request(Surface.RESPONSES, body), surface=Surface.RESPONSES, request_id="resp_1")
        assert json.loads(changed) == {"model": "m", "input": "x", "request_id": "resp_1"}
        assert changed.count(b"request_id") == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
known_keys = st.sampled_from(
    [
        *(
            "model",
            "stream",
            "stream_options",
            "n",
            "best_of",
            "messages",
            "input",
            "system",
            "prompt",
            "tools",
            "text",
            "seed",
        ),
        *("response_format", "structured_outputs", "chat_template_kwargs", "bad_words", "logit_bias", "logprobs", "store"),
        *("modalities", "verbosity", "output_config", "prompt_cache_key", *OPERATORS_ONLY, *GUIDED),
    ]
)
likely_values = st.sampled_from(
    [
        *("m", True, False, None, 1, 2, 1.0, 129, {}, [], ["text"], "medium"),
        *({"include_usage": True}, {"include_usage": False, "x": 1}, {"continuous_usage_stats": True}),
        *(
            [{"role": "user", "content": [IMAGE]}],
            [{"role": "user", "content": "hi"}],
            [{"content": {"url": {"image_url": 3}}}],
        ),
        *([None], [[{"content": [{"source": {"url": 1}}]}]], {"type": "text"}, {"regex": "a"}, {"regex": 3}),
    ]
)
objects = st.dictionaries(known_keys | st.text(max_size=5), likely_values | json_values, max_size=8)
# What a client would send more often than not, so that much of what is generated is accepted.
requests = st.fixed_dictionaries(
    {"model": st.text(max_size=4)},
    optional={
        "stream": st.sampled_from([True, True, False, None]),
        "stream_options": st.sampled_from([None, {}, {"include_usage": False}, {"include_usage": True}, {"a": "\u00e9"}]),
        "request_id": st.none(),
        "messages": st.lists(st.fixed_dictionaries({"content": json_values}), max_size=3),
        "x": json_values,
    },
)


@given(surface=st.sampled_from(Surface), value=objects | json_values, ascii_only=st.booleans())
def test_whatever_is_sent_is_read_or_refused(surface: Surface, value: Any, ascii_only: bool) -> None:
    """No body makes the router fail; what it accepts it can also pass on."""
    body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        facts = read_request(surface, body)
    except InvalidRequestError:
        return
    engine_body(body, facts, surface=surface, model="engine", request_id="r")


@given(surface=st.sampled_from(Surface), body=st.binary(max_size=40))
def test_whatever_bytes_are_sent_are_read_or_refused(surface: Surface, body: bytes) -> None:
    """Noise is an error of the request, never one of the router."""
    for prefix in (b"", b'{"model":"m",', b'{"model":"m","tools":', b'{"model":"m","messages":[{"content":['):
        with contextlib.suppress(InvalidRequestError):
            read_request(surface, prefix + body)


@given(
    surface=st.sampled_from(Surface),
    value=requests,
    first=objects,
    model=st.sampled_from([None, "m", "engine"]),
    request_id=st.sampled_from([None, "resp_1"]),
)
def test_the_engine_gets_the_same_request_but_for_what_must_change(
    surface: Surface, value: dict[str, Any], first: dict[str, Any], model: str | None, request_id: str | None
) -> None:
    """Every other field keeps its value, whatever keys are repeated before."""
    body = json.dumps(value).encode()
    repeated = {key: item for key, item in first.items() if key in ("x", "stream_options", "model")}
    if repeated:
        body = json.dumps(repeated).encode()[:-1] + b"," + body[1:]
    try:
        facts = read_request(surface, body)
    except InvalidRequestError:
        return
    expected = json.loads(body)
    if facts.strips_usage:
        asked = {"include_usage": True}
        if "continuous_usage_stats" in (expected.get("stream_options") or {}):
            asked["continuous_usage_stats"] = False
        expected["stream_options"] = {**(expected.get("stream_options") or {}), **asked}
    if model is not None:
        expected["model"] = model
    if request_id is not None and surface is Surface.RESPONSES:
        expected["request_id"] = request_id
    changed = engine_body(body, facts, surface=surface, model=model, request_id=request_id)
    # Compared as text, for NaN is not equal to itself and 1 equals True.
    assert json.dumps(json.loads(changed), sort_keys=True) == json.dumps(expected, sort_keys=True)
    assert msgspec.json.decode(changed, type=dict[str, msgspec.Raw]).keys() == expected.keys()
