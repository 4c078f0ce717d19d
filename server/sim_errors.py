"""Error answers of the simulated engine in vLLM's shape: {"error": {"message", "type", "param", "code": int}}."""

import re
from http import HTTPStatus

import msgspec

# vLLM hides paths in its messages the same way (entrypoints/serve/exception_handling/utils.py).
_PATH = re.compile(r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.\-]+)+|(?:/[\w\-]+)+/[\w\-]+\.\w+")


class ApiError(Exception):
    """A request that ends with an HTTP error. `kind` is vLLM's `type`."""

    def __init__(self, status: int, kind: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param

    @classmethod
    def bad_value(cls, message: str, *, param: str | None = None, value: object = None) -> "ApiError":
        """A value that makes no sense; the message ends as vLLM's validation errors do."""
        extras = [f"{name}={given}" for name, given in (("parameter", param), ("value", value)) if given is not None]
        return cls(400, "BadRequestError", f"{message} ({', '.join(extras)})" if extras else message, param=param)

    @classmethod
    def invalid_body(cls, kind: str, path: str, message: str, value: object) -> "ApiError":
        """A body of the wrong form, worded like one validation error of vLLM's request model."""
        shown = f"<{type(value).__name__} of {len(value)} items>" if isinstance(value, (list, dict)) else value
        detail = {"type": kind, "loc": path, "msg": message, "input": shown}
        return cls(400, HTTPStatus.BAD_REQUEST.phrase, f"1 validation error:\n  {detail}", param=path)

    @classmethod
    def http(cls, status: int, message: str) -> "ApiError":
        """An HTTPException of one of vLLM's development routes."""
        return cls(status, HTTPStatus(status).phrase, message)

    @classmethod
    def unknown_model(cls, model: str, served: tuple[str, ...]) -> "ApiError":
        message = f"The model `{model}` does not exist. Valid aliases: {', '.join(served)}."
        return cls(404, "NotFoundError", message, param="model")

    @classmethod
    def unknown_response(cls, response_id: str) -> "ApiError":
        message = f"Response with id '{response_id}' not found."
        return cls(404, "invalid_request_error", message, param="response_id")

    @classmethod
    def internal(cls, message: str) -> "ApiError":
        return cls(500, "InternalServerError", message)

    def body(self) -> bytes:
        return msgspec.json.encode(self.as_dict())

    def as_anthropic(self) -> bytes:
        """The body that vLLM's Messages API gives where its handler fails; the framework's errors keep `body`'s shape."""
        error = {"type": self.kind, "message": self._shown_message()}
        return msgspec.json.encode({"type": "error", "error": error})

    @property
    def is_frameworks(self) -> bool:
        """Whether the body was refused before a handler saw it."""
        return self.kind == HTTPStatus.BAD_REQUEST.phrase

    def as_dict(self) -> dict[str, dict[str, str | int | None]]:
        return {"error": {"message": self._shown_message(), "type": self.kind, "param": self.param, "code": self.status}}

    def _shown_message(self) -> str:
        return _PATH.sub("<path>", self.message).strip()


def scripted_error(status: int, message: str | None) -> ApiError:
    """The error vLLM itself would give with this status."""
    match status:
        case 400:
            kind = "BadRequestError"
        case 404:
            kind = "NotFoundError"
        case 500:
            kind = "InternalServerError"
        case _:
            known = {code.value: code.phrase for code in HTTPStatus}
            kind = known.get(status, "InternalServerError")
    return ApiError(status, kind, message or f"scripted fault with status {status}")
