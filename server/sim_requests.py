"""Chat and completion bodies of the simulated engine, checked as vLLM 0.32 checks them and turned into frozen values.

Two kinds of refusal exist there and here: a field of the wrong type ("Bad Request", `param` is the path in the body) and a
value that makes no sense ("BadRequestError", `param` is the field). Fields that vLLM ignores are ignored; fields that it
honours and the simulation cannot are refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.sim_errors import ApiError
from server.sim_fields import Fields
from server.sim_generation import Sampling, Script
from server.sim_scripts import ToolPlan, response_script, tool_plan
from server.sim_settings import EngineSettings
from server.sim_text import decode, encode, message_text, render_chat

_MAX_STOP_STRINGS = 4  # VLLM_MAX_STOP_STRINGS
_MAX_N = 16_384  # VLLM_MAX_N_SEQUENCES
_MAX_PROMPTS = 1024  # VLLM_MAX_COMPLETION_PROMPTS
_MAX_LOGPROBS = 20  # --max-logprobs
_MAX_SALT_LENGTH = 128
_SALT_FORBIDDEN = frozenset("@/\\\x00")
_SAMPLED_SEED_BASE = 1 << 64  # keeps sampled answers apart from greedy ones, whose seed is 0
_NOT_SIMULATED = ("use_beam_search", "prompt_embeds", "prompt_logprobs", "structured_outputs", "logprob_token_ids")


@dataclass(frozen=True, slots=True)
class Prompt:
    """`answered` tokens at the end already belong to the answer: a continued assistant message; None: nobody says."""

    tokens: list[int]
    text: str
    answered: int | None = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """One sequence to run: choice `index` of the answer."""

    index: int
    prompt: Prompt
    sampling: Sampling
    script: Script | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What chat and completion requests have in common. Both hold one as `generate`."""

    sequences: tuple[SequencePlan, ...]  # prompts x n, in the order of the choices
    prompt_count: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    top_logprobs: int | None  # None: no log probabilities
    salt: str | None
    request_id: str | None
    echo: bool
    return_token_ids: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    generate: GenerateRequest
    role: str
    tool: ToolPlan | None
    echoed: str  # with `echo`: the last message's text where it is of the answer's role
    shows_reasoning: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    generate: GenerateRequest
    echoes_only: bool  # `echo` with max_tokens 0: the prompt comes back, nothing new is shown


def parse_chat(body: Mapping[str, Any], settings: EngineSettings, *, limit_name: str | None = None) -> ChatRequest:
    """A request of POST /v1/chat/completions. `limit_name` is what errors call the limit where the body is another API's.

    Raises:
        ApiError: with status and message as vLLM words them.
    """
    fields = Fields(body)
    messages = chat_messages(fields)
    _refuse_unsupported(fields)
    limit_field = "max_tokens" if fields.raw("max_completion_tokens") is None else "max_completion_tokens"
    wanted_top = fields.integer("top_logprobs") or 0
    has_logprobs = fields.flag("logprobs")
    _check_logprob_count(wanted_top, "top_logprobs")
    if wanted_top > 0 and not has_logprobs:
        raise ApiError.bad_value("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    tools = fields.items("tools")
    tool = tool_plan(fields, tools, messages)
    prompt, role = chat_prompt(fields, messages, tools)
    thinks = settings.reasoning_parser and not prompt.answered and _is_thinking(fields)
    generate = _generate_request(
        fields,
        settings,
        prompts=(prompt,),
        max_tokens=_limit(fields, limit_field, None),
        limit_name=limit_name or limit_field,
        top_logprobs=wanted_top if has_logprobs else None,
        script=tool.script if tool else response_script(fields, messages),
        reasoning_tokens=max(1, settings.answer_tokens_mean // 4) if thinks else 0,
    )
    echoes = generate.echo and bool(messages) and messages[-1]["role"] == role
    return ChatRequest(
        generate=generate,
        role=role,
        tool=tool,
        echoed=message_text(messages[-1]) if echoes else "",
        shows_reasoning=fields.flag("include_reasoning", default=True),
    )


def parse_completion(body: Mapping[str, Any], settings: EngineSettings) -> CompletionRequest:
    """A request of POST /v1/completions.

    Raises:
        ApiError: with status and message as vLLM words them.
    """
    fields = Fields(body)
    prompts = _completion_prompts(fields)
    _refuse_unsupported(fields)
    top_logprobs = fields.integer("logprobs")
    if top_logprobs is not None:
        _check_logprob_count(top_logprobs, "logprobs")
    limit = _limit(fields, "max_tokens", 16)
    echoes_only = fields.flag("echo") and limit == 0
    generate = _generate_request(
        fields,
        settings,
        prompts=prompts,
        max_tokens=1 if echoes_only else limit,
        limit_name="max_tokens",
        top_logprobs=top_logprobs,
        script=response_script(fields),
        reasoning_tokens=0,
    )
    return CompletionRequest(generate=generate, echoes_only=echoes_only)


def check_model(fields: Fields, settings: EngineSettings) -> None:
    """Refuses a model that is not served. An absent one is the served one, as in vLLM."""
    model = fields.text("model")
    if model and model not in settings.served_model_names:
        raise ApiError.unknown_model(model, settings.served_model_names)


def chat_messages(fields: Fields) -> list[Mapping[str, Any]]:
    """The messages of a chat body, checked as far as the template reads them."""
    if fields.raw("messages") is None:
        raise fields.invalid("messages", "missing", "Field required")
    messages = fields.items("messages")
    for index, message in enumerate(messages):
        path = f"body.messages.{index}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError.invalid_body("missing", f"{path}.role", "Field required", message)
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list)):
            raise ApiError.invalid_body("string_type", f"{path}.content", "Input should be a valid string", content)
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or not isinstance(part.get("text", ""), str):
                raise ApiError.invalid_body("dict_type", f"{path}.content", "Input should be a valid dictionary", part)
            kind = part.get("type", "text")
            if not isinstance(kind, str):
                raise ApiError.invalid_body("literal_error", f"{path}.content", "Input should be a content part's type", kind)
            if kind not in ("text", "input_text", "output_text", "refusal", "thinking"):
                raise ApiError.bad_value(f"At most 0 {kind.removesuffix('_url')}(s) may be provided in one prompt.")
    return messages


