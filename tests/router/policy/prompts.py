"""Prompts for tests: texts of which the beginning says what they share."""

from router.policy.prompt import FINE_BYTES, BytesPrompt


def text(name: str, chunks: float) -> bytes:
    """`chunks` times 256 bytes that only this name has."""
    line = f"{name}|".encode()
    size = int(chunks * FINE_BYTES)
    return (line * (size // len(line) + 1))[:size]


def prompt(*parts: bytes, scope: int = 0) -> BytesPrompt:
    return BytesPrompt(b"".join(parts), scope)
