"""A name under which clients see the model, other than the one the engine serves it by."""

import msgspec


class ModelAlias:
    """Translates `model` in requests and answers. Built only where an alias is configured: it costs a parse of each body."""

    def __init__(self, public: str, engine: str) -> None:
        self._engine = engine
        # The engine writes compact JSON. Inside a JSON string a quote is escaped, so this can only be the field itself.
        self._field_engine = b'"model":' + msgspec.json.encode(engine)
        self._field_public = b'"model":' + msgspec.json.encode(public)

    def request(self, body: bytes) -> bytes:
        """The body with the engine's name for the model. `body` is a JSON object."""
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        fields["model"] = msgspec.Raw(msgspec.json.encode(self._engine))
        return msgspec.json.encode(fields)

    def answer(self, data: bytes) -> bytes:
        """A whole JSON answer, or whole events of a stream, with the public name."""
        return data.replace(self._field_engine, self._field_public)


class EventAssembler:
    """Renames the model in a stream, holding back an event until it is whole, so that nothing renamed is split in two."""

    def __init__(self, alias: ModelAlias) -> None:
        self._alias = alias
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """All events that are complete now."""
        whole, separator, self._rest = (self._rest + data).rpartition(b"\n\n")
        return self._alias.answer(whole + separator)

    def finish(self) -> bytes:
        """What is left of an unfinished event."""
        rest, self._rest = self._rest, b""
        return rest