def chat_prompt(fields: Fields, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> tuple[Prompt, str]:
    """The rendered conversation, and the role that answers."""
    continued = fields.flag("continue_final_message")
    generates = fields.flag("add_generation_prompt", default=True)
    if continued and generates:
        if fields.has("add_generation_prompt"):
            raise ApiError.bad_value("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        # The default of add_generation_prompt meets transformers' own check when the template is applied.
        raise ApiError.bad_value("continue_final_message and add_generation_prompt are not compatible.")
    head, answered = render_chat(messages, tools=tools, add_generation_prompt=generates, continue_final_message=continued)
    begun = encode(answered)
    role = "assistant" if generates or not messages else str(messages[-1]["role"])
    return Prompt(encode(head) + begun, head + answered, len(begun)), role


def _generate_request(
    fields: Fields,
    settings: EngineSettings,
    *,
    prompts: Sequence[Prompt],
    max_tokens: int | None,
    limit_name: str,
    top_logprobs: int | None,
    script: Script | None,
    reasoning_tokens: int,
) -> GenerateRequest:
    stream = fields.flag("stream")
    options = Fields(fields.mapping("stream_options"), "body.stream_options")
    if fields.raw("stream_options") and not stream:
        raise ApiError.bad_value("Stream options can only be defined when `stream=True`.", param="stream_options")
    include_usage = options.flag("include_usage")
    n = _at_least("n", fields.integer("n", 1), 1)
    if n > _MAX_N:
        raise ApiError.bad_value(f"n must be at most {_MAX_N}, got {n}.")
    is_greedy = _temperature(fields) == 0
    if is_greedy and n > 1:
        raise ApiError.bad_value(f"n must be 1 when using greedy sampling, got {n}.")
    seed = fields.integer("seed", 0) or 0
    sequences: list[SequencePlan] = []
    for prompt in prompts:
        limit = _clamped_limit(len(prompt.tokens), max_tokens, limit_name, settings.scheduler.max_model_len)
        for choice in range(n):
            sampling = Sampling(
                max_tokens=limit,
                min_tokens=_min_tokens(fields, limit),
                seed=0 if is_greedy else _SAMPLED_SEED_BASE + seed + choice,
                ignore_eos=fields.flag("ignore_eos"),
                stop=_stop_strings(fields),
                stop_token_ids=_stop_token_ids(fields),
                include_stop=fields.flag("include_stop_str_in_output"),
                top_logprobs=top_logprobs,
                answer_tokens_mean=settings.answer_tokens_mean,
                reasoning_tokens=reasoning_tokens,
            )
            sequences.append(SequencePlan(index=len(sequences), prompt=prompt, sampling=sampling, script=script))
    return GenerateRequest(
        sequences=tuple(sequences),
        prompt_count=len(prompts),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and options.flag("continuous_usage_stats"),
        top_logprobs=top_logprobs,
        salt=_salt(fields),
        request_id=fields.text("request_id"),
        echo=fields.flag("echo"),
        return_token_ids=fields.flag("return_token_ids"),
    )


def _min_tokens(fields: Fields, max_tokens: int) -> int:
    min_tokens = _at_least("min_tokens", fields.integer("min_tokens", 0), 0)
    if min_tokens > max_tokens:
        raise ApiError.bad_value(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}.")
    return min_tokens


def _limit(fields: Fields, name: str, default: int | None) -> int | None:
    limit = fields.integer(name, default)
    if limit is not None and limit < 0:
        raise ApiError.bad_value(f"max_tokens must be at least 1, got {limit}.", param="max_tokens", value=limit)
    return limit


def _clamped_limit(prompt_tokens: int, wanted: int | None, name: str, context: int) -> int:
    """vLLM 0.32 refuses what alone is too long and otherwise clamps the answer to what the context still takes."""
    if wanted is not None and wanted > context:
        message = f"{name}={wanted} cannot be greater than max_model_len={context}. Please request fewer output tokens."
        raise ApiError.bad_value(message, param=name, value=wanted)
    if prompt_tokens > context:
        message = (
            f"This model's maximum context length is {context} tokens. However, your prompt contains {prompt_tokens} input "
            "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
        )
        raise ApiError.bad_value(message, param="input_tokens", value=prompt_tokens)
    limit = min(context - prompt_tokens, context if wanted is None else wanted)
    if limit < 1:
        raise ApiError.bad_value(f"max_tokens must be at least 1, got {limit}.", param="max_tokens", value=limit)
    return limit


def _temperature(fields: Fields) -> float:
    temperature = fields.number("temperature", 1.0)
    if temperature < 0:
        message = f"temperature must be non-negative, got {temperature}."
        raise ApiError.bad_value(message, param="temperature", value=temperature)
    if temperature > 2:
        message = f"temperature must be in [0, 2], got {temperature}."
        raise ApiError.bad_value(message, param="temperature", value=temperature)
    top_p = fields.number("top_p", 1.0)
    if not 0 < top_p <= 1:
        raise ApiError.bad_value(f"top_p must be in (0, 1], got {top_p}.", param="top_p", value=top_p)
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = fields.number(name, 0.0)
        if not -2 <= penalty <= 2:
            raise ApiError.bad_value(f"{name} must be in [-2, 2], got {penalty}.")
    return temperature


def _stop_strings(fields: Fields) -> tuple[str, ...]:
    raw = fields.raw("stop")
    if raw is None:
        return ()
    stops = [raw] if isinstance(raw, str) else raw
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise fields.invalid("stop", "string_type", "Input should be a valid string")
    if len(stops) > _MAX_STOP_STRINGS:
        message = f"List should have at most {_MAX_STOP_STRINGS} items after validation, not {len(stops)}"
        raise fields.invalid("stop", "too_long", message)
    if not all(stops):
        raise ApiError.bad_value("stop cannot contain an empty string.")
    return tuple(stops)


def _stop_token_ids(fields: Fields) -> frozenset[int]:
    tokens = fields.items("stop_token_ids")
    if not all(type(token) is int for token in tokens):
        raise ApiError.bad_value(f"stop_token_ids must contain only integers, got {tokens}.")
    return frozenset(tokens)


def _salt(fields: Fields) -> str | None:
    salt = fields.raw("cache_salt")
    if salt is None:
        return None
    if not isinstance(salt, str) or not salt:
        message = "Parameter 'cache_salt' must be a non-empty string if provided."
        raise ApiError.bad_value(message, param="cache_salt")
    if len(salt) > _MAX_SALT_LENGTH or not _SALT_FORBIDDEN.isdisjoint(salt):
        message = (
            f"Parameter 'cache_salt' must be at most {_MAX_SALT_LENGTH} characters and must not contain '@', '/', "
            "'\\\\', or NUL."
        )
        raise ApiError.bad_value(message, param="cache_salt")
    return salt


def _check_logprob_count(count: int, name: str) -> None:
    if count < 0:
        raise ApiError.bad_value(f"`{name}` must be a positive value or -1.", param=name, value=count)
    if count > _MAX_LOGPROBS:
        message = f"Requested sample logprobs of {count}, which is greater than max allowed: {_MAX_LOGPROBS}"
        raise ApiError.bad_value(message, param="logprobs", value=count)


def _completion_prompts(fields: Fields) -> tuple[Prompt, ...]:
    raw = fields.raw("prompt")
    if raw is None or raw == "":
        raise ApiError.bad_value("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    entries = raw if isinstance(raw, list) and not _is_token_ids(raw) else [raw]
    if not entries:
        raise ApiError.bad_value("You must pass at least one prompt")
    if len(entries) > _MAX_PROMPTS:
        message = f"prompt list length {len(entries)} exceeds the maximum allowed count of {_MAX_PROMPTS}."
        raise ApiError.bad_value(message, param="prompt")
    prompts = []
    for entry in entries:
        if isinstance(entry, str):
            prompts.append(Prompt(encode(entry), entry, None))
        elif isinstance(entry, list) and _is_token_ids(entry):
            prompts.append(Prompt(entry, decode(entry), None))
        else:
            raise fields.invalid("prompt", "string_type", "Input should be a valid string")
    return tuple(prompts)


def _is_token_ids(value: Sequence[Any]) -> bool:
    return bool(value) and all(type(token) is int and 0 <= token < 2**63 for token in value)


def _is_thinking(fields: Fields) -> bool:
    kwargs = fields.mapping("chat_template_kwargs")
    return kwargs.get("enable_thinking", fields.raw("reasoning_effort") != "none") is not False


def _at_least(name: str, value: int | None, least: int) -> int:
    value = least if value is None else value
    if value < least:
        raise ApiError.bad_value(f"{name} must be at least {least}, got {value}.")
    return value


def _refuse_unsupported(fields: Fields) -> None:
    for name in _NOT_SIMULATED:
        if fields.raw(name):
            raise ApiError.bad_value(f"`{name}` is not simulated.", param=name)
