"""Which fields of a request are taken, refused and capped, and what of it reaches the engine."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.conformance.replies import CHAT, COMPLETIONS, PLAIN, RESPONSES, check_failure, whole_and_streamed
from tests.conformance.service import Service
from tests.conformance.test_chat import ask
from tests.conformance.test_errors import BODIES
from tests.scripted_engine import LAST_CHUNK, SSE_HEAD, ScriptedEngine, ScriptedRequest, chunked, json_answer

SCHEMA = {"type": "object"}
# What would change the answer and is not supported: field, value, and the routes whose field it is.
UNSUPPORTED: list[tuple[str, Any, tuple[str, ...]]] = [
    ("functions", [{"name": "f"}], (CHAT,)),
    ("function_call", "auto", (CHAT,)),
    ("audio", {"voice": "alloy", "format": "wav"}, (CHAT,)),
    ("modalities", ["text", "audio"], (CHAT,)),
    ("web_search_options", {}, (CHAT,)),
    ("store", True, (CHAT,)),
    ("verbosity", "low", (CHAT,)),
    ("verbosity", "high", (CHAT,)),
    ("guided_json", SCHEMA, (CHAT, COMPLETIONS)),  # B36: vLLM ignores these and answers without constraint
    ("guided_regex", "a+", (CHAT, COMPLETIONS)),
    ("guided_choice", ["a", "b"], (CHAT, COMPLETIONS)),
    ("guided_grammar", "root ::= 'a'", (CHAT, COMPLETIONS)),
    ("guided_decoding_backend", "xgrammar", (CHAT, COMPLETIONS)),
    ("guided_whitespace_pattern", " ?", (CHAT, COMPLETIONS)),
    ("conversation", "conv_1", (RESPONSES,)),
]
# What only operators may set: it would steer the engine, its memory or other tenants' requests.
OPERATORS: list[tuple[str, Any, tuple[str, ...]]] = [
    ("kv_transfer_params", {"do_remote_decode": True}, (CHAT, COMPLETIONS, RESPONSES)),
    ("ec_transfer_params", {"a": 1}, (CHAT, COMPLETIONS)),
    ("chat_template", "{{ messages }}", (CHAT,)),
    ("chat_template_kwargs", {"chat_template": "{{ messages }}"}, (CHAT,)),
    ("mm_processor_kwargs", {"num_crops": 4}, (CHAT,)),
    ("media_io_kwargs", {"video": {"num_frames": 1}}, (CHAT,)),
    ("vllm_xargs", {"a": 1}, (CHAT, COMPLETIONS)),
    ("request_id", "mine", (CHAT, COMPLETIONS, RESPONSES)),
    ("prompt_embeds", "AAAA", (COMPLETIONS,)),
    ("allowed_token_ids", [1, 2], (CHAT, COMPLETIONS)),
    ("cache_salt", "other-tenant", (CHAT, COMPLETIONS, RESPONSES)),
    ("priority", -100, (CHAT, COMPLETIONS, RESPONSES)),
]
REFUSED = [(field, value, route) for field, value, routes in UNSUPPORTED + OPERATORS for route in routes]


@pytest.mark.parametrize(
    ("field", "value", "route"), REFUSED, ids=[f"{field}={value}-{route}" for field, value, route in REFUSED]
)
def test_b36_a_field_that_would_be_ignored_is_refused_by_name(http: httpx.Client, field: str, value: Any, route: str) -> None:
    """Nobody gets an answer to another question than the one asked, and nobody steers the engine from outside."""
    error = check_failure(http.post(route, json={**BODIES[route], field: value}), 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", field)
    assert field in str(error["message"])


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, value, routes in UNSUPPORTED + OPERATORS if CHAT in routes]
)
def test_b36_a_refused_field_stays_refused_in_a_stream(http: httpx.Client, field: str, value: Any) -> None:
    """By HTTP status, before anything is streamed."""
    error = check_failure(http.post(CHAT, json={**PLAIN, "stream": True, field: value}), 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", field)


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [("background", True, 400), ("prompt", {"id": "pmpt_1"}, 400), ("previous_response_id", "resp_1", 404)],
)
def test_b24_what_needs_a_store_is_refused_where_the_engine_has_none(
    http: httpx.Client, field: str, value: Any, status: int
) -> None:
    """In the engine's words, by the field's name; nothing is answered as if the field were not there."""
    error = check_failure(http.post(RESPONSES, json={**BODIES[RESPONSES], field: value}), status)
    assert field in str(error["param"]) or "resp_1" in str(error["message"])


ACCEPTED = {
    "store": False,
    "metadata": {"team": "a"},
    "user": "u-1",
    "service_tier": "auto",
    "safety_identifier": "s-1",
    "prompt_cache_key": "k-1",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"ttl": "30m"},
    "prediction": {"type": "content", "content": "x"},
    "moderation": {"model": "omni-moderation-latest"},
    "modalities": ["text"],
    "verbosity": "medium",
    "reasoning_effort": "low",
    "parallel_tool_calls": True,
    "top_logprobs": None,
    "chat_template_kwargs": {"enable_thinking": False},
    "add_generation_prompt": True,
    "some_future_field": [{"a": None}],
}


@whole_and_streamed
@pytest.mark.parametrize(("field", "value"), ACCEPTED.items(), ids=[str(field) for field in ACCEPTED])
def test_c26_a_hint_that_cannot_change_the_answer_is_taken(http: httpx.Client, stream: bool, field: str, value: Any) -> None:
    """The answer is the one without it."""
    assert ask(http, stream, **{field: value}).only.text == ask(http, stream).only.text


def test_c26_null_counts_as_absent(http: httpx.Client) -> None:
    """Clients that write out every field of their own class are served."""
    nothing = {field: None for field, _, routes in UNSUPPORTED + OPERATORS if CHAT in routes}
    nothing |= {"stream_options": None, "tools": None, "n": None, "stop": None, "max_tokens": None}
    assert ask(http, False, **nothing).only.text == ask(http, False).only.text


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": False}], ids=json.dumps)
@pytest.mark.parametrize("stream", [None, False], ids=["absent", "false"])
def test_b27_stream_options_without_a_stream_are_refused(
    http: httpx.Client, route: str, options: dict[str, bool], stream: bool | None
) -> None:
    """As OpenAI refuses them, by the field's name."""
    error = check_failure(http.post(route, json={**BODIES[route], "stream_options": options, "stream": stream}), 400)
    assert error["param"] == "stream_options"


