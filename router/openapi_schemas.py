"""What the public port takes and gives, as JSON schemas (OpenAPI 3.1): the `components.schemas` of our OpenAPI document.

Requests name the fields that we know and allow others, since engines have more; a field that is refused has the type null,
because null counts as absent. Answers state what a client can rely on; engines add to them.
"""

from collections.abc import Iterable
from typing import Any

Schema = dict[str, Any]

_MAX_N = 128
_MAX_BAD_WORDS = 128
# Refused by name: what only an operator may set, what would be ignored, and what is not generated here.
_OPERATORS_ONLY = (
    "allowed_token_ids",
    "cache_salt",
    "chat_template",
    "ec_transfer_params",
    "kv_transfer_params",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "priority",
    "prompt_embeds",
    "request_id",
    "vllm_xargs",
)
_GUIDED = tuple(f"guided_{what}" for what in ("choice", "decoding_backend", "grammar", "json", "regex", "whitespace_pattern"))
_NOT_GENERATED = ("audio", "function_call", "functions", "web_search_options")

_STRING: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}}
_ARRAY_OF_OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}


def reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _may_be(*types: str, **limits: Any) -> Schema:
    """One of the types, or null."""
    return {"type": [*types, "null"], **limits}


def _object(required: str = "", /, **properties: Schema) -> Schema:
    """An object with these properties and any others; `required` are names with spaces between them."""
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": True}
    return schema | ({"required": required.split()} if required else {})


def _const(value: str) -> Schema:
    return {"type": "string", "const": value}


