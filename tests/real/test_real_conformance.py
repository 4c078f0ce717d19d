"""The core of tests/conformance on real vLLM: what the simulated engine says of its shapes is true of the engine it simulates.

The model's weights are random and its tokens are bytes, so what it says means nothing and always comes out the same.
"""

import json
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.conformance import strict
from tests.conformance.replies import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Reply, ask_chat, ask_completion, check_failure
from tests.conformance.test_messages import check_anthropic_error, text_of
from tests.conformance.test_responses import EXTRAS, events_of
from tests.real.stack import MODEL, RealStack
from tests.real.tiny_glm import QUESTION

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

PLAIN: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 12,
    "ignore_eos": True,
}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "Once upon", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
WITH_USAGE = {"stream_options": {"include_usage": True}}
whole_and_streamed = pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])


def ask(http: httpx.Client, stream: bool, **changes: Any) -> Reply:
    return ask_chat(http, PLAIN | (WITH_USAGE if stream else {}) | changes, stream=stream)


def complete(http: httpx.Client, stream: bool, **changes: Any) -> Reply:
    return ask_completion(http, TEXT | (WITH_USAGE if stream else {}) | changes, stream=stream)


def test_c01_whole_answers_have_openais_keys(http: httpx.Client) -> None:
    """Of chat and of completions; `ask` checks every part of them."""
    chat = strict.load(http.post(CHAT, json=PLAIN).content)
    assert (chat["object"], chat["model"], chat["id"][:9]) == ("chat.completion", MODEL, "chatcmpl-")
    assert ask(http, False).only.text
    assert complete(http, False).only.text


def test_c02_to_c07_a_stream_says_what_the_whole_answer_says(http: httpx.Client) -> None:
    """Role first, one id, [DONE] last, the same text at temperature 0, and the same usage."""
    for question in (ask, complete):
        whole, streamed = question(http, False), question(http, True)
        assert (streamed.only.text, streamed.only.finish_reason) == (whole.only.text, "length")
        assert whole.usage is not None
        assert streamed.usage is not None
        assert whole.usage.completion_tokens == streamed.usage.completion_tokens == 12
        assert whole.usage.prompt_tokens == streamed.usage.prompt_tokens


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("options", "shown"), [({}, False), (WITH_USAGE, True)], ids=["not asked for", "asked for"])
def test_c06_usage_comes_only_when_asked_for(http: httpx.Client, route: str, options: dict[str, Any], shown: bool) -> None:
    """The router asks vLLM for it and takes it out again."""
    body = PLAIN if route == CHAT else TEXT
    payloads = strict.read_chunks(http.post(route, json={**body, **options, "stream": True}).content)
    chunks = [strict.load(payload) for payload in payloads]
    assert [not chunk["choices"] for chunk in chunks] == [False] * (len(chunks) - 1) + [shown]


@whole_and_streamed
def test_c08_several_choices_have_their_indices(http: httpx.Client, stream: bool) -> None:
    """Interleaved, each with its own end."""
    assert sorted(ask(http, stream, n=3, temperature=1).choices) == [0, 1, 2]
    assert sorted(complete(http, stream, n=2, temperature=1, prompt=["a", "b"]).choices) == [0, 1, 2, 3]


@whole_and_streamed
def test_c09_logprobs_come_for_each_token(http: httpx.Client, stream: bool) -> None:
    """As many alternatives as asked for, as strict JSON."""
    entries = ask(http, stream, logprobs=True, top_logprobs=3).only.logprobs
    assert [len(entry.top_logprobs) for entry in entries] == [3] * 12
    columns = complete(http, stream, logprobs=2).only.logprobs
    assert sum(len(entry.tokens) for entry in columns) == sum(len(entry.token_logprobs) for entry in columns) == 12


@whole_and_streamed
def test_c10_a_stop_string_ends_the_answer_and_is_left_out(http: httpx.Client, stream: bool) -> None:
    """In a stream too, where it lies across tokens."""
    text = ask(http, False).only.text
    stop = text[5:8]
    reply = ask(http, stream, stop=stop)
    assert (reply.only.text, reply.only.finish_reason, reply.only.stop_reason) == (text.partition(stop)[0], "stop", stop)


@whole_and_streamed
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_c11_c12_the_limit_of_tokens_holds(http: httpx.Client, stream: bool, field: str) -> None:
    """Under both names."""
    reply = ask(http, stream, **{"max_tokens": None, field: 1})
    assert reply.usage is not None
    assert (reply.only.finish_reason, reply.usage.completion_tokens) == ("length", 1)


@whole_and_streamed
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
        [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
        [
            {"role": "user", "content": QUESTION},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "Paris"},
        ],
    ],
    ids=["c18 parts", "c20 system", "c20 developer", "c19 null content"],
)
def test_c18_to_c20_every_form_of_a_message_is_taken(http: httpx.Client, stream: bool, messages: list[Any]) -> None:
    """As vLLM takes them."""
    assert ask(http, stream, messages=messages).only.text


