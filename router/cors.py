"""Which pages in a browser may read the answers (Fetch standard, CORS protocol)."""

from collections.abc import Iterable, Mapping

PREFLIGHT_SECONDS = 600
_EXPOSED = b"access-control-expose-headers: x-request-id, retry-after, x-intellect-checkpoint, openai-processing-ms\r\n"
_VARY = b"vary: Origin\r\n"


class Cors:
    """Answers are header lines, each with its line end."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)

    def lines(self, headers: Mapping[bytes, bytes]) -> bytes:
        """What every answer to a request with these headers carries, errors included. Empty where no origin is configured."""
        if not self._origins:
            return b""
        origin = headers.get(b"origin")
        if origin is None or not self._allows(origin):
            return _VARY
        return b"access-control-allow-origin: %b\r\n" % origin + _EXPOSED + _VARY

    def preflight(self, headers: Mapping[bytes, bytes], methods: str) -> bytes | None:
        """Lines of the answer to a preflight, or None if this request is none or its origin is not allowed."""
        origin = headers.get(b"origin")
        if b"access-control-request-method" not in headers or origin is None or not self._allows(origin):
            return None
        asked = headers.get(b"access-control-request-headers", b"authorization, content-type")
        answer = b"access-control-allow-methods: %b\r\naccess-control-allow-headers: %b\r\naccess-control-max-age: %d\r\n"
        return self.lines(headers) + answer % (methods.encode(), asked, PREFLIGHT_SECONDS)

    def _allows(self, origin: bytes) -> bool:
        return b"*" in self._origins or origin in self._origins
