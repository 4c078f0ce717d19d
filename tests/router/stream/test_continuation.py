"""The request for the next replica, and what is never continued."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.openai import Surface
from router.outcome import ContinuationOutcome
from router.request.fields import read_request
from router.stream.continuable import NotContinuable
from router.stream.continuation import continued_request, token_count_requests
from router.stream.memory import Sent

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Once", "stream": True, "max_tokens": 50}
SENT = Sent(id="a", created=1, model="m", text="Well, it", token_ids=None, has_role=True, chunks=3)
WITH_IDS = replace(SENT, token_ids=(7, 8, 9), prompt_token_ids=(1, 2))


def encode(body: object) -> bytes:
    return msgspec.json.encode(body)


def continued(surface: Surface, body: dict[str, Any], sent: Sent = SENT, tokens_sent: int = 3) -> dict[str, Any]:
    """The fields of the next request, after one that could be continued."""
    assert read_request(surface, encode(body)).never_continues is None
    request: dict[str, Any] = msgspec.json.decode(continued_request(surface, encode(body), sent, tokens_sent=tokens_sent))
    return request


def test_a_chat_goes_on_as_an_unfinished_message_of_the_assistant() -> None:
    """The conversation gets one more message with what was sent, which the engine is told to go on with."""
    assert continued(Surface.CHAT, CHAT) == {
        **CHAT,
        "messages": [*CHAT["messages"], {"role": "assistant", "content": "Well, it"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("Sure: ", "Sure: Well, it"),
        ([{"type": "text", "text": "Sure: "}], [{"type": "text", "text": "Sure: Well, it"}]),
    ],
)
def test_a_message_that_the_client_began_gets_longer(content: object, expected: object) -> None:
    """No second assistant message is put behind one that the client itself had the engine continue."""
    messages = [*CHAT["messages"], {"role": "assistant", "content": content, "name": "x"}]
    body = {**CHAT, "messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    request = continued(Surface.CHAT, body)
    assert request == {**body, "messages": [*CHAT["messages"], {"role": "assistant", "content": expected, "name": "x"}]}


@pytest.mark.parametrize(
    ("prompt", "sent", "extra", "expected"),
    [
        ("Once", SENT, {}, "OnceWell, it"),
        (["Once"], SENT, {}, ["OnceWell, it"]),
        ("Once", WITH_IDS, {"return_token_ids": True}, [1, 2, 7, 8, 9]),
        (["Once"], WITH_IDS, {"return_token_ids": True}, [[1, 2, 7, 8, 9]]),
        ([5, 6], WITH_IDS, {"return_token_ids": True}, [5, 6, 7, 8, 9]),
        ([[5, 6]], WITH_IDS, {"return_token_ids": True}, [[5, 6, 7, 8, 9]]),
        ([5, 6], replace(WITH_IDS, prompt_token_ids=None), {"return_token_ids": True}, [5, 6, 7, 8, 9]),
    ],
)
def test_a_completion_goes_on_from_text_or_token_ids(
    prompt: object, sent: Sent, extra: dict[str, Any], expected: object
) -> None:
    """The prompt keeps its form; token ids are used where the client works with them."""
    body = {**COMPLETION, "prompt": prompt, **extra}
    assert continued(Surface.COMPLETIONS, body, sent) == {**body, "prompt": expected, "max_tokens": 47}


@pytest.mark.parametrize(
    ("surface", "limits", "expected"),
    [
        (Surface.CHAT, {}, {}),
        (Surface.CHAT, {"max_tokens": 10}, {"max_tokens": 7}),
        (Surface.CHAT, {"max_completion_tokens": 10}, {"max_completion_tokens": 7}),
        (Surface.CHAT, {"max_tokens": None, "max_completion_tokens": 10}, {"max_tokens": None, "max_completion_tokens": 7}),
        (Surface.CHAT, {"max_tokens": 20, "max_completion_tokens": 10}, {"max_tokens": 17, "max_completion_tokens": 7}),
        (Surface.CHAT, {"max_tokens": 2, "max_completion_tokens": 10}, {"max_tokens": 1, "max_completion_tokens": 7}),
        (Surface.COMPLETIONS, {"max_tokens": 4}, {"max_tokens": 1}),
        (Surface.COMPLETIONS, {"max_tokens": 4.0}, {"max_tokens": 1}),
        (Surface.COMPLETIONS, {"max_tokens": None}, {"max_tokens": 13}),
    ],
)
def test_the_limit_is_what_is_left_of_it(surface: Surface, limits: dict[str, Any], expected: dict[str, Any]) -> None:
    """Both spellings are reduced, completions' default of 16 too; the one that has no effect stays valid."""
    request = continued(surface, {**(CHAT if surface is Surface.CHAT else COMPLETION), **limits})
    assert {name: request[name] for name in ("max_tokens", "max_completion_tokens") if name in request} == expected


