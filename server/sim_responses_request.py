"""Bodies of the Responses API, turned into chat bodies the way vLLM 0.32 turns them."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.sim_errors import ApiError
from server.sim_fields import Fields
from server.sim_requests import ChatRequest, GenerateRequest, check_model, parse_chat
from server.sim_settings import EngineSettings

Messages = list[dict[str, Any]]

_NO_STORE = (
    "This vLLM engine does not support `store=True` and therefore does not support the background mode. To enable these "
    "features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM server."
)
_TOOL_FIELDS = ("name", "parameters", "strict", "type", "allowed_callers", "async", "defer_loading", "description")
# Fields that mean the same to both APIs.
_SHARED = (
    *("model", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "stop_token_ids"),
    *("ignore_eos", "cache_salt", "include_stop_str_in_output", "chat_template_kwargs", "include_reasoning", "stream"),
    *("structured_outputs",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    chat: ChatRequest
    id: str  # of the answer
    echoed: Mapping[str, Any]  # what the answer repeats of the request
    messages: Messages  # the conversation up to the answer, for the store
    stores: bool
    in_background: bool

    @property
    def generate(self) -> GenerateRequest:
        return self.chat.generate


def parse_responses(body: Mapping[str, Any], settings: EngineSettings, recall: Callable[[str], Messages]) -> ResponsesRequest:
    """A request of POST /v1/responses. `recall` gives the conversation of a stored response or raises ApiError.

    Raises:
        ApiError: with status and message as vLLM words them.
    """
    fields = Fields(body)
    stores, background = fields.flag("store", default=True), fields.flag("background")
    previous_id, response_id = fields.text("previous_response_id"), fields.text("request_id")
    if background and not stores:
        raise ApiError.bad_value("background can only be used when `store` is true", param="background")
    if fields.has("prompt"):
        raise ApiError.bad_value("prompt template is not supported", param="prompt")
    choice = _tool_choice(fields)
    given = _input_items(fields)
    limit = fields.integer("max_output_tokens")
    check_model(fields, settings)
    if background and not settings.responses_store:
        raise ApiError(400, "invalid_request_error", _NO_STORE, param="background")
    messages: Messages = []
    if instructions := fields.text("instructions"):
        messages.append({"role": "system", "content": instructions})
    if previous_id is not None:
        messages += [message for message in recall(previous_id) if message["role"] != "system"]
    for item in given:
        _append(messages, item)
    continues = bool(given) and _is_partial(given[-1])
    chat = {name: fields.raw(name) for name in _SHARED} | {
        "messages": messages,
        "max_tokens": limit,
        "response_format": _response_format(fields),
        "reasoning_effort": fields.mapping("reasoning").get("effort"),
        "continue_final_message": continues,
        "add_generation_prompt": not continues,
    }
    if functions := [_chat_tool(tool) for tool in fields.items("tools") if _kind(tool) == "function"]:
        chat |= {"tools": functions, "tool_choice": _chat_choice(choice)}
    if "message.output_text.logprobs" in fields.items("include"):
        chat |= {"logprobs": True, "top_logprobs": fields.integer("top_logprobs", 0)}
    request = parse_chat(chat, settings, limit_name="max_output_tokens")
    return ResponsesRequest(
        chat=request,
        id=response_id or f"resp_{uuid.uuid4().hex[:16]}",
        echoed=_echoed(fields, request, choice),
        messages=messages,
        stores=stores and settings.responses_store,
        in_background=background,
    )


def _kind(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else None


def _input_items(fields: Fields) -> list[Any]:
    given = fields.raw("input")
    if given is None:
        raise fields.invalid("input", "missing", "Field required")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    items = fields.items("input")
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise ApiError.invalid_body("dict_type", f"body.input.{index}", "Input should be a valid dictionary", item)
    return items


def _append(messages: Messages, item: dict[str, Any]) -> None:
    """Adds an input item; calls and texts that follow one another are one message of the assistant."""
    kind = item.get("type", "message")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    match kind:
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if last is None:
                messages.append({"role": "assistant", "tool_calls": [call]})
            else:
                last.setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
            messages.append(output)
        case "reasoning":
            if last is None:
                messages.append({"role": "assistant"})
        case "message" if item.get("role") == "assistant":
            content = item.get("content")
            text = content if isinstance(content, str) else next((part.get("text") for part in content or ()), None)
            if last is not None and last.get("content") is None:
                last["content"] = text
            else:
                messages.append({"role": "assistant", "content": text})
        case "message" if "role" in item:
            messages.append(dict(item))
        case _:
            raise ApiError.bad_value(f"Unsupported input item type: {kind}", param="input")


def _is_partial(item: Mapping[str, Any]) -> bool:
    """Whether the answer goes on with this message instead of beginning a new one."""
    return item.get("type", "message") in ("message", "reasoning") and item.get("status") in ("in_progress", "incomplete")


def _response_format(fields: Fields) -> dict[str, Any] | None:
    wanted = fields.mapping("text").get("format") or {}
    if wanted.get("type") != "json_schema":
        return wanted or None
    return {"type": "json_schema", "json_schema": {"name": wanted.get("name"), "schema": wanted.get("schema")}}


def _tool_choice(fields: Fields) -> Any:
    """tool_choice as vLLM keeps it: `none` where there are no tools."""
    choice = fields.raw("tool_choice") or "auto"
    tools = fields.items("tools")
    if isinstance(choice, dict):
        if choice.get("name") not in [tool.get("name") for tool in tools if isinstance(tool, dict)]:
            raise ApiError.bad_value("Tool choice 'function' not found in 'tools' parameter.", param="tool_choice")
        return choice
    if not tools and choice == "required":
        raise ApiError.bad_value("Tool choice 'required' must be specified with 'tools' parameter.", param="tool_choice")
    return choice if tools else "none"


def _chat_choice(choice: Any) -> Any:
    return choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice["name"]}}


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _echoed(fields: Fields, request: ChatRequest, choice: Any) -> dict[str, Any]:
    sampling = request.generate.sequences[0].sampling
    tools: Sequence[Mapping[str, Any]] = fields.items("tools")
    reasoning, text = fields.mapping("reasoning"), fields.mapping("text")
    return {
        "instructions": fields.text("instructions"),
        "metadata": fields.raw("metadata"),
        "parallel_tool_calls": fields.flag("parallel_tool_calls", default=True),
        "temperature": fields.number("temperature", 1.0),
        "tool_choice": choice,
        "tools": [{name: tool.get(name) for name in (*_TOOL_FIELDS, "output_schema")} for tool in tools],
        "top_p": fields.number("top_p", 1.0),
        "background": fields.flag("background"),
        "max_output_tokens": sampling.max_tokens,
        "max_tool_calls": fields.integer("max_tool_calls"),
        "previous_response_id": fields.text("previous_response_id"),
        "reasoning": _filled(reasoning, ("context", "effort", "generate_summary", "mode", "summary")),
        "service_tier": fields.text("service_tier") or "auto",
        "text": None if not text else {"format": _format(text.get("format")), "verbosity": text.get("verbosity")},
        "top_logprobs": sampling.top_logprobs,
        "truncation": fields.text("truncation") or "disabled",
        "user": fields.text("user"),
        "presence_penalty": fields.number("presence_penalty", 0.0),
        "frequency_penalty": fields.number("frequency_penalty", 0.0),
    }


def _format(value: Any) -> Any:
    is_schema = _kind(value) == "json_schema"
    return _filled(value, ("name", "schema", "type", "description", "strict")) if is_schema else value


def _filled(value: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any] | None:
    """All of the object's fields, null where they are absent; None where the object is."""
    return {name: value.get(name) for name in names} if value else None
