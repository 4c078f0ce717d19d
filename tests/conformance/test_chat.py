"""C01-C28 on chat completions: what every client may expect of an answer, whole and streamed.

`replies.read_chat` checks each body and chunk against OpenAI's models, and of each stream that id, created and model stay the
same (C03), the role comes first (C02), tool calls come in order (C13) and [DONE] comes once, last (C05).
"""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.conformance import strict
from tests.conformance.replies import CHAT, PLAIN, WITH_USAGE, Reply, ask_chat, whole_and_streamed
from tests.conformance.service import MODEL, THINKER, Service

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
NAMED = {"type": "function", "function": {"name": "get_time"}}


def ask(http: httpx.Client, stream: bool, **changes: Any) -> Reply:
    options = WITH_USAGE if stream else {}
    return ask_chat(http, PLAIN | options | changes, stream=stream)


def said(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return list(messages)


def test_c01_a_whole_answer_has_openais_keys(http: httpx.Client) -> None:
    """Nothing that a typed client needs is missing, and nothing of the engine's is added but what vLLM documents."""
    response = http.post(CHAT, json=PLAIN)
    body = strict.load(response.content)
    assert body.keys() >= {"id", "object", "created", "model", "choices", "usage", "system_fingerprint"}
    (choice,) = body["choices"]
    assert choice.keys() >= {"index", "message", "logprobs", "finish_reason"}
    assert choice["message"].keys() >= {"role", "content", "refusal"}
    assert (body["object"], body["model"], choice["message"]["role"]) == ("chat.completion", MODEL, "assistant")
    assert body["id"].startswith("chatcmpl-")


def test_c02_c03_a_stream_begins_with_the_role_and_keeps_its_id(http: httpx.Client) -> None:
    """Clients take the role from the first delta, and id and creation time from any chunk."""
    payloads = strict.read_chunks(http.post(CHAT, json={**PLAIN, "stream": True}).content)
    chunks = [strict.load(payload) for payload in payloads]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    other = strict.load(http.post(CHAT, json=PLAIN).content)
    assert other["id"] != chunks[0]["id"]


def test_c04_c07_a_stream_says_what_the_whole_answer_says(http: httpx.Client) -> None:
    """At temperature 0 the pieces join to the same text and cost the same tokens."""
    whole, streamed = ask(http, False), ask(http, True)
    assert streamed.only.text == whole.only.text
    assert streamed.only.finish_reason == whole.only.finish_reason == "stop"
    assert streamed.usage is not None
    assert whole.usage is not None
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [getattr(streamed.usage, name) for name in counts] == [getattr(whole.usage, name) for name in counts]
    assert whole.usage.completion_tokens > 1


def test_c05_done_comes_once_and_last(http: httpx.Client) -> None:
    """Node's client needs the exact end mark; a second one would be taken for an event."""
    raw = http.post(CHAT, json={**PLAIN, "stream": True}).content
    assert raw.count(b"[DONE]") == 1
    assert raw.endswith(b"}\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {}}, False),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": {"include_usage": None}}, False),
        ({"stream_options": {"include_obfuscation": False}}, False),
        ({"stream_options": {"include_usage": True}}, True),
        ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, True),
    ],
    ids=json.dumps,
)
def test_c06_b25_usage_comes_only_when_asked_for(http: httpx.Client, options: dict[str, Any], shown: bool) -> None:
    """Who asked gets the chunk without choices, always; who did not, and does `choices[0]`, never meets it."""
    payloads = strict.read_chunks(http.post(CHAT, json={**PLAIN, **options, "stream": True}).content)
    chunks = [strict.load(payload) for payload in payloads]
    assert [not chunk["choices"] for chunk in chunks] == [False] * (len(chunks) - 1) + [shown]
    if shown:
        assert chunks[-1]["usage"]["completion_tokens"] > 0
    else:
        assert not any(chunk.get("usage") for chunk in chunks)


@whole_and_streamed
def test_c08_three_choices_have_three_indices(http: httpx.Client, stream: bool) -> None:
    """Choices may come interleaved; each ends with its own reason."""
    reply = ask(http, stream, n=3, temperature=1)
    assert sorted(reply.choices) == [0, 1, 2]
    assert {choice.finish_reason for choice in reply.choices.values()} == {"stop"}
    assert len({choice.text for choice in reply.choices.values()}) == 3


@whole_and_streamed
@pytest.mark.parametrize("count", [0, 3])
def test_c09_logprobs_come_for_each_token(http: httpx.Client, stream: bool, count: int) -> None:
    """Token, log probability, bytes, and as many alternatives as were asked for."""
    reply = ask(http, stream, logprobs=True, top_logprobs=count)
    assert reply.usage is not None
    assert len(reply.only.logprobs) == reply.usage.completion_tokens
    for entry in reply.only.logprobs:
        assert (len(entry.top_logprobs), entry.logprob <= 0) == (count, True)
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    assert ask(http, stream).only.logprobs == []


