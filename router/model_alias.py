"""A name under which clients see the model, other than the one the engine serves it by."""

import msgspec


class ModelAlias:
    """Puts the public name into answers; requests are rewritten in `request.fields`. Only built where an alias is needed."""

    def __init__(self, public: str, engine: str) -> None:
        # The engine writes compact JSON. Inside a JSON string a quote is escaped, so this can only be the field itself.
        self._field_engine = b'"model":' + msgspec.json.encode(engine)
        self._field_public = b'"model":' + msgspec.json.encode(public)

    def answer(self, data: bytes) -> bytes:
        """A whole JSON answer, or whole events of a stream, with the public name."""
        return data.replace(self._field_engine, self._field_public)
