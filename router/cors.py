"""Which pages in a browser may read the answers (Fetch standard, CORS protocol)."""

from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]

PREFLIGHT_SECONDS = 600


class Cors:
    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)

    def headers(self, request_headers: Iterable[tuple[bytes, bytes]]) -> Headers:
        """What every answer to this request carries, errors included. Empty where no origin is configured."""
        if not self._origins:
            return []
        origin = next((value for name, value in request_headers if name == b"origin"), None)
        if origin is None or not (b"*" in self._origins or origin in self._origins):
            return [(b"vary", b"Origin")]
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", b"x-request-id, retry-after, x-intellect-checkpoint, openai-processing-ms"),
            (b"vary", b"Origin"),
        ]

    def preflight(self, request_headers: Iterable[tuple[bytes, bytes]], methods: str) -> Headers | None:
        """Headers of the answer to a preflight, or None if this request is none or its origin is not allowed."""
        request_headers = list(request_headers)
        by_name = dict(request_headers)
        answer = self.headers(request_headers)
        if b"access-control-request-method" not in by_name or len(answer) < 2:
            return None
        asked = by_name.get(b"access-control-request-headers", b"authorization, content-type")
        return [
            *answer,
            (b"access-control-allow-methods", methods.encode()),
            (b"access-control-allow-headers", asked),
            (b"access-control-max-age", b"%d" % PREFLIGHT_SECONDS),
        ]
