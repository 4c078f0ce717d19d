"""Answers of the simulated engine, cut and gone on with by the engine itself, against the same answers uninterrupted."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from protocol.openai import Surface
from router.outcome import ContinuationOutcome
from router.stream.continuable import NotContinuable
from router.stream.continuation import continued_request, token_count_requests
from router.stream.memory import Sent, StreamMemory
from router.stream.seam import SeamRewriter, is_finished
from server.sim_text import encode
from tests.router.stream.samples import DONE, events_of, text_of
from tests.sim import SimEngine, start_sim_engine

USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Erzähl von 北京 und 😀, bitte."}], **USAGE}
BEGUN = [*CHAT["messages"], {"role": "assistant", "content": "Also: 😀"}]
COMPLETION: dict[str, Any] = {"prompt": "Es war einmal in 北京 😀\n", "max_tokens": 30, **USAGE}

CHATS: dict[str, dict[str, Any]] = {
    "plain": CHAT,
    "max-tokens": {**CHAT, "max_tokens": 25},
    "max-completion-tokens": {**CHAT, "max_tokens": 40, "max_completion_tokens": 20},
    "stop": {"messages": [{"role": "user", "content": "Tell me"}], "stop": ["."], **USAGE},
    "greedy": {**CHAT, "temperature": 0},
    "begun": {**CHAT, "messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 20},
    "continuous-usage": {**CHAT, "max_tokens": 12, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "token-ids": {**CHAT, "return_token_ids": True, "max_tokens": 12},
    "no-usage": {"messages": CHAT["messages"], "stream": True, "max_tokens": 12},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": COMPLETION,
    "default-limit": {"prompt": "Once\n", **USAGE},
    "in-list": {**COMPLETION, "prompt": ["Once upon\n"]},
    "stop": {**COMPLETION, "max_tokens": 200, "stop": "."},
    "token-ids": {**COMPLETION, "return_token_ids": True},
    "token-ids-in-list": {**COMPLETION, "prompt": ["Once upon\n"], "return_token_ids": True},
    "from-token-ids": {**COMPLETION, "prompt": encode("Once upon\n"), "return_token_ids": True},
}
CUTS = (0, 1, 2, 3, 7, -5, -4, -3, -2, -1)  # events that reached the client


@pytest.fixture(scope="module")
def engine() -> Iterator[SimEngine]:
    options = ("--time-scale", "0", "--enable-prompt-tokens-details", "--no-enable-prefix-caching")
    with start_sim_engine(*options) as engine:
        yield engine


def ask(engine: SimEngine, surface: Surface, body: bytes) -> list[bytes]:
    answer = engine.client.post(surface, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    return [part + b"\n\n" for part in answer.content.split(b"\n\n") if part]


def count(engine: SimEngine, surface: Surface, body: bytes, sent: Sent) -> tuple[int | None, int | None]:
    """(tokens_sent, prompt_tokens) as far as the engine needs to be asked."""
    requests = token_count_requests(surface, body, sent)
    if requests is None:
        return (None if sent.token_ids is None else len(sent.token_ids)), None
    headers = {"content-type": "application/json"}
    first, second = (engine.client.post("/tokenize", content=part, headers=headers).json()["count"] for part in requests)
    return second - first, first


def prompt_tokens(prompt: str | list[str] | list[int]) -> list[int]:
    if isinstance(prompt, str):
        return encode(prompt)
    return [token for entry in prompt for token in (encode(entry) if isinstance(entry, str) else [entry])]


def marks(stream: list[bytes]) -> list[int]:
    return [chunk["intellect"]["continuations"] for chunk in events_of(stream) if "intellect" in chunk]


def survive(engine: SimEngine, surface: Surface, body: bytes, legs: list[int]) -> list[bytes]:
    """The stream as its client sees it when each of `legs` breaks after so many events, and the last one does not."""
    memory, seen = StreamMemory(), list[bytes]()

    def send(events: list[bytes]) -> None:
        for event in events:
            seen.append(event)
            memory.add(event)

    send(ask(engine, surface, body)[: legs[0]])
    for seams, leg in enumerate([*legs[1:], None], start=1):
        sent = memory.sent()
        tokens_sent, prompt_tokens = count(engine, surface, body, sent)
        end = is_finished(body, sent, tokens_sent, prompt_tokens=prompt_tokens)
        if end is not None:
            return [*seen, end]
        assert tokens_sent is not None
        events = ask(engine, surface, continued_request(surface, body, sent, tokens_sent=tokens_sent))
        rewriter = SeamRewriter(sent, tokens_sent=tokens_sent, seams=seams)
        send([rewriter.rewrite(event) for event in events[:leg]])
    return seen


def summary(stream: list[bytes]) -> dict[str, Any]:
    """All that a client can learn from a stream, apart from where its text was parted and whose chance its id is."""
    chunks = events_of(stream)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    prompt_ids = [value for value in (c.get("prompt_token_ids") for c in [*chunks, *choices]) if value is not None]
    usages = [dict(chunk["usage"]) for chunk in chunks if not chunk["choices"]]
    for usage in usages:  # where nothing is cached, the engine says so in the answers that it gave itself
        usage.pop("prompt_tokens_details", None)
    return {
        "text": text_of(stream),
        "roles": [choice["delta"]["role"] for choice in choices if "role" in choice.get("delta", {})],
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None],
        "token_ids": [token for choice in choices for token in choice.get("token_ids") or ()],
        "prompt_token_ids": prompt_ids,
        "usages": usages,
        "running": [chunk["usage"]["total_tokens"] for chunk in chunks if chunk["choices"] and chunk.get("usage")],
        "done": b"".join(stream).count(DONE) == 1 and b"".join(stream).endswith(DONE),
        "names": len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}),
    }


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", CHATS)
def test_a_cut_chat_goes_on_as_if_it_had_not_been_cut(engine: SimEngine, name: str, cut: int) -> None:
    """Text, finish reason, usage, token ids, role, one id and one [DONE]: the same wherever the first replica died."""
    body = msgspec.json.encode(CHATS[name])
    whole = ask(engine, Surface.CHAT, body)
    assert len(whole) > 10
    leg = cut % len(whole)
    survived = survive(engine, Surface.CHAT, body, [leg])
    assert summary(survived) == summary(whole)
    lacks_only_its_end = bool(summary(whole[:leg])["finish"])
    assert marks(survived) == ([] if lacks_only_its_end else [1])


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_cut_completion_goes_on_from_what_was_sent(engine: SimEngine, name: str, cut: int) -> None:
    """The rest is what the engine says to prompt and text, or ids, with what is left of the limit; usage is of one answer."""
    fields = COMPLETIONS[name]
    body = msgspec.json.encode(fields)
    whole = ask(engine, Surface.COMPLETIONS, body)
    leg = cut % len(whole)
    sent = summary(whole[:leg])
    survived = summary(survive(engine, Surface.COMPLETIONS, body, [leg]))
    if sent["finish"] or leg == 0:
        assert survived == summary(whole)
        return
    prompt = prompt_tokens(fields["prompt"])
    rest_fields = {**fields, "prompt": prompt + encode(sent["text"]), "max_tokens": fields.get("max_tokens", 16) - leg}
    rest = summary(ask(engine, Surface.COMPLETIONS, msgspec.json.encode(rest_fields)))
    completion_tokens = leg + rest["usages"][0]["completion_tokens"]  # the engine sends one token in each event
    assert survived == {
        **summary(whole),
        "text": sent["text"] + rest["text"],
        "finish": rest["finish"],
        "token_ids": sent["token_ids"] + rest["token_ids"],
        "usages": [
            {
                "prompt_tokens": len(prompt),
                "total_tokens": len(prompt) + completion_tokens,
                "completion_tokens": completion_tokens,
            }
        ],
    }


@pytest.mark.parametrize("name", ["plain", "continuous-usage", "begun"])
def test_an_answer_survives_two_replicas(engine: SimEngine, name: str) -> None:
    """The second seam counts from the beginning of the answer, not from the first seam."""
    body = msgspec.json.encode(CHATS[name])
    whole = ask(engine, Surface.CHAT, body)
    survived = survive(engine, Surface.CHAT, body, [3, 4])
    assert summary(survived) == summary(whole)
    assert marks(survived) == [1, 2]


def test_a_stop_string_is_not_looked_for_across_a_seam(engine: SimEngine) -> None:
    """The next replica sees only what it says itself, so text that ends with half a stop string is not continued."""
    fields = {**CHAT, "include_stop_str_in_output": True}
    end = text_of(ask(engine, Surface.CHAT, msgspec.json.encode(fields))[:4])[-2:]
    with pytest.raises(NotContinuable) as refusal:
        survive(engine, Surface.CHAT, msgspec.json.encode({**fields, "stop": f"{end}!"}), [4])
    assert refusal.value.reason is ContinuationOutcome.HALF_STOP


@pytest.mark.parametrize("keeps_stop", [False, True])
def test_a_stop_string_after_the_seam_still_stops(engine: SimEngine, keeps_stop: bool) -> None:
    """Text that the first replica held back for it is said again by the next, so no letter is lost or doubled."""
    text = text_of(ask(engine, Surface.CHAT, msgspec.json.encode(CHAT)))
    word = next(word for word in text.split(" ")[12:] if "." not in word)
    body = msgspec.json.encode({**CHAT, "stop": [f" {word} "], "include_stop_str_in_output": keeps_stop})
    whole = ask(engine, Surface.CHAT, body)
    assert summary(whole)["finish"] == ["stop"]
    # Cut within a token, the simulated engine says something else than it would have.
    beginnings = {leg: text_of(whole[:leg]) for leg in range(1, len(whole) - 3)}
    legs = [leg for leg, sent in beginnings.items() if sent and text.startswith(f"{sent} ") and not sent.endswith(f" {word}")]
    assert len(legs) >= 3
    for leg in legs[:5]:
        survived = survive(engine, Surface.CHAT, body, [leg])
        assert (text_of(survived), summary(survived)["finish"]) == (text_of(whole), ["stop"])
