"""Answers of the simulated engine that another request continues from where they broke off."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from server.sim_generation import Emission, Generation, Sampling
from server.sim_text import decode, encode
from tests.sim import SimEngine, start_sim_engine

USER = [{"role": "user", "content": "Grüße 🧀, world"}]
GOES_ON = {"continue_final_message": True, "add_generation_prompt": False}
WEIGHTS = b"weights"
PHRASES = ["Käse 🧀🧀 größer", "naïve — 東京"]
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"enum": PHRASES}}, "required": ["a"]}},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[SimEngine]:
    with start_sim_engine("--time-scale", "0", "--answer-tokens-mean", "12") as running:
        yield running


@pytest.fixture
async def client(engine: SimEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as client:
        yield client


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """The choices of all chunks, in their order."""
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    data = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    assert data.pop() == "[DONE]"
    return [json.loads(payload)["choices"][0] for payload in data]


def continued(text: str) -> list[dict[str, str]]:
    return [*USER, {"role": "assistant", "content": text}]


async def chat_rest(client: httpx.AsyncClient, text: str, fields: dict[str, Any]) -> tuple[str, str]:
    body = {**fields, **GOES_ON, "messages": continued(text)}
    choice = (await post(client, "/v1/chat/completions", body))["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0}, {"max_tokens": 7}, {"stop": ["a b", "e z"]}, {"response_format": FORMAT}],
    ids=["sampled", "greedy", "limit", "stop", "multi-byte"],
)
async def test_a_chat_answer_goes_on_after_every_event(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    """Whatever was streamed so far, sent back as an open message, is followed by exactly the rest, with the same end.

    Text that is held back for a stop string, and characters that tokens cut, end the text inside of a token.
    """
    choices = await stream(client, "/v1/chat/completions", {"messages": USER, **fields})
    pieces = [choice["delta"].get("content", "") for choice in choices]
    whole, reason = "".join(pieces), choices[-1]["finish_reason"]
    assert len(choices) > 5
    prompt = (await post(client, "/tokenize", {"messages": USER}))["count"]
    for count in range(1, len(choices)):
        text = "".join(pieces[:count])
        if not text:
            continue
        limits = {}
        if "max_tokens" in fields:
            body = {"messages": continued(text), **GOES_ON}
            so_far = (await post(client, "/tokenize", body))["count"] - prompt
            assert so_far == len(encode(text))
            if so_far == fields["max_tokens"]:
                continue
            limits = {"max_tokens": fields["max_tokens"] - so_far}
        assert await chat_rest(client, text, {**fields, **limits}) == (whole[len(text) :], reason)


async def test_a_chat_answer_goes_on_after_every_character(client: httpx.AsyncClient) -> None:
    """Also where the text ends inside of a word, and directly before or after a space."""
    whole = (await post(client, "/v1/chat/completions", {"messages": USER}))["choices"][0]["message"]["content"]
    cuts = range(1, len(whole))
    rests = await asyncio.gather(*(chat_rest(client, whole[:cut], {}) for cut in cuts))
    assert rests == [(whole[cut:], "stop") for cut in cuts]


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 100}, {"max_tokens": 9, "temperature": 0}, {"max_tokens": 100, "stop": "a b"}]
)
async def test_a_completion_goes_on_after_its_text_and_after_its_token_ids(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    """Prompt and text, or the token ids of both, are followed by exactly the rest, with the same end."""
    prompt = "Once upon a time"
    choices = await stream(client, "/v1/completions", {"prompt": prompt, "return_token_ids": True, **fields})
    prompt_ids = choices[0]["prompt_token_ids"]
    assert prompt_ids == encode(prompt)
    assert all(choice["prompt_token_ids"] is None for choice in choices[1:])
    whole, reason = "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]
    ids: list[int] = []
    text = ""
    for choice in choices[:-1]:
        ids += choice["token_ids"]
        text += choice["text"]
        rest = {**fields, "max_tokens": fields["max_tokens"] - len(ids)}
        by_ids = (await post(client, "/v1/completions", {"prompt": prompt_ids + ids, **rest}))["choices"][0]
        if "stop" not in fields:  # text that was held back is in the ids already
            assert (by_ids["text"], by_ids["finish_reason"]) == (whole[len(text) :], reason)
        if len(text) >= 4:
            by_text = (await post(client, "/v1/completions", {"prompt": prompt + text, **rest}))["choices"][0]
            assert (by_text["text"], by_text["finish_reason"]) == (whole[len(text) :], reason)


async def test_token_ids_come_in_the_fields_of_vllm(client: httpx.AsyncClient) -> None:
    """Chat: the prompt's ids beside `choices` of the first chunk, the others in each choice; joined they are the answer."""
    body = {"messages": USER, "return_token_ids": True, "stream": True}
    answer = await client.post("/v1/chat/completions", json=body)
    chunks = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    prompt = (await post(client, "/tokenize", {"messages": USER}))["tokens"]
    assert chunks[0]["prompt_token_ids"] == prompt
    assert "token_ids" not in chunks[0]["choices"][0]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    ids = [token for chunk in chunks[1:] for token in chunk["choices"][0]["token_ids"]]
    assert decode(ids) == "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    whole = await post(client, "/v1/chat/completions", {**body, "stream": False})
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == (prompt, ids)


def run(prompt: list[int], *, answered: int | None, weights: bytes = WEIGHTS, **sampling: Any) -> list[Emission]:
    generation = Generation("s", prompt, answered=answered, sampling=Sampling(**{"max_tokens": 30, **sampling}))
    emissions = [generation.advance(weights, room=1000)]
    while emissions[-1].finish_reason is None:
        emissions.append(generation.advance(weights, room=1000))
    return emissions


def said(emissions: list[Emission]) -> str:
    return "".join(emission.text for emission in emissions)


def test_an_answer_of_other_weights_is_continued_as_well_as_it_can_be() -> None:
    """After a swap the text so far is not what the new weights would have said: new words follow, behind a space."""
    prompt = encode("Tell me")
    old = [emission.token for emission in run(prompt, answered=0, max_tokens=5)]
    begun = [token for token in old if token is not None]
    rest = said(run(prompt + begun, answered=5, weights=b"others", max_tokens=3))
    assert rest != said(run(prompt + begun, answered=5, max_tokens=3))
    assert rest.startswith(" ")
    assert len(rest.split()) == 3


def test_the_natural_length_counts_what_the_prompt_already_holds() -> None:
    """A completion that is continued ends where it would have ended."""
    prompt = encode("Once upon a time")
    whole = run(prompt, answered=None, max_tokens=100, answer_tokens_mean=10)
    for cut in range(1, len(whole)):
        begun = [emission.token for emission in whole[:cut] if emission.token is not None]
        rest = run(prompt + begun, answered=None, max_tokens=100, answer_tokens_mean=10)
        assert [emission.token for emission in rest] == [emission.token for emission in whole[cut:]]


def test_a_prompt_that_ends_in_words_of_its_own_gets_an_answer_of_its_own() -> None:
    """Words that only look made up are not taken for the beginning of an answer."""
    for text in ("say baba bobo", "a", "say ", "say b", "say ba.", "bobo"):
        emissions = run(encode(text), answered=None, max_tokens=100, answer_tokens_mean=10)
        assert 5 <= len(emissions) - 1 <= 15
