"""Ids of requests: unique over all routers in front of the same engines, and not to be guessed."""

import os
from collections.abc import Callable

ID_BYTES = 16
# One read of the system's randomness for so many ids.
_BATCH = 256


class Ids:
    """128 random bits in hexadecimal each. Not by a cheaper generator: who knows the id of a stored response can read it."""

    __slots__ = ("_at", "_random_bytes", "_stock")

    def __init__(self, random_bytes: Callable[[int], bytes] = os.urandom) -> None:
        self._random_bytes = random_bytes
        self._stock = b""
        self._at = 0

    def __call__(self) -> str:
        at = self._at
        if at >= len(self._stock):
            self._stock, at = self._random_bytes(ID_BYTES * _BATCH), 0
        self._at = at + ID_BYTES
        return self._stock[at : at + ID_BYTES].hex()
