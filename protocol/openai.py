"""What a router needs to know of an OpenAI request: a few fields, read without building the rest."""

import msgspec


class RequestPeek(msgspec.Struct, frozen=True):
    """The fields of a chat or completion request that routing needs. Everything else passes through unread."""

    model: str | None = None


class InvalidRequestError(ValueError):
    """The body is not a request. `param` names the field at fault, if there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def peek(body: bytes) -> RequestPeek:
    """Raises InvalidRequestError for a body that is not a JSON object or has a field of the wrong type."""
    try:
        return msgspec.json.decode(body, type=RequestPeek)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(*_explain(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"We could not parse the JSON body of your request: {error}.") from error
    except RecursionError as error:
        raise InvalidRequestError("The JSON body of your request is nested too deeply.") from error


def _explain(message: str) -> tuple[str, str | None]:
    """From msgspec's "Expected `str`, got `int` - at `$.model`" to a sentence and the field's name."""
    what, _, where = message.partition(" - at `$.")
    param = where.rstrip("`") or None
    if param is None:
        return f"The body of your request must be a JSON object ({what}).", None
    return f"Invalid value for '{param}': {what}.", param
