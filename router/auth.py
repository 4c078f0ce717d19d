"""Static API keys: who may use the public port."""

import hashlib
from collections.abc import Iterable

UNAUTHORIZED_MESSAGE = (
    "Incorrect or missing API key. Send one that this service was started with in the header 'Authorization: Bearer KEY'."
)


class StaticKeys:
    """Only digests are kept. Comparing digests, not keys, makes the time of a look-up tell nothing of a key."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = frozenset(hashlib.sha256(key.encode()).digest() for key in keys)

    def allows(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        if not self._digests:
            return True
        for name, value in headers:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                return scheme.lower() == b"bearer" and hashlib.sha256(key.strip()).digest() in self._digests
        return False