LONG_SCHEMA = {"type": "object", "description": "x" * 65_536}
BIG_TOOL = {"type": "function", "function": {"name": "f", "description": "x" * 1_048_576}}
OVER_THE_CAP: list[tuple[str, Any, str, str]] = [
    ("n", 129, CHAT, "n"),
    ("n", 10**30, CHAT, "n"),
    ("n", 129, COMPLETIONS, "n"),
    ("best_of", 129, COMPLETIONS, "best_of"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": LONG_SCHEMA}}, CHAT, "response_format"),
    ("structured_outputs", {"json": LONG_SCHEMA}, CHAT, "structured_outputs"),
    ("structured_outputs", {"json": LONG_SCHEMA}, COMPLETIONS, "structured_outputs"),
    ("tools", [BIG_TOOL], CHAT, "tools"),
    ("bad_words", ["x"] * 129, CHAT, "bad_words"),
]


@pytest.mark.parametrize(("field", "value", "route", "param"), OVER_THE_CAP, ids=[f"{row[0]}-{row[2]}" for row in OVER_THE_CAP])
def test_a_value_above_its_cap_is_refused_by_name(http: httpx.Client, field: str, value: Any, route: str, param: str) -> None:
    """One request cannot ask for more work than an engine should take from one."""
    error = check_failure(http.post(route, json={**BODIES[route], field: value}), 400)
    assert error["param"] == param
    if field in ("n", "best_of"):
        assert error["code"] == "integer_above_max_value"


def test_values_at_their_caps_are_taken(http: httpx.Client) -> None:
    """A cap is the highest value that still works."""
    assert len(ask(http, False, n=128, temperature=1, max_tokens=1).choices) == 128
    assert ask(http, False, bad_words=["x"] * 128).only.text
    deep: Any = "x"
    for _ in range(126):
        deep = [deep]
    assert ask(http, False, some_field=deep).only.text
    error = check_failure(http.post(CHAT, json={**PLAIN, "some_field": [[[deep]]]}), 400)
    assert error["param"] is None


REMOTE = ["http://169.254.169.254/latest/", "https://example.com/a.png", "file:///etc/passwd", "ftp://x/y", "HTTP://x", "//x/y"]
PNG = "data:image/png;base64,iVBORw0KGgo="


def media(kind: str, url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, {"type": kind, kind: {"url": url}}]}]


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url"])
async def test_a_url_that_the_engine_would_fetch_is_refused(
    scripted: ScriptedEngine, scripted_http: httpx.AsyncClient, kind: str
) -> None:
    """An engine that fetches what strangers name could be sent anywhere in the operator's network."""
    for url in REMOTE:
        for messages in (media(kind, url), media(kind, PNG) + media(kind, url)):
            check_failure(await scripted_http.post(CHAT, json={"model": "scripted", "messages": messages}), 400)
    assert scripted.requests == []


