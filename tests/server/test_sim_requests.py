"""How the simulated engine reads chat and completion bodies, and how it refuses them."""

from typing import Any

import pytest

from server.sim_errors import ApiError
from server.sim_fields import Fields
from server.sim_requests import chat_messages, parse_chat, parse_completion
from server.sim_settings import EngineSettings, SchedulerSettings

SETTINGS = EngineSettings(scheduler=SchedulerSettings(max_model_len=100, block_size=4, num_blocks=25))
USER = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": USER, **fields}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "body.messages", "Field required"),
        ({"messages": "hi"}, "body.messages", "valid list"),
        ({"messages": [{"content": "hi"}]}, "body.messages.0.role", "Field required"),
        ({"messages": [{"role": "user", "content": 5}]}, "body.messages.0.content", "valid string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "At most 0 image"),
        (chat(max_tokens="many"), "body.max_tokens", "valid integer"),
        (chat(max_tokens=0), "max_tokens", "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"),
        (chat(max_tokens=101), "max_tokens", "max_tokens=101 cannot be greater than max_model_len=100"),
        (chat(max_completion_tokens=101), "max_completion_tokens", "max_completion_tokens=101"),
        ({"messages": [{"role": "user", "content": "word " * 200}]}, "input_tokens", "maximum context length is 100"),
        (chat(temperature=-1), "temperature", "non-negative"),
        (chat(temperature=2.5), "temperature", "[0, 2]"),
        (chat(top_p=0), "top_p", "(0, 1]"),
        (chat(presence_penalty=3), None, "presence_penalty must be in [-2, 2]"),
        (chat(n=0), None, "n must be at least 1"),
        (chat(n=2, temperature=0), None, "greedy"),
        (chat(stop=["a"] * 5), "body.stop", "at most 4"),
        (chat(stop=[""]), None, "empty string"),
        (chat(stop=5), "body.stop", "valid string"),
        (chat(stream_options={"include_usage": True}), "stream_options", "stream=True"),
        (chat(top_logprobs=2), "top_logprobs", "`logprobs` must be set"),
        (chat(top_logprobs=21, logprobs=True), "logprobs", "max allowed: 20"),
        (chat(tools=[]), "tools", "must not be an empty array"),
        (chat(tool_choice="auto"), "tool_choice", "`tools` must be set"),
        (chat(tools=[TOOL], tool_choice="maybe"), "tool_choice", "Invalid value"),
        (chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}), "tool_choice", "does not match"),
        (chat(tools=[{"type": "function"}]), "body.tools.0.function.name", "Field required"),
        (chat(response_format={"type": "json_schema"}), "response_format", "'json_schema' field must be provided"),
        (chat(response_format={"type": "grammar"}), "response_format", "not simulated"),
        (chat(response_format={"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}), None, "requires itself"),
        (chat(cache_salt="a/b"), "cache_salt", "must not contain"),
        (chat(cache_salt=""), "cache_salt", "non-empty"),
        (chat(min_tokens=9, max_tokens=5), None, "min_tokens must be less than or equal"),
        (chat(use_beam_search=True), "use_beam_search", "not simulated"),
        (chat(continue_final_message=True, add_generation_prompt=True), None, "Cannot set both"),
        (chat(continue_final_message=True), None, "not compatible"),
        (chat(seed=2**63), "body.seed", "less than or equal"),
        (chat(stream="yes"), "body.stream", "valid boolean"),
    ],
)
def test_a_bad_chat_body_is_refused_with_the_field_and_the_reason(body: dict[str, Any], param: str | None, words: str) -> None:
    """Status 400 in vLLM's shape, `param` naming the field."""
    with pytest.raises(ApiError) as caught:
        parse_chat(body, SETTINGS)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompt", "must be provided and non-empty"),
        ({"prompt": ""}, "prompt", "must be provided and non-empty"),
        ({"prompt": []}, None, "at least one prompt"),
        ({"prompt": [[1, 2], "x", 3.5]}, "body.prompt", "valid string"),
        ({"prompt": [-1]}, "body.prompt", "valid string"),
        ({"prompt": ["x"] * 1025}, "prompt", "maximum allowed count of 1024"),
        ({"prompt": "x", "logprobs": -2}, "logprobs", "positive value or -1"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1"),
    ],
)
def test_a_bad_completion_body_is_refused_with_the_field_and_the_reason(
    body: dict[str, Any], param: str | None, words: str
) -> None:
    """The same for completions."""
    with pytest.raises(ApiError) as caught:
        parse_completion(body, SETTINGS)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in caught.value.message


