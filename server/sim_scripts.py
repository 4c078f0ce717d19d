"""What response_format and tools make the simulated model say: JSON from a schema, a function's arguments."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from server.sim_errors import ApiError
from server.sim_fields import Fields
from server.sim_generation import Script
from server.sim_json import NOTHING_SAID, Said, minimal_instance, what_is_said
from server.sim_text import encode, message_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """The answer calls this function."""

    name: str
    script: Script
    forced: bool  # by tool_choice: the message's content is then empty, not null
    named: bool  # by tool_choice: the finish reason then stays `stop`


def response_script(fields: Fields, messages: Sequence[Mapping[str, Any]] = ()) -> Script | None:
    """What response_format makes the model say. A JSON object without a schema gets the keys that were asked for in quotes."""
    response_format = fields.mapping("response_format")
    kind = response_format.get("type", "text")
    if kind == "text":
        return None
    said = _last_said(messages)
    keys = said.quotes or ("answer",)
    any_object = {"type": "object", "properties": {key: {"type": "string"} for key in keys}}
    match kind:
        case "json_object":
            return _json_script(any_object, NOTHING_SAID)
        case "json_schema":
            wrapper = response_format.get("json_schema")
            if not isinstance(wrapper, dict):
                message = "When response_format type is 'json_schema', the 'json_schema' field must be provided."
                raise ApiError.bad_value(message, param="response_format")
            return _json_script(wrapper.get("schema") or any_object, said)
        case _:
            raise ApiError.bad_value(f"response_format {kind!r} is not simulated", param="response_format")


def _last_said(messages: Sequence[Mapping[str, Any]]) -> Said:
    """What the last message of a user names."""
    asked = next((message for message in reversed(messages) if message["role"] == "user"), None)
    return NOTHING_SAID if asked is None else what_is_said(message_text(asked))


def _json_script(schema: Mapping[str, Any], said: Said) -> Script:
    def write(rng: random.Random) -> list[int]:
        return encode(msgspec.json.encode(minimal_instance(schema, rng, said)).decode())

    try:
        write(random.Random(0))
    except (ValueError, TypeError, AttributeError) as error:
        raise ApiError.bad_value(f"The JSON schema cannot be used: {error}") from error
    return write


def tool_plan(fields: Fields, tools: Sequence[Any], messages: Sequence[Mapping[str, Any]]) -> ToolPlan | None:
    """The function that the answer calls: the named one, else the first; `auto` answers a tool's result with text."""
    choice = fields.raw("tool_choice")
    if fields.raw("tools") == []:
        message = "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely."
        raise ApiError.bad_value(message, param="tools")
    functions: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError.invalid_body("missing", f"body.tools.{index}.function.name", "Field required", tool)
        functions[function["name"]] = function
    if choice == "none" or (choice is None and not functions):
        return None
    if not functions:
        raise ApiError.bad_value("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    said = _last_said(messages)
    if isinstance(choice, dict):
        name = choice.get("function", {}).get("name") if isinstance(choice.get("function"), dict) else None
        if name not in functions:
            message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
            raise ApiError.bad_value(message, param="tool_choice")
        return _call(functions[name], said, forced=True, named=True)
    if choice not in (None, "auto", "required"):
        message = f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or "required" are supported.'
        raise ApiError.bad_value(message, param="tool_choice")
    if choice != "required" and messages and messages[-1]["role"] == "tool":
        return None
    return _call(next(iter(functions.values())), said, forced=choice == "required", named=False)


def _call(function: Mapping[str, Any], said: Said, *, forced: bool, named: bool) -> ToolPlan:
    schema = function.get("parameters") or {"type": "object"}
    return ToolPlan(name=function["name"], script=_json_script(schema, said), forced=forced, named=named)