def _array(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _some(item: Schema) -> Schema:
    """At least one of them, and no more than vLLM takes at once."""
    return {"type": "array", "items": item, "minItems": 1, "maxItems": 1024}


def _refused(names: Iterable[str]) -> dict[str, Schema]:
    return {name: {"type": "null", "description": "Refused."} for name in names}


_RESPONSE_FORMATS: Schema = {"enum": ["text", "json_object", "json_schema", "structural_tag"]}
_COMMON: dict[str, Schema] = {
    "model": {"type": "string", "description": "As GET /v1/models lists it."},
    "chat_template_kwargs": _may_be("object", properties={"chat_template": {"type": "null"}}),
    **_refused(_OPERATORS_ONLY),
}
_GENERATING: dict[str, Schema] = _COMMON | {
    "stream": _may_be("boolean"),
    "temperature": _may_be("number", minimum=0, maximum=2),
    "top_p": _may_be("number", exclusiveMinimum=0, maximum=1),
    "metadata": _may_be("object", description="No effect."),
    "user": _may_be("string", description="No effect."),
    **_refused(_GUIDED),
}
_SAMPLING: dict[str, Schema] = _GENERATING | {
    "stream_options": _may_be("object", description="Only with `stream`.", properties={"include_usage": _may_be("boolean")}),
    "max_tokens": _may_be("integer", minimum=0),
    "n": _may_be("integer", minimum=1, maximum=_MAX_N),
    "stop": _may_be("string", "array", minLength=1, items={"type": "string", "minLength": 1}, maxItems=4),
    "seed": _may_be("integer", minimum=-(2**63), maximum=2**63 - 1),
    "presence_penalty": _may_be("number", minimum=-2, maximum=2),
    "frequency_penalty": _may_be("number", minimum=-2, maximum=2),
    "logit_bias": _may_be("object", additionalProperties={"type": "number"}),
    "top_k": _may_be("integer"),
    "min_p": _may_be("number", minimum=0, maximum=1),
    "repetition_penalty": _may_be("number", exclusiveMinimum=0),
    "min_tokens": _may_be("integer", minimum=0),
    "ignore_eos": _may_be("boolean"),
    "stop_token_ids": _may_be("array", items=_TOKENS["items"]),
    "bad_words": _may_be("array", items=_STRING, maxItems=_MAX_BAD_WORDS),
    "return_token_ids": _may_be("boolean"),
    "response_format": _may_be("object", properties={"type": _RESPONSE_FORMATS}, required=["type"]),
    "structured_outputs": _may_be("object"),
    "modalities": {"enum": [["text"], None]},
    "verbosity": {"enum": ["medium", None]},
    **_refused(_NOT_GENERATED),
}
_CHAT_ONLY: dict[str, Schema] = {
    "messages": _array(reference("ChatMessage")),
    "max_completion_tokens": _may_be("integer", minimum=0, description="Wins over `max_tokens`."),
    "logprobs": _may_be("boolean"),
    "top_logprobs": _may_be("integer", minimum=0, maximum=20),
    "tools": _may_be("array", items=reference("FunctionTool"), minItems=1),
    "tool_choice": _may_be("string", "object", description="none, auto, required, or one function by its name."),
    "parallel_tool_calls": _may_be("boolean"),
    "reasoning_effort": _may_be("string"),
    "store": {"enum": [False, None]},
    "prediction": _may_be("object", description="No effect."),
    "service_tier": _may_be("string", description="No effect."),
    "safety_identifier": _may_be("string", description="No effect."),
    "prompt_cache_key": _may_be("string", description="Requests with the same one are placed together where that pays."),
}
_TEXT: Schema = {"type": "string", "minLength": 1}
_SOME_TOKENS: Schema = _TOKENS | {"minItems": 1}
_PROMPT: Schema = {"anyOf": [_TEXT, _some(_TEXT), _SOME_TOKENS, _some(_SOME_TOKENS)]}

_REQUESTS: dict[str, Schema] = {
    "ChatCompletionRequest": _object("model messages", **_SAMPLING, **_CHAT_ONLY),
    "ChatMessage": _object(
        "role",
        role={"enum": ["system", "developer", "user", "assistant", "tool"]},
        content=_may_be("string", "array", items=reference("ContentPart")),
        name=_STRING,
        tool_calls=_may_be("array", items=reference("ToolCall")),
        tool_call_id=_STRING,
    ),
    "ContentPart": _object("type", type=_STRING, text=_STRING)
    | {"description": "Text, or what else the model takes; media stand in `data:` URLs, since the engine fetches nothing."},
    "ToolCall": _object(
        "id type function",
        id=_STRING,
        type=_const("function"),
        function=_object("name arguments", name=_STRING, arguments=_STRING),
    ),
    "FunctionTool": _object(
        "type function",
        type=_const("function"),
        function=_object("name", name=_STRING, description=_may_be("string"), parameters=_may_be("object")),
    ),
    "CompletionRequest": _object(
        "model prompt",
        **_SAMPLING,
        prompt=_PROMPT,
        echo=_may_be("boolean"),
        logprobs=_may_be("integer", minimum=0, maximum=20),
        best_of=_may_be("integer", minimum=1, maximum=_MAX_N),
        suffix=_may_be("string"),
    ),
    "ResponseRequest": _object(
        "model input",
        **_GENERATING,
        input={"anyOf": [_STRING, _ARRAY_OF_OBJECTS]},
        instructions=_may_be("string"),
        max_output_tokens=_may_be("integer", minimum=1),
        tools=_may_be("array", items={"type": "object"}),
        tool_choice=_may_be("string", "object"),
        text=_may_be("object"),
        reasoning=_may_be("object"),
        store=_may_be("boolean", description="Has an effect only where the engine stores answers."),
        **_refused(["conversation"]),
    ),
    "EmbeddingRequest": _object(
        "model input",
        **_COMMON,
        input=_PROMPT,
        encoding_format=_may_be("string", enum=["float", "base64", None]),
        dimensions=_may_be("integer", minimum=1),
        user=_GENERATING["user"],
    ),
    "CountTokensRequest": _object(
        "model messages",
        **_COMMON,
        messages=_array(
            _object(
                "role content",
                role={"enum": ["user", "assistant", "system"]},
                content={"anyOf": [_STRING, _ARRAY_OF_OBJECTS]},
            )
        ),
        system={"anyOf": [_STRING, _ARRAY_OF_OBJECTS, {"type": "null"}]},
        tools=_may_be("array", items=_object("name input_schema", name=_STRING, input_schema={"type": "object"})),
        tool_choice=_may_be("object"),
        thinking=_may_be("object"),
    ),
    "MessageRequest": {
        "allOf": [
            reference("CountTokensRequest"),
            _object(
                "max_tokens",
                **_GENERATING,
                max_tokens={"type": "integer", "minimum": 1},
                stop_sequences=_may_be("array", items=_STRING, maxItems=4),
                top_k=_may_be("integer"),
            ),
        ]
    },
    "TokenizeRequest": _object(
        "model",
        **_COMMON,
        prompt=_STRING,
        messages=_array(reference("ChatMessage")),
        return_token_strs=_may_be("boolean"),
    )
    | {"anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}]},
    "DetokenizeRequest": _object("model tokens", **_COMMON, tokens=_TOKENS),
}

_USAGE = _may_be(
    "object",
    required=["prompt_tokens", "total_tokens"],
    properties={"prompt_tokens": _COUNT, "completion_tokens": _may_be("integer"), "total_tokens": _COUNT},
)
_FINISH_REASON = _may_be("string", description="stop, length, tool_calls, or an engine's own word.")
_COMPLETION_CHOICE = _object("index text finish_reason", index=_COUNT, text=_STRING, finish_reason=_FINISH_REASON)
_SEAM = _object(continuations={"type": "integer", "minimum": 1, "description": "How often another replica went on so far."})


def _openai_answer(kind: str, choice: Schema, required: str = "", **more: Schema) -> Schema:
    base = {"id": _STRING, "object": _const(kind), "created": _INTEGER, "model": _STRING, "choices": _array(choice)}
    return _object(f"id object created model choices {required}", **base, **more)


_ANSWERS: dict[str, Schema] = {
    "ChatCompletion": _openai_answer(
        "chat.completion",
        _object(
            "index message finish_reason",
            index=_COUNT,
            finish_reason=_FINISH_REASON,
            message=_object(
                "role content",
                role=_STRING,
                content=_may_be("string"),
                tool_calls=_may_be("array", items=reference("ToolCall")),
            ),
        ),
        "usage",
        usage=_USAGE,
    ),
    "ChatCompletionChunk": _openai_answer(
        "chat.completion.chunk",
        _object("index delta", index=_COUNT, delta={"type": "object"}, finish_reason=_FINISH_REASON),
        usage=_USAGE,
        intellect=_SEAM,
    ),
    "Completion": _openai_answer("text_completion", _COMPLETION_CHOICE, "usage", usage=_USAGE),
    "CompletionChunk": _openai_answer(
        "text_completion", _object("index text", index=_COUNT, text=_STRING), usage=_USAGE, intellect=_SEAM
    ),
    "Response": _object(
        "id object created_at model output status",
        id=_STRING,
        object=_const("response"),
        created_at=_INTEGER,
        model=_STRING,
        output=_array(_object("type", type=_STRING)),
        status=_STRING,
        usage=_may_be("object"),
    ),
    "ResponseEvent": _object("type", type=_STRING, sequence_number=_COUNT),
    "EmbeddingList": _object(
        "object data usage",
        object=_const("list"),
        data=_array(
            _object("index object embedding", index=_COUNT, object=_const("embedding"), embedding={"type": ["array", "string"]})
        ),
        model=_may_be("string"),
        usage=_USAGE,
    ),
    "Message": _object(
        "id type role content model stop_reason usage",
        id=_STRING,
        type=_const("message"),
        role=_const("assistant"),
        content=_array(_object("type", type=_STRING)),
        model=_STRING,
        stop_reason=_may_be("string"),
        usage=_object("input_tokens output_tokens", input_tokens=_COUNT, output_tokens=_COUNT),
    ),
    "MessageEvent": _object("type", type=_STRING),
    "TokenCount": _object("input_tokens", input_tokens=_COUNT),
    "Tokens": _object("count tokens max_model_len", count=_COUNT, tokens=_TOKENS, max_model_len=_COUNT),
    "Text": _object("prompt", prompt=_STRING),
    "Model": _object(
        "id object created owned_by",
        id=_STRING,
        object=_const("model"),
        created=_INTEGER,
        owned_by=_STRING,
        max_model_len=_COUNT,
    ),
    "ModelList": _object("object data", object=_const("list"), data=_array(reference("Model"))),
    "Status": _object("status", status=_STRING),
    "Readiness": _object("status", status=_STRING, replicas={"type": "object", "additionalProperties": _STRING}),
    "Error": {
        "type": "object",
        "required": ["error"],
        "additionalProperties": False,
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "additionalProperties": False,
                "properties": {"message": _STRING, "type": _STRING, "param": _may_be("string"), "code": _may_be("string")},
            }
        },
    },
    "MessageError": {
        "type": "object",
        "required": ["type", "error", "request_id"],
        "additionalProperties": False,
        "properties": {
            "type": _const("error"),
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "additionalProperties": False,
                "properties": {
                    "type": {
                        "enum": [
                            "invalid_request_error",
                            "authentication_error",
                            "permission_error",
                            "not_found_error",
                            "request_too_large",
                            "rate_limit_error",
                            "overloaded_error",
                            "timeout_error",
                            "api_error",
                        ]
                    },
                    "message": _STRING,
                },
            },
            "request_id": _STRING,
        },
    },
}

SCHEMAS: dict[str, Schema] = _REQUESTS | _ANSWERS
