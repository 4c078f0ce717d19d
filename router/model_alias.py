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


class StreamRenamer:
    """Renames the model in a stream, holding a line back until it is whole, so that no name is split in two.

    A line longer than LINE_BYTES_MAX is passed on in parts; a name that is cut just there stays as the engine wrote it.
    """

    LINE_BYTES_MAX = 1024 * 1024

    def __init__(self, alias: ModelAlias) -> None:
        self._alias = alias
        self._rest = bytearray()

    def feed(self, data: bytes) -> bytes:
        """All lines that are complete now."""
        whole, separator, rest = data.rpartition(b"\n")
        if not separator:
            self._rest += rest
            return self.finish() if len(self._rest) > self.LINE_BYTES_MAX else b""
        lines = bytes(self._rest) + whole + separator
        self._rest = bytearray(rest)
        return self._alias.answer(lines)

    def finish(self) -> bytes:
        """What is left of an unfinished line."""
        rest, self._rest = bytes(self._rest), bytearray()
        return self._alias.answer(rest)
