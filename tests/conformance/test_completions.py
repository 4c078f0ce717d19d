"""The wire cases of test_chat on text completions, which differ in their log probabilities, prompts and echo."""

import json
from typing import Any

import httpx
import pytest

from tests.conformance import strict
from tests.conformance.replies import COMPLETIONS, WITH_USAGE, Reply, ask_completion, whole_and_streamed
from tests.conformance.service import MODEL

PLAIN: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}


def ask(http: httpx.Client, stream: bool, **changes: Any) -> Reply:
    return ask_completion(http, PLAIN | (WITH_USAGE if stream else {}) | changes, stream=stream)


def test_c01_a_whole_completion_has_openais_keys(http: httpx.Client) -> None:
    """The legacy shape, with `text` where chat has a message."""
    body = strict.load(http.post(COMPLETIONS, json=PLAIN).content)
    assert body.keys() >= {"id", "object", "created", "model", "choices", "usage"}
    assert (body["object"], body["model"]) == ("text_completion", MODEL)
    assert body["id"].startswith("cmpl-")


def test_c04_c07_a_streamed_completion_says_what_the_whole_one_says(http: httpx.Client) -> None:
    """The same text, the same end, the same cost."""
    whole, streamed = ask(http, False), ask(http, True)
    assert (streamed.only.text, streamed.only.finish_reason) == (whole.only.text, whole.only.finish_reason)
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.total_tokens == whole.usage.total_tokens


@pytest.mark.parametrize("asked", [False, True])
def test_c06_usage_of_a_streamed_completion_comes_only_when_asked_for(http: httpx.Client, asked: bool) -> None:
    """As for chat: a chunk without choices, or none."""
    raw = http.post(COMPLETIONS, json={**PLAIN, "stream": True, "stream_options": {"include_usage": asked}}).content
    chunks = [strict.load(payload) for payload in strict.read_chunks(raw)]
    assert [not chunk["choices"] for chunk in chunks] == [False] * (len(chunks) - 1) + [asked]


@whole_and_streamed
def test_c08_prompts_times_n_are_numbered_through(http: httpx.Client, stream: bool) -> None:
    """Two prompts with two choices each are four."""
    reply = ask(http, stream, prompt=["one", "two"], n=2, temperature=1)
    assert sorted(reply.choices) == [0, 1, 2, 3]


@whole_and_streamed
@pytest.mark.parametrize("prompt", ["text", ["text"], [356, 357], [[356, 357]]], ids=json.dumps)
def test_every_form_of_a_prompt_is_taken(http: httpx.Client, stream: bool, prompt: object) -> None:
    """Text, several texts, token ids, several lists of token ids."""
    assert ask(http, stream, prompt=prompt).only.text


@whole_and_streamed
def test_c09_completion_logprobs_are_lists_of_one_length(http: httpx.Client, stream: bool) -> None:
    """tokens, token_logprobs, top_logprobs and text_offset go together, a value for each token."""
    entries = ask(http, stream, logprobs=2).only.logprobs
    columns = [
        [value for entry in entries for value in getattr(entry, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    ]
    assert [len(column) for column in columns] == [12] * 4
    assert {len(top) for top in columns[2]} <= {2, 3}  # the sampled token is added where it is not among the likeliest


@whole_and_streamed
def test_c10_c11_completions_stop_where_told(http: httpx.Client, stream: bool) -> None:
    """A stop string is left out; a limit ends with `length`."""
    whole = ask(http, stream)
    assert whole.only.finish_reason == "length"
    stop = whole.only.text[10:13]
    stopped = ask(http, stream, stop=[stop])
    assert (stopped.only.text, stopped.only.finish_reason) == (whole.only.text.partition(stop)[0], "stop")


@whole_and_streamed
def test_c23_an_echo_repeats_the_prompt_exactly(http: httpx.Client, stream: bool) -> None:
    """Every character of it, however many bytes it has."""
    prompt = "\U0001f9d1\U0001f3fd\u200d\U0001f680 caf\u00e9 \u65e5\u672c\u8a9e\u2028 \u00df"
    assert ask(http, stream, prompt=prompt, echo=True).only.text.startswith(prompt)