@whole_and_streamed
@pytest.mark.parametrize("as_list", [False, True], ids=["string", "list"])
def test_c10_a_stop_string_ends_the_answer_and_is_left_out(http: httpx.Client, stream: bool, as_list: bool) -> None:
    """The text ends right before it, in a stream too, where it may lie across tokens."""
    text = ask(http, False).only.text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    reply = ask(http, stream, stop=["never said", stop] if as_list else stop)
    assert reply.only.text == text[: text.index(stop)]
    assert (reply.only.finish_reason, reply.only.stop_reason) == ("stop", stop)
    assert ask(http, stream, stop=stop, include_stop_str_in_output=True).only.text.endswith(stop)


@whole_and_streamed
@pytest.mark.parametrize(
    ("limits", "tokens"),
    [({"max_tokens": 1}, 1), ({"max_completion_tokens": 1}, 1), ({"max_completion_tokens": 2, "max_tokens": 5}, 2)],
    ids=json.dumps,
)
def test_c11_c12_the_limit_of_tokens_holds(http: httpx.Client, stream: bool, limits: dict[str, int], tokens: int) -> None:
    """Both names of the limit work, the newer one wins, and the reason for the end is `length`."""
    reply = ask(http, stream, **limits)
    assert reply.only.finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == tokens


@whole_and_streamed
@pytest.mark.parametrize(
    ("choice", "name", "finish_reason"),
    [
        ("auto", "get_weather", "tool_calls"),
        (None, "get_weather", "tool_calls"),
        ("required", "get_weather", "tool_calls"),
        (NAMED, "get_time", "stop"),  # vLLM's answer; OpenAI's is the same
        ("none", None, "stop"),
    ],
    ids=["auto", "absent", "required", "named", "none"],
)
def test_c13_c15_b29_tools_are_called_as_the_choice_says(
    http: httpx.Client, stream: bool, choice: Any, name: str | None, finish_reason: str
) -> None:
    """A call has an id, a type and a name once, arguments in pieces that join to JSON, and the right finish reason."""
    reply = ask(http, stream, tools=[WEATHER, CLOCK], **({"tool_choice": choice} if choice else {}))
    assert reply.only.finish_reason == finish_reason
    assert [call.name for call in reply.only.tool_calls] == ([name] if name else [])
    for call in reply.only.tool_calls:
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict)
        assert ("city" in arguments) is (name == "get_weather")
        assert not reply.only.text
    if not name:
        assert reply.only.text


@whole_and_streamed
def test_c16_a_tool_without_parameters_can_be_called(http: httpx.Client, stream: bool) -> None:
    """Its arguments are an empty object, not an empty string."""
    (call,) = ask(http, stream, tools=[CLOCK], tool_choice="required").only.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_time", {})


@whole_and_streamed
@pytest.mark.parametrize("strictness", [None, True])
def test_c17_structured_output_keeps_to_its_schema(http: httpx.Client, stream: bool, strictness: bool | None) -> None:
    """The schema reaches the engine whole, and what comes back is JSON of that form."""
    schema = {
        "type": "object",
        "properties": {"label": {"enum": ["spam", "no spam"]}, "score": {"type": "integer"}},
        "required": ["label", "score"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema, "strict": strictness}}
    verdict = json.loads(ask(http, stream, response_format=wanted).only.text)
    assert verdict.keys() == {"label", "score"}
    assert verdict["label"] in ("spam", "no spam")
    assert isinstance(verdict["score"], int)


@whole_and_streamed
@pytest.mark.parametrize("kind", ["json_object", "text"])
def test_c17_json_mode_gives_json(http: httpx.Client, stream: bool, kind: str) -> None:
    """`json_object` gives an object and `text` what would have come anyway."""
    text = ask(http, stream, response_format={"type": kind}).only.text
    if kind == "json_object":
        assert isinstance(json.loads(text), dict)
    else:
        assert text == ask(http, stream).only.text


USER = {"role": "user", "content": "weather?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"K\u00f6ln"}'}}
CONVERSATIONS = {
    "c18_content_parts": said({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
    "c19_null_content_and_tool_calls": said(
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
    ),
    "c20_system_role": said({"role": "system", "content": "Be brief."}, USER),
    "c20_developer_role": said({"role": "developer", "content": "Be brief."}, USER),
    "c21_tool_role_with_parts": said(
        USER,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "12 degrees"}]},
    ),
    "c22_reasoning_of_an_earlier_turn": said(
        USER, {"role": "assistant", "content": "wet", "reasoning_content": "It rains.", "reasoning": "It rains."}, USER
    ),
}