def test_other_fields_stay_as_they_were_written() -> None:
    """Numbers, unknown fields, escapes and other messages keep their very bytes."""
    body = rb'{"temperature":0.70,"x":{"a":1e3},"messages":[{"role":"user","content":"\u00e9\/"}],"stream":true}'
    request = continued_request(Surface.CHAT, body, SENT, tokens_sent=3)
    assert request.startswith(body.split(b"]")[0] + b',{"role":"assistant","content":"Well, it"}],"stream":true,')


@pytest.mark.parametrize("sent", [Sent(), Sent(id="a", has_role=True), Sent(id="a", prompt_token_ids=(1,))])
def test_an_answer_of_which_nothing_was_sent_begins_anew(sent: Sent) -> None:
    """The request is repeated byte for byte, even where it could not be continued later."""
    body = encode({**CHAT, "seed": 1, "tools": [{"type": "function"}], "logprobs": True}) + b" "
    assert continued_request(Surface.CHAT, body, sent, tokens_sent=0) == body


@pytest.mark.parametrize(
    ("fields", "sent", "reason"),
    [
        ({}, replace(SENT, has_reasoning=True), ContinuationOutcome.REASONING),
        ({}, replace(SENT, text="<think>\nSo"), ContinuationOutcome.REASONING),
        ({}, replace(SENT, has_tool_calls=True), ContinuationOutcome.TOOLS),
        ({}, replace(SENT, is_readable=False), ContinuationOutcome.UNREADABLE),
        ({}, replace(SENT, text="Well, "), ContinuationOutcome.TRAILING_SPACE),
        ({}, replace(SENT, text="Well.\n\n"), ContinuationOutcome.TRAILING_SPACE),
        ({"stop": "item"}, SENT, ContinuationOutcome.HALF_STOP),
        ({"stop": ["x", ", it!"]}, SENT, ContinuationOutcome.HALF_STOP),
        ({"return_token_ids": True}, SENT, ContinuationOutcome.TOKEN_IDS),
        ({"return_token_ids": True}, replace(WITH_IDS, has_textless_tokens=True), ContinuationOutcome.TOKEN_IDS),
        ({"return_token_ids": True, "stop": "zz"}, WITH_IDS, ContinuationOutcome.TOKEN_IDS),
    ],
)
def test_what_was_sent_can_forbid_going_on(fields: dict[str, Any], sent: Sent, reason: ContinuationOutcome) -> None:
    """Reasoning, tool calls, half a stop string, and ids that do not match the text are refused by their own word."""
    with pytest.raises(NotContinuable) as refusal:
        continued(Surface.CHAT, {**CHAT, **fields}, sent)
    assert refusal.value.reason is reason


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({"prompt": [5, 6]}, SENT),
        ({}, replace(WITH_IDS, prompt_token_ids=None)),
    ],
)
def test_a_completion_without_all_token_ids(fields: dict[str, Any], sent: Sent) -> None:
    """Where token ids are needed and not all known, no text stands in for them."""
    with pytest.raises(NotContinuable) as refusal:
        continued(Surface.COMPLETIONS, {**COMPLETION, "return_token_ids": True, **fields}, sent)
    assert refusal.value.reason is ContinuationOutcome.TOKEN_IDS


def test_no_token_of_an_answer_that_cannot_go_on_is_counted() -> None:
    """The engine is asked nothing for an answer that ends here."""
    with pytest.raises(NotContinuable) as refusal:
        token_count_requests(Surface.CHAT, encode(CHAT), replace(SENT, has_reasoning=True))
    assert refusal.value.reason is ContinuationOutcome.REASONING


texts = st.text(max_size=4)
token_ids = st.lists(st.integers(0, 9), max_size=3)
parts = st.fixed_dictionaries({}, optional={"type": st.just("text"), "text": texts | st.none()})
prompts = st.one_of(texts, token_ids, st.lists(texts | token_ids | st.none(), max_size=2), st.none())
contents = st.one_of(texts, st.lists(parts | texts, max_size=2), st.none())
flags = st.sampled_from([None, False, True])
completions = st.builds(
    lambda prompt, shows_ids: {**COMPLETION, "prompt": prompt, "return_token_ids": shows_ids}, prompts, flags
)
chats = st.builds(
    lambda messages, continues, generates: {
        **CHAT,
        "messages": [{"role": "user", "content": content} for content in messages],
        "continue_final_message": continues,
        "add_generation_prompt": generates,
    },
    st.lists(contents, max_size=2),
    flags,
    flags,
)