def test_an_answer_is_clamped_to_what_the_context_still_takes() -> None:
    """Prompt and max_tokens together may exceed max_model_len: vLLM 0.32 clamps."""
    request = parse_completion({"prompt": "a " * 30, "max_tokens": 100}, SETTINGS)
    (plan,) = request.generate.sequences
    assert plan.sampling.max_tokens == 100 - len(plan.prompt.tokens)


def test_without_a_limit_a_chat_answer_may_fill_the_context_and_a_completion_gets_16_tokens() -> None:
    """The defaults of the two routes."""
    (plan,) = parse_chat(chat(), SETTINGS).generate.sequences
    assert plan.sampling.max_tokens == 100 - len(plan.prompt.tokens)
    assert parse_completion({"prompt": "x"}, SETTINGS).generate.sequences[0].sampling.max_tokens == 16


def test_max_completion_tokens_wins() -> None:
    """Of both limits the newer name counts."""
    assert parse_chat(chat(max_tokens=5, max_completion_tokens=7), SETTINGS).generate.sequences[0].sampling.max_tokens == 7


def test_choices_differ_in_their_seeds_and_greedy_ones_ignore_theirs() -> None:
    """n sampled choices are n different answers; temperature 0 is always the same one."""
    sampled = [plan.sampling.seed for plan in parse_chat(chat(n=3, seed=5), SETTINGS).generate.sequences]
    assert len(set(sampled)) == 3
    greedy = {parse_chat(chat(temperature=0, seed=seed), SETTINGS).generate.sequences[0].sampling.seed for seed in (1, 2)}
    assert greedy == {0}


@pytest.mark.parametrize(
    ("fields", "called", "named"),
    [
        ({"tools": [TOOL]}, "f", False),
        ({"tools": [TOOL], "tool_choice": "required"}, "f", False),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "f", True),
        ({"tools": [TOOL], "tool_choice": "none"}, None, False),
        ({"tools": [TOOL], "messages": [*USER, {"role": "tool", "content": "4", "tool_call_id": "x"}]}, None, False),
        ({}, None, False),
    ],
)
def test_which_function_the_answer_calls(fields: dict[str, Any], called: str | None, named: bool) -> None:
    """The named one, else the first; `auto` answers a tool's result with text, so that agent loops end."""
    tool = parse_chat({"messages": USER, **fields}, SETTINGS).tool
    assert (tool.name if tool else None) == called
    assert bool(tool and tool.named) == named


def test_token_ids_are_a_prompt_and_lists_of_them_are_several() -> None:
    """All four forms of `prompt`."""
    forms: list[Any] = ["ab cd", ["ab", "cd"], [5, 6, 7], [[5], [6, 7]]]
    assert [len(parse_completion({"prompt": form}, SETTINGS).generate.sequences) for form in forms] == [1, 2, 1, 2]


@pytest.mark.parametrize("kind", [None, True, 3, [], {}])
def test_a_content_part_of_no_known_type_is_refused(kind: object) -> None:
    """Whatever stands there, the client is told, and the engine does not stumble."""
    with pytest.raises(ApiError) as refused:
        chat_messages(Fields({"messages": [{"role": "user", "content": [{"type": kind, "text": "x"}]}]}))
    assert refused.value.status == 400