async def test_media_that_come_with_the_request_reach_the_engine(
    scripted: ScriptedEngine, scripted_http: httpx.AsyncClient
) -> None:
    """data: URLs are content, and text about URLs is text."""
    for messages in (media("image_url", PNG), [{"role": "user", "content": [{"type": "text", "text": '"url": "http://x"'}]}]):
        response = await scripted_http.post(CHAT, json={"model": "scripted", "messages": messages})
        assert response.status_code == 200, response.text
        assert json.loads(scripted.requests[-1].body)["messages"] == messages


STREAM = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}\n\n'
END = b"data: [DONE]\n\n"
ASKS_USAGE = b'"stream_options":{"include_usage":true},'
REWRITES = {
    # What the client sends: what the engine must get (None: the same bytes), and whether the client sees the usage.
    b'{ "model":"scripted",  "n" : 1, "t" : 1.0e0, "x":"\xc3\xa4\\u00e4", "x":2 }': (None, True),
    b'{"stream": false, "model":"scripted"}': (None, True),
    b'{"stream": true, "model":"scripted"}': (b"{" + ASKS_USAGE + b'"stream": true, "model":"scripted"}', False),
    b' \n{ "stream":true,"model":"scripted"}\n': (b" \n{" + ASKS_USAGE + b' "stream":true,"model":"scripted"}\n', False),
    b'{"stream":true,"stream_options":{"include_usage":true},"model":"scripted"}': (None, True),
}


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
async def test_b27_the_engine_gets_the_clients_bytes_and_usage_is_asked_for_behind_its_back(
    scripted: ScriptedEngine, scripted_http: httpx.AsyncClient, route: str
) -> None:
    """Nothing but the one field that accounting needs is added, only to streams, and what it brings is taken out again."""

    async def script(request: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        if b'"stream": true' in request.body or b'"stream":true' in request.body:
            writer.write(SSE_HEAD + chunked(STREAM, USAGE, END) + LAST_CHUNK)
        else:
            writer.write(json_answer({"model": "scripted"}))

    scripted.script = script
    for sent, (wanted, shown) in REWRITES.items():
        response = await scripted_http.post(route, content=sent)
        assert response.status_code == 200, response.text
        request = scripted.requests[-1]
        assert request.body == (sent if wanted is None else wanted)
        assert int(request.headers["content-length"]) == len(request.body)
        if response.headers["content-type"].startswith("text/event-stream"):
            assert response.content == STREAM + (USAGE if shown else b"") + END


async def test_b27_the_clients_other_stream_options_are_kept(
    scripted: ScriptedEngine, scripted_http: httpx.AsyncClient
) -> None:
    """Asking for usage does not lose what else the client set."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunked(STREAM, USAGE, END) + LAST_CHUNK)

    scripted.script = script
    body = {"model": "scripted", "messages": [], "stream": True, "stream_options": {"include_obfuscation": False}}
    response = await scripted_http.post(CHAT, json=body)
    assert response.content == STREAM + END
    sent = json.loads(scripted.requests[0].body)
    assert sent == {**body, "stream_options": {"include_obfuscation": False, "include_usage": True}}


def test_b36_structured_outputs_reach_the_engine(service: Service, http: httpx.Client) -> None:
    """vLLM's own field for constrained output is not refused by the router: the simulated engine says that it lacks it."""
    response = http.post(CHAT, json={**PLAIN, "structured_outputs": {"json": SCHEMA}})
    error = check_failure(response, 400)
    assert error["param"] == "structured_outputs"
    assert "not simulated" in str(error["message"])