@given(body=completions | chats, with_ids=st.booleans())
def test_what_the_rules_let_pass_can_be_gone_on_with(body: dict[str, Any], with_ids: bool) -> None:
    """Whatever the form of a prompt, the request is judged beforehand as what the continuation then can do with it."""
    surface = Surface.CHAT if "messages" in body else Surface.COMPLETIONS
    if read_request(surface, encode(body)).never_continues is None:
        sent = WITH_IDS if with_ids or body.get("return_token_ids") else SENT
        assert continued(surface, body, sent).keys() >= body.keys()
        assert (token_count_requests(surface, encode(body), sent) is None) == (sent is WITH_IDS)


def test_text_of_a_completion_may_end_with_a_space() -> None:
    """No template strips it there."""
    assert continued(Surface.COMPLETIONS, COMPLETION, replace(SENT, text="upon ", has_role=False))["prompt"] == "Onceupon "


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_half_a_stop_string_is_always_seen(text: str, stops: list[str]) -> None:
    """Exactly the texts that end with a proper part of a stop string, from its beginning, are refused."""
    sent = replace(SENT, text=f"!{text}")
    half = any(sent.text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))
    body = encode({**COMPLETION, "stop": stops})
    if not half:
        continued_request(Surface.COMPLETIONS, body, sent, tokens_sent=3)
        return
    with pytest.raises(NotContinuable) as refusal:
        continued_request(Surface.COMPLETIONS, body, sent, tokens_sent=3)
    assert refusal.value.reason is ContinuationOutcome.HALF_STOP


@pytest.mark.parametrize("sent", [replace(SENT, finish_reason="stop"), replace(SENT, is_done=True)])
def test_a_finished_answer_is_no_case_for_another_replica(sent: Sent) -> None:
    """The caller is told that it asks for the wrong thing."""
    with pytest.raises(ValueError, match="finished"):
        continued(Surface.CHAT, CHAT, sent)


def test_a_used_up_limit_is_no_case_for_another_replica() -> None:
    """Not one token more than the client asked for is generated."""
    with pytest.raises(ValueError, match="3 tokens were sent of max_tokens=3"):
        continued(Surface.CHAT, {**CHAT, "max_tokens": 3})


def counted(surface: Surface, body: dict[str, Any], sent: Sent = SENT) -> list[dict[str, Any]] | None:
    requests = token_count_requests(surface, encode(body), sent)
    return None if requests is None else [msgspec.json.decode(request) for request in requests]


def test_tokens_of_a_chat_are_counted_as_its_template_renders_them() -> None:
    """Both prompts get the values that the chat's own template gets, and nothing that /tokenize does not know."""
    body = {**CHAT, "reasoning_effort": "none", "chat_template_kwargs": {"a": 1}, "max_tokens": 9, "temperature": 0}
    values = {"a": 1, "enable_thinking": False, "reasoning_effort": "none"}
    first = {"model": "m", "messages": CHAT["messages"], "chat_template_kwargs": values}
    second = {
        **first,
        "messages": [*CHAT["messages"], {"role": "assistant", "content": "Well, it"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    assert counted(Surface.CHAT, body) == [first, second]


def test_tokens_of_a_completion_are_counted_with_its_prompt() -> None:
    """Text is counted where it stands: tokens may span the end of the prompt."""
    first = {"model": "m", "add_special_tokens": False, "prompt": "Once"}
    body = {**COMPLETION, "prompt": ["Once"], "add_special_tokens": False}
    assert counted(Surface.COMPLETIONS, body) == [first, {**first, "prompt": "OnceWell, it"}]


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({}, WITH_IDS),
        ({}, Sent(id="a", has_role=True)),
        ({}, replace(SENT, finish_reason="stop", has_reasoning=True)),
    ],
)
def test_tokens_that_are_known_or_cannot_be_known_are_not_counted(fields: dict[str, Any], sent: Sent) -> None:
    """With token ids nobody needs to be asked; the reasoning of a finished answer cannot be counted from its text."""
    assert counted(Surface.CHAT, {**CHAT, **fields}, sent) is None
