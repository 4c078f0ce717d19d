"""Static API keys: who may use the public port."""

import hashlib
from collections.abc import Iterable, Mapping

UNAUTHORIZED_MESSAGE = (
    "Incorrect or missing API key. Send one that this service was started with in the header 'Authorization: Bearer KEY', "
    "or on Anthropic's routes in 'x-api-key: KEY'."
)


# Keys whose digest is remembered.
KNOWN_MAX = 4096


class StaticKeys:
    """Only digests are kept. Comparing digests, not keys, makes the time of a look-up tell nothing of a key."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = frozenset(hashlib.sha256(key.encode()).digest() for key in keys)

    def allows(self, headers: Mapping[bytes, bytes], *, takes_x_api_key: bool = False) -> bool:
        """`takes_x_api_key`: whether the key may stand there alone, as Anthropic's clients send it."""
        if not self._digests:
            return True
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hashlib.sha256(key.strip()).digest() in self._digests:
            return True
        return takes_x_api_key and hashlib.sha256(headers.get(b"x-api-key", b"").strip()).digest() in self._digests


class Tenants:
    """Who asks, as far as the key tells: eight bytes of its digest, in hexadecimal; empty without a key."""

    def __init__(self) -> None:
        # By Python's own hash of the key, which is keyed anew in each process, so that no key is kept.
        self._known: dict[int, str] = {}

    def of(self, headers: Mapping[bytes, bytes]) -> str:
        key = headers.get(b"authorization") or headers.get(b"x-api-key")
        if key is None:
            return ""
        tenant = self._known.get(hash(key))
        if tenant is None:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            tenant = self._known[hash(key)] = hashlib.sha256(key).hexdigest()[:16]
        return tenant