@whole_and_streamed
def test_c23_emoji_and_scripts_come_back_as_they_went(http: httpx.Client, stream: bool) -> None:
    """The prompt's characters are several tokens each."""
    prompt = "\U0001f469\u200d\U0001f680 caf\u00e9 \u65e5\u672c\u8a9e"
    assert complete(http, stream, prompt=prompt, echo=True).only.text.startswith(prompt)


@whole_and_streamed
def test_c25_c26_vllms_fields_reach_it_and_unknown_ones_do_no_harm(http: httpx.Client, stream: bool) -> None:
    """Sampling parameters of its own, and what a newer client may send."""
    reply = ask(
        http, stream, top_k=5, min_p=0.1, repetition_penalty=1.1, return_token_ids=True, min_tokens=3, x_unknown={"a": 1}
    )
    assert len(reply.only.token_ids) == 12


@whole_and_streamed
def test_c17_structured_output_is_json_of_its_schema(http: httpx.Client, stream: bool) -> None:
    """A model of random weights writes valid JSON when it is made to."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "v", "schema": schema, "strict": True}}
    text = ask(http, stream, response_format=wanted, max_tokens=200, ignore_eos=False).only.text
    assert json.loads(text)["a"] in ("x", "y")


ERRORS: dict[str, tuple[int, str | None, str | None, dict[str, Any]]] = {
    "e03_unknown_model": (404, "model_not_found", "model", {"model": "nope"}),
    "e06_temperature": (400, None, "temperature", {"temperature": -1}),
    "e06_type": (400, None, "temperature", {"temperature": "hot"}),
    "e06_top_logprobs": (400, None, "top_logprobs", {"top_logprobs": 3}),
    "e07_prompt": (400, "context_length_exceeded", "input_tokens", {"messages": [{"role": "user", "content": "a" * 3000}]}),
    "e07_max_tokens": (400, "context_length_exceeded", "max_tokens", {"max_tokens": 5000}),
}


@whole_and_streamed
@pytest.mark.parametrize(("status", "code", "param", "changes"), ERRORS.values(), ids=ERRORS.keys())
def test_e03_to_e07_vllms_errors_come_in_openais_shape(
    http: httpx.Client, stream: bool, status: int, code: str | None, param: str | None, changes: dict[str, Any]
) -> None:
    """By HTTP status, for streams too."""
    error = check_failure(http.post(CHAT, json={**PLAIN, **changes, "stream": stream}), status)
    assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error"), error


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"model": "tiny-glm", "messages": [}'])
def test_e06_what_is_no_json_is_a_400(http: httpx.Client, content: bytes) -> None:
    """Before it reaches vLLM."""
    check_failure(http.post(CHAT, content=content), 400)


def test_the_tokenizer_goes_there_and_back(http: httpx.Client) -> None:
    """vLLM's own routes for it."""
    tokens = http.post("/tokenize", json={"model": MODEL, "prompt": "caf\u00e9"}).json()["tokens"]
    assert http.post("/detokenize", json={"model": MODEL, "tokens": tokens}).json() == {"prompt": "caf\u00e9"}


def test_anthropics_client_gets_its_message(stack: RealStack, http: httpx.Client) -> None:
    """Whole, streamed, counted, and refused in Anthropic's shape."""
    with anthropic.Anthropic(base_url=stack.router.url, api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "messages": PLAIN["messages"]}
        greedy = {"temperature": 0}
        whole = client.messages.create(**asked, extra_body=greedy)
        with client.messages.stream(**asked, extra_body=greedy) as stream:
            assert text_of(stream.get_final_message()) == text_of(whole) != ""
        assert client.messages.count_tokens(model=MODEL, messages=PLAIN["messages"]).input_tokens == whole.usage.input_tokens
    refused = http.post(MESSAGES, json={**asked, "messages": [{"role": "user", "content": "a" * 3000}]})
    assert refused.status_code == 400
    assert check_anthropic_error(refused.content, refused.headers["x-request-id"])["type"] == "invalid_request_error"


def test_a_response_is_answered(http: httpx.Client) -> None:
    """Whole and streamed, each event a known one; a response that is not stored is a clean 404."""
    asked = {"model": MODEL, "input": QUESTION, "max_output_tokens": 8, "temperature": 0}
    answer = http.post(RESPONSES, json=asked)
    assert answer.status_code == 200, answer.text
    whole = strict.check(Response, answer.content, extras=EXTRAS)
    events = events_of(http.post(RESPONSES, json={**asked, "stream": True}).content)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    check_failure(http.get(f"{RESPONSES}/{whole.id}"), 404)


async def test_b24_b37_openais_client_raises_its_own_errors(client: openai.AsyncOpenAI) -> None:
    """For a stream before its first event."""
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a" * 3000}], stream=True)
    assert caught.value.code == "context_length_exceeded"
