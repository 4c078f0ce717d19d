"""Prompts for tests: texts of which the beginning says what they share."""

from router.policy.prompt import BytesPrompt

# Bytes: about 64 tokens.
UNIT = 256


def text(name: str, units: float, *, unit: int = UNIT) -> bytes:
    """`units` times 256 bytes that only this name has."""
    line = f"{name}|".encode()
    size = int(units * unit)
    return (line * (size // len(line) + 1))[:size]


def prompt(*parts: bytes, scope: int = 0) -> BytesPrompt:
    return BytesPrompt(b"".join(parts), scope)
