"""Bodies of the Anthropic Messages API, turned into chat bodies the way vLLM 0.32 turns them.

What vLLM's own model refuses before the handler runs is a framework error here too; the rest is refused by the chat parser.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from server.sim_errors import ApiError
from server.sim_fields import Fields
from server.sim_requests import ChatRequest, GenerateRequest, chat_messages, chat_prompt, parse_chat
from server.sim_settings import EngineSettings

_BILLING_HEADER = "x-anthropic-billing-header"  # a line of Claude Code's that would defeat the prefix cache
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BLOCK_KINDS = frozenset(
    {"text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking"}
    | {"tool_addition", "tool_removal"}
)
# Fields that mean the same to both APIs.
_SHARED = ("model", "temperature", "top_p", "top_k", "cache_salt", "chat_template_kwargs", "kv_transfer_params")


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    chat: ChatRequest

    @property
    def generate(self) -> GenerateRequest:
        return self.chat.generate


def parse_messages(body: Mapping[str, Any], settings: EngineSettings) -> MessagesRequest:
    """A request of POST /v1/messages.

    Raises:
        ApiError: with status and message as vLLM words them.
    """
    fields = Fields(body)
    chat = _chat_body(fields)
    limit = fields.integer("max_tokens")
    if limit is None:
        raise fields.invalid("max_tokens", "missing", "Field required")
    if limit <= 0:
        raise fields.invalid("max_tokens", "value_error", "Value error, max_tokens must be positive")
    if fields.flag("stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    stop = fields.items("stop_sequences")
    chat |= {"max_completion_tokens": limit, "stop": stop or None, **_output(fields)}
    return MessagesRequest(parse_chat(chat, settings))


def count_message_tokens(body: Mapping[str, Any]) -> int:
    """How long the prompt of POST /v1/messages/count_tokens is.

    Raises:
        ApiError: as for a request.
    """
    chat = Fields(_chat_body(Fields(body)))
    prompt, _ = chat_prompt(chat, chat_messages(chat), chat.items("tools"))
    return len(prompt.tokens)


def _chat_body(fields: Fields) -> dict[str, Any]:
    """What request and count have in common: the conversation and its tools."""
    if not fields.text("model"):
        raise fields.invalid("model", "missing", "Field required")
    if fields.raw("messages") is None:
        raise fields.invalid("messages", "missing", "Field required")
    messages = _system(fields)
    for index, message in enumerate(fields.items("messages")):
        messages += _message(message, f"body.messages.{index}")
    chat = {name: fields.raw(name) for name in _SHARED} | {"messages": messages}
    if tools := [_tool(tool, f"body.tools.{index}") for index, tool in enumerate(fields.items("tools"))]:
        chat["tools"] = tools
    choice = fields.mapping("tool_choice")
    match choice.get("type"):
        case None:
            pass
        case "tool":
            chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
        case kind if kind in _TOOL_CHOICES:
            chat["tool_choice"] = _TOOL_CHOICES[kind]
        case _:
            raise fields.invalid("tool_choice", "literal_error", "Input should be 'auto', 'any', 'tool' or 'none'")
    return chat


def _output(fields: Fields) -> dict[str, Any]:
    """What output_config and thinking become."""
    chat: dict[str, Any] = {}
    config = fields.mapping("output_config")
    wanted = config.get("format") or {}
    if schema := wanted.get("schema"):
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}}
    if config.get("effort") is not None:
        chat["reasoning_effort"] = config["effort"]
    if fields.mapping("thinking").get("type") == "disabled":
        chat["reasoning_effort"] = "none"
    return chat


def _system(fields: Fields) -> list[dict[str, Any]]:
    system = fields.raw("system")
    if system is not None and not isinstance(system, (str, list)):
        raise fields.invalid("system", "string_type", "Input should be a valid string")
    text = _plain_text(system or "")
    return [{"role": "system", "content": text}] if text else []


def _plain_text(content: str | Sequence[Any]) -> str:
    texts = [content] if isinstance(content, str) else [block.get("text") or "" for block in content if isinstance(block, dict)]
    return "".join(text for text in texts if not text.startswith(_BILLING_HEADER))


def _message(message: Any, path: str) -> list[dict[str, Any]]:
    """The chat messages of one message: a tool's results become messages of their own, before the rest."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise ApiError.invalid_body("literal_error", f"{path}.role", "Input should be 'user', 'assistant' or 'system'", message)
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise ApiError.invalid_body("string_type", f"{path}.content", "Input should be a valid string", content)
    for index, block in enumerate(content):
        if not isinstance(block, dict) or block.get("type") not in _BLOCK_KINDS:
            where = f"{path}.content.{index}.type"
            raise ApiError.invalid_body("literal_error", where, "Input should be a known type of content block", block)
    if role == "system":
        text = _plain_text(content)
        return [{"role": role, "content": text}] if text else []
    texts = [block["text"] for block in content if block["type"] == "text" and block.get("text")]
    if any(block["type"] == "image" for block in content):
        raise ApiError.bad_value("At most 0 image(s) may be provided in one prompt.")
    results = [_tool_result(block) for block in content if block["type"] == "tool_result"]
    calls = [_tool_call(block) for block in content if block["type"] == "tool_use"]
    own: dict[str, Any] = {"role": role}
    if texts:
        own["content"] = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    if calls:
        own["tool_calls"] = calls
    return results if role == "user" and not texts else [*results, own]


def _tool_call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.get("input") or {}).decode()
    return {"id": block.get("id"), "type": "function", "function": {"name": block.get("name"), "arguments": arguments}}


def _tool_result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part.get("text", "") for part in content if part.get("type") == "text")
    return {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": content}


def _tool(tool: Any, path: str) -> dict[str, Any]:
    for name, kind in (("name", str), ("input_schema", dict)):
        value = tool.get(name) if isinstance(tool, dict) else None
        if not isinstance(value, kind):
            raise ApiError.invalid_body("missing", f"{path}.{name}", "Field required", tool)
    function = {"name": tool["name"], "description": tool.get("description")}
    return {"type": "function", "function": function | {"parameters": {"type": "object"} | tool["input_schema"]}}
