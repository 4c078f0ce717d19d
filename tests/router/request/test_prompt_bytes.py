"""The prompt in the raw bytes of a request's body."""

import json
from typing import Any

import pytest

from protocol.openai import Surface
from router.policy.prompt import BytesPrompt
from router.request.fields import engine_body, read_request
from router.request.prompt_bytes import prompt_in

SYSTEM = {"role": "system", "content": "You are terse. " * 200}
TURN = {"role": "user", "content": "What is the capital of France?"}
ANSWER = {"role": "assistant", "content": 'Paris. "Really" \\ {yes}'}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "oneOf": [{}]}}}]


def prompt_of(body: dict[str, Any], surface: Surface = Surface.CHAT, *, indent: int | None = None) -> BytesPrompt:
    raw = json.dumps(body, indent=indent).encode()
    return prompt_in(raw, read_request(surface, raw).prompt, 1, is_changed=False)


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "temperature": 0.5, "messages": list(messages), "max_tokens": 9, **more}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tools": TOOLS},
        {"stop": ["}]", "x"]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"anyOf": [{"type": "null"}]}}}},
    ],
    ids=["plain", "tools", "stop", "schema"],
)
def test_the_next_turn_of_a_conversation_begins_with_the_last_ones_prompt(more: dict[str, Any], indent: int | None) -> None:
    """So the replica that has the conversation cached is found, whatever else stands in the request."""
    first, second = (
        prompt_of(chat(SYSTEM, TURN, **more), indent=indent),
        prompt_of(chat(SYSTEM, TURN, ANSWER, TURN, **more), indent=indent),
    )
    shared = 0
    for one, other in zip(first.chunks, second.chunks, strict=False):
        shared += one == other
    assert shared >= len(first.chunks) - 1 >= 2
    if "stop" not in more and "response_format" not in more:  # there only whole chunks are recognised
        assert second.digest(first.size) == first.digest(first.size)


def test_what_the_engine_puts_first_comes_first() -> None:
    """Requests with other tools, or another system text on Anthropic's surface, share nothing."""
    plain, with_tools = prompt_of(chat(SYSTEM, TURN)), prompt_of(chat(SYSTEM, TURN, tools=TOOLS))
    assert plain.chunks[0] != with_tools.chunks[0]
    assert with_tools.size > plain.size
    messages = {"model": "m", "max_tokens": 5, "messages": [TURN]}
    one = prompt_of(messages | {"system": "a" * 3000}, Surface.MESSAGES)
    other = prompt_of(messages | {"system": "b" * 3000}, Surface.MESSAGES)
    assert one.size == other.size > 3000
    assert not set(one.chunks) & set(other.chunks)


@pytest.mark.parametrize(
    ("surface", "body"),
    [
        (Surface.COMPLETIONS, {"prompt": "p" * 3000}),
        (Surface.COMPLETIONS, {"prompt": list(range(2000))}),
        (Surface.RESPONSES, {"input": "p" * 3000}),
        (Surface.RESPONSES, {"input": [{"role": "user", "content": "p" * 3000}]}),
    ],
)
def test_every_surface_that_generates_has_a_prompt(surface: Surface, body: dict[str, Any]) -> None:
    """What follows the prompt in a request is no part of it."""
    one = prompt_of({"model": "m", "user": "u", **body, "max_tokens": 1, "metadata": {"a": "x" * 500}}, surface)
    other = prompt_of({"model": "m", "user": "u", **body}, surface)
    assert one.size == other.size > 3000
    assert list(one.chunks) == list(other.chunks)


@pytest.mark.parametrize("surface", [Surface.EMBEDDINGS, Surface.TOKENIZE, Surface.COUNT_TOKENS, Surface.DETOKENIZE])
def test_what_generates_nothing_leaves_nothing_to_be_found(surface: Surface) -> None:
    """Embeddings and token counts are placed by load alone."""
    body = {"model": "m", "input": "x" * 5000, "prompt": "x" * 5000, "tokens": [1]}
    assert prompt_of(body, surface).chunks == [] or surface is Surface.COUNT_TOKENS


@pytest.mark.parametrize("stream", [True, False])
def test_the_prompt_is_the_same_in_the_body_that_the_engine_gets(stream: bool) -> None:
    """A router that renames the model or asks for usage recognises what it sees again."""
    raw = json.dumps(chat(SYSTEM, TURN, stream=stream)).encode()
    facts = read_request(Surface.CHAT, raw)
    before = prompt_in(raw, facts.prompt, 1, is_changed=False)
    for model in (None, "the-engines-own"):
        body = engine_body(raw, facts, surface=Surface.CHAT, model=model)
        after = prompt_in(body, facts.prompt, 1, is_changed=body is not raw)
        assert (after.size, list(after.chunks)) == (before.size, list(before.chunks))


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"m","messages":[]}',
        b'{"model":"m"}',
        b'{"model":"m","messages":null}',
        b'{"model":"m","messages":[{}]}',
        b'{"model":"m","messages":[{"role":"user","content":null}]}',
        b'{"model":"m","metadata":{"messages":"no"},"messages":[{"role":"user","content":"hi"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"messages":[{"role":"user","content":"b"}]}',
        b'{"messages" : [ {"content":"x" } ] , "model":"m"}',
        b'{"model":"m","m\\u0065ssages":[{"role":"user","content":"hidden"}]}',
    ],
)
def test_a_body_in_which_the_prompt_is_not_found_costs_no_more_than_a_hit(raw: bytes) -> None:
    """Whatever a client writes, its request is read and placed."""
    prompt = prompt_in(raw, read_request(Surface.CHAT, raw).prompt, 1, is_changed=True)
    assert 0 <= prompt.size <= len(raw)
    assert isinstance(list(prompt.chunks), list)
    prompt.digest(prompt.size)
