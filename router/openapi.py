"""Our OpenAPI 3.1 document: the routes of the public port, their bodies, answers and errors, as docs/behavior.md states them.

Streams are server-sent events, which OpenAPI 3.1 has no word for: the schema of their `data` stands in the extension
`x-event-schema` beside `text/event-stream`.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from router.openapi_schemas import SCHEMAS, Schema, reference

Operation = dict[str, Any]

_OPENAI_KEY: list[Schema] = [{}, {"bearer": []}]
_EITHER_KEY: list[Schema] = [*_OPENAI_KEY, {"apiKey": []}]

# What a route can answer besides 200. A status that no route below lists is an engine's own word, in the same shape.
_ALWAYS = {
    400: "Malformed, refused by the engine (`param` names the field), or a field that is not supported: code "
    "`unsupported_parameter`; without a model `missing_required_parameter`; too long for the model `context_length_exceeded`.",
    431: "The head of the request is longer than 64 KiB.",
}
_KEYED = {401: "A key is needed and was missing or wrong: code `invalid_api_key`."}
_NOT_FOUND = {404: "Nothing here has this id."}
_POSTED = {
    404: "Nothing here serves that model: code `model_not_found`.",
    408: "The body did not arrive in time.",
    413: "The body is longer than 32 MiB, as sent or decompressed: code `request_too_large`.",
    415: "The body is neither JSON nor gzipped JSON.",
}
_ENGINE = {
    429: "The engine's word: too much at once.",
    500: "A fault of the engine, or of the router.",
    502: "No replica could answer, or what it answered cannot be one: code `upstream_error`.",
    503: "No replica is up (code `no_replica`), or the router or the engine is overloaded.",
    504: "The engine was silent for too long before its first byte: code `upstream_timeout`.",
}
_HEAD_ONLY_ERRORS = frozenset({431})  # answered before the route is known, so in OpenAI's shape everywhere
_WITH_RETRY_AFTER = frozenset({429, 503})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Post:
    """A route that goes to an engine. `request` None: it takes no body. `event`: its answer may be a stream of these."""

    path: str
    id: str
    summary: str
    request: str | None
    answer: str
    event: str | None = None
    is_anthropic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Get:
    """A route that the router answers by itself, unless `from_engine`."""

    path: str
    id: str
    summary: str
    answer: str | None  # None: any JSON object
    is_public: bool = False
    finds_by_id: bool = False
    from_engine: bool = False


_POSTS = (
    _Post(
        path="/v1/chat/completions",
        id="createChatCompletion",
        summary="Answer a conversation",
        request="ChatCompletionRequest",
        answer="ChatCompletion",
        event="ChatCompletionChunk",
    ),
    _Post(
        path="/v1/completions",
        id="createCompletion",
        summary="Go on from a prompt",
        request="CompletionRequest",
        answer="Completion",
        event="CompletionChunk",
    ),
    _Post(
        path="/v1/responses",
        id="createResponse",
        summary="Answer by OpenAI's Responses API",
        request="ResponseRequest",
        answer="Response",
        event="ResponseEvent",
    ),
    _Post(
        path="/v1/responses/{response_id}/cancel",
        id="cancelResponse",
        summary="Stop a response that runs in the background",
        request=None,
        answer="Response",
    ),
    _Post(
        path="/v1/embeddings",
        id="createEmbedding",
        summary="Embed texts, where the model can",
        request="EmbeddingRequest",
        answer="EmbeddingList",
    ),
    _Post(
        path="/v1/messages",
        id="createMessage",
        summary="Answer by Anthropic's Messages API",
        request="MessageRequest",
        answer="Message",
        event="MessageEvent",
        is_anthropic=True,
    ),
    _Post(
        path="/v1/messages/count_tokens",
        id="countTokens",
        summary="Count the tokens of a conversation",
        request="CountTokensRequest",
        answer="TokenCount",
        is_anthropic=True,
    ),
    _Post(path="/tokenize", id="tokenize", summary="Text to token ids", request="TokenizeRequest", answer="Tokens"),
    _Post(path="/detokenize", id="detokenize", summary="Token ids to text", request="DetokenizeRequest", answer="Text"),
)
_GETS = (
    _Get(
        path="/v1/responses/{response_id}",
        id="retrieveResponse",
        summary="A response that the engine stored",
        answer="Response",
        finds_by_id=True,
        from_engine=True,
    ),
    _Get(path="/v1/models", id="listModels", summary="The models that replicas serve", answer="ModelList"),
    _Get(path="/v1/models/{model}", id="retrieveModel", summary="One model", answer="Model", finds_by_id=True),
    _Get(path="/health", id="health", summary="The router runs", answer="Status", is_public=True),
    _Get(path="/ready", id="ready", summary="A request could be placed now", answer="Readiness", is_public=True),
    _Get(path="/openapi.json", id="openapi", summary="This document", answer=None),
)
_PARAMETERS = {
    "{response_id}": ("response_id", "The `id` of a response."),
    "{model}": ("model", "A model's id; a `/` in it may stand plain or as `%2F`."),
}


def document(version: str) -> bytes:
    """The document as JSON; `version` is that of this service."""
    paths: dict[str, dict[str, Operation]] = {}
    for post in _POSTS:
        paths.setdefault(post.path, {})["post"] = _post_operation(post)
    for get in _GETS:
        operations = paths.setdefault(get.path, {})
        operations["get"] = _get_operation(get)
        operations["head"] = _head_operation(operations["get"])
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "intellect-serve",
                "version": version,
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
                "description": "An OpenAI-compatible endpoint in front of vLLM replicas. Every other path is a 404 with code "
                "`unknown_url`, every other method a 405 with `Allow`.",
            },
            "security": _OPENAI_KEY,
            "paths": paths,
            "components": {"schemas": SCHEMAS, "securitySchemes": _SECURITY_SCHEMES, "headers": _HEADERS},
        }
    )


_SECURITY_SCHEMES: Schema = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "Needed where the router was started with keys."},
    "apiKey": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "The same key, as Anthropic's clients send it.",
    },
}
_REQUEST_ID: Schema = {
    "description": "The id of this request, also in the router's log.",
    "required": True,
    "schema": {"type": "string"},
}
_HEADERS: Schema = {
    "x-request-id": _REQUEST_ID,
    "request-id": _REQUEST_ID | {"description": "The same, where Anthropic's clients look for it."},
    "openai-processing-ms": {
        "description": "From the request's head to the first byte of the answer.",
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    },
    "x-intellect-checkpoint": {
        "description": "The weights that answered: `base`, then for example `v2+1`: version `v2`, after one swap.",
        "schema": {"type": "string"},
    },
    "retry-after": {
        "description": "Seconds, 1 to 60.",
        "required": True,
        "schema": {"type": "string", "pattern": "^([1-9]|[1-5][0-9]|60)$"},
    },
}


def _post_operation(route: _Post) -> Operation:
    description = "The answer."
    content: Schema = {"application/json": {"schema": reference(route.answer)}}
    if route.event is not None:
        content["text/event-stream"] = {"x-event-schema": reference(route.event)}
        description += " A failure after a stream's first byte is an event with an error, and the connection breaks off."
    answer = {
        "description": description,
        "headers": _headers(*_id_headers(route.is_anthropic), "openai-processing-ms", "x-intellect-checkpoint"),
        "content": content,
    }
    errors = _ALWAYS | _KEYED | _POSTED | _ENGINE | (_NOT_FOUND if route.request is None else {})
    operation: Operation = {
        "operationId": route.id,
        "summary": route.summary,
        "parameters": _parameters(route.path),
        "responses": {"200": answer, **_errors(errors, is_anthropic=route.is_anthropic)},
    }
    if route.request is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference(route.request)}}}
    if route.is_anthropic:
        operation["security"] = _EITHER_KEY
    return operation


def _get_operation(route: _Get) -> Operation:
    schema = {"type": "object"} if route.answer is None else reference(route.answer)
    responses: dict[str, Any] = {"200": _json_answer("The answer.", schema, "x-request-id")}
    if route.from_engine:
        responses |= _errors(_ENGINE)
    if route.path == "/ready":
        responses["503"] = _json_answer("Not now, and why for each replica.", schema, "x-request-id")
    errors = _ALWAYS | ({} if route.is_public else _KEYED) | (_NOT_FOUND if route.finds_by_id else {})
    operation: Operation = {
        "operationId": route.id,
        "summary": route.summary,
        "parameters": _parameters(route.path),
        "responses": responses | _errors(errors),
    }
    if route.is_public:
        operation["security"] = []
    return operation


def _head_operation(get: Operation) -> Operation:
    """The same without bodies."""
    responses = {
        status: {name: value for name, value in response.items() if name != "content"}
        for status, response in get["responses"].items()
    }
    return get | {"operationId": f"{get['operationId']}Head", "responses": responses}


def _errors(statuses: dict[int, str], *, is_anthropic: bool = False) -> dict[str, Any]:
    errors = {}
    for status, description in sorted(statuses.items()):
        shaped_for_anthropic = is_anthropic and status not in _HEAD_ONLY_ERRORS
        names = _id_headers(shaped_for_anthropic) + (["retry-after"] if status in _WITH_RETRY_AFTER else [])
        shape = "MessageError" if shaped_for_anthropic else "Error"
        errors[str(status)] = _json_answer(description, reference(shape), *names)
    return errors


def _json_answer(description: str, schema: Schema, *header_names: str) -> Schema:
    return {
        "description": description,
        "headers": _headers(*header_names),
        "content": {"application/json": {"schema": schema}},
    }


def _id_headers(is_anthropic: bool) -> list[str]:
    return ["x-request-id", "request-id"] if is_anthropic else ["x-request-id"]


def _headers(*header_names: str) -> Schema:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in header_names}


def _parameters(path: str) -> list[Schema]:
    return [
        {"name": name, "in": "path", "required": True, "description": description, "schema": {"type": "string", "minLength": 1}}
        for marker, (name, description) in _PARAMETERS.items()
        if marker in path
    ]
