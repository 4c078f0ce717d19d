"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, all four keys always present.

`type` and `code` are strings or null as in OpenAI's specification; vLLM puts the HTTP status into `code` and its own class
names into `type`, so what an engine answers passes through `read_error` before a client sees it. On Anthropic's routes the
same error is worded in Anthropic's shape.
"""

import re

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


_CONTEXT_OVERFLOW = re.compile(r"maximum context length|max_model_len|longer than the maximum model length")


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_type(status: int) -> str:
    """OpenAI's `type` for an HTTP status."""
    match status:
        case 401 | 403:
            return "authentication_error" if status == 401 else "permission_error"
        case 404:
            return "invalid_request_error"
        case 429:
            return "rate_limit_error"
        case _ if status < 500:
            return "invalid_request_error"
        case _:
            return "server_error"


def encode_error(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """The JSON body of an error answer with this HTTP status."""
    return encode_detail(ErrorDetail(message=message, type=error_type(status), param=param, code=code))


def encode_detail(detail: ErrorDetail) -> bytes:
    return msgspec.json.encode(ErrorBody(error=detail))


def encode_anthropic_error(status: int, message: str, request_id: str) -> bytes:
    """The JSON body of an error answer in Anthropic's shape: {"type": "error", "error": {"type", "message"}, "request_id"}."""
    error = {"type": _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error"), "message": message}
    return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})


def read_error(status: int, body: bytes) -> ErrorDetail:
    """Whatever an engine answered with an error status, in OpenAI's words.

    vLLM answers in several shapes: its own error object (integer `code`, its class names as `type`), a bare string under
    `error` (authentication, scaling), FastAPI's `detail`, Anthropic's, and plain text. `status` is the answer's HTTP status.
    """
    message, param, code = _read(body)
    if code is None and status == 404 and param == "model":
        code = "model_not_found"
    if code is None and status == 400 and _CONTEXT_OVERFLOW.search(message):
        code = "context_length_exceeded"
    message = message or f"The engine answered with status {status}."
    return ErrorDetail(message=message, type=error_type(status), param=param, code=code)


def _read(body: bytes) -> tuple[str, str | None, str | None]:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:500].decode("utf-8", "replace").strip(), None, None
    if not isinstance(value, dict):
        return "", None, None
    error = value.get("error", value.get("detail", value))
    if isinstance(error, str):
        return error, None, None
    if not isinstance(error, dict):
        return "", None, None
    message, param, code = error.get("message"), error.get("param"), error.get("code")
    return (
        message if isinstance(message, str) else "",
        param.removeprefix("body.") if isinstance(param, str) else None,  # vLLM names the path, OpenAI the field
        code if isinstance(code, str) else None,
    )