@whole_and_streamed
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_c18_to_c22_every_form_of_a_message_is_taken(http: httpx.Client, stream: bool, messages: list[Any]) -> None:
    """Parts, empty contents, and all roles reach the engine as they were sent."""
    reply = ask(http, stream, messages=messages, tools=[WEATHER] if "tool_calls" in str(messages) else None)
    assert (reply.only.finish_reason, bool(reply.only.text)) == ("stop", True)


def test_c18_one_text_part_is_the_same_as_a_string(http: httpx.Client) -> None:
    """Both spellings of a message get the same answer."""
    parts = said({"role": "user", "content": [{"type": "text", "text": PLAIN["messages"][0]["content"]}]})
    assert ask(http, False, messages=parts).only.text == ask(http, False).only.text


@whole_and_streamed
def test_c22_b26_reasoning_passes_under_vllms_name(http: httpx.Client, stream: bool) -> None:
    """What a reasoning parser took apart stays apart; the router renames nothing."""
    reply = ask(http, stream, model=THINKER)
    assert reply.only.reasoning
    assert reply.only.text
    assert reply.usage is not None
    details = reply.usage.completion_tokens_details
    assert stream or (details is not None and details.reasoning_tokens)
    assert ask(http, stream, model=THINKER, include_reasoning=False).only.reasoning == ""
    assert ask(http, stream, model=THINKER, reasoning_effort="none").only.reasoning == ""


@whole_and_streamed
def test_c23_emoji_and_scripts_come_back_as_they_went(http: httpx.Client, stream: bool) -> None:
    """Characters of several bytes lie across tokens, events and packets, and stay whole."""
    text = "na\u00efve \U0001f469\u200d\U0001f469\u200d\U0001f467 \u4f60\u597d \u0627\u0644\u0639 e\u0301"
    text += " \U0001f1e9\U0001f1ea\u2028\\u0041\x7f"
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"t": {"const": text}}, "required": ["t"]}},
    }
    assert json.loads(ask(http, stream, response_format=wanted).only.text) == {"t": text}
    messages = said(*PLAIN["messages"], {"role": "assistant", "content": text})
    assert ask(http, stream, messages=messages, echo=True).only.text.startswith(text)


@whole_and_streamed
def test_c24_a_prompt_of_a_megabyte_is_answered(http: httpx.Client, stream: bool) -> None:
    """Long contexts are what agents send."""
    reply = ask(http, stream, messages=said({"role": "user", "content": "words " * 166_667}), max_tokens=2)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens > 166_000


@whole_and_streamed
def test_c25_vllms_own_parameters_reach_the_engine(client: openai.OpenAI, http: httpx.Client, stream: bool) -> None:
    """`extra_body` of OpenAI's client works as if it spoke to vLLM."""
    extra = {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 60, "ignore_eos": True}
    reply = ask(http, stream, **extra, max_tokens=70, return_token_ids=True)
    assert len(reply.only.token_ids) == 70
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=70,
        extra_body=extra,
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 70


@whole_and_streamed
def test_c26_an_unknown_field_is_tolerated(http: httpx.Client, stream: bool) -> None:
    """A newer client is served; what it asks beyond is ignored, as by vLLM."""
    assert ask(http, stream, x_unknown={"deep": [1, None]}).only.text == ask(http, stream).only.text


@whole_and_streamed
def test_c27_logit_bias_is_taken(http: httpx.Client, stream: bool) -> None:
    """Classifiers use it."""
    assert ask(http, stream, logit_bias={"50256": -100, "15": 5.5}).only.text


@whole_and_streamed
def test_c28_a_seed_repeats_an_answer(http: httpx.Client, stream: bool) -> None:
    """The same seed gives the same text, another seed another, on whichever replica."""
    texts = [ask(http, stream, temperature=1, seed=seed).only.text for seed in (7, 7, 7, 8)]
    assert texts[0] == texts[1] == texts[2] != texts[3]


def test_b35_cached_tokens_are_shown_and_logged(http: httpx.Client, service: Service) -> None:
    """Who sends a prompt again sees what was saved, and so does the operator."""
    messages = said({"role": "user", "content": "Once upon a time there was a cache. " * 40})
    responses = [http.post(CHAT, json={**PLAIN, "messages": messages, "max_tokens": 2}) for _ in range(3)]
    # The third must go to one of the two replicas that had it before.
    response = max(responses, key=lambda response: int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]))
    usage = response.json()["usage"]
    record = service.logged(response.headers["x-request-id"])
    assert record["prompt_tokens"] == usage["prompt_tokens"]
    assert record["completion_tokens"] == usage["completion_tokens"] == 2
    assert record["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] > 0
