"""Reads a request's body from its client, within limits."""

import asyncio
from dataclasses import dataclass

from router.exchange import ClientGone, Headers, Receive, Rejection
from router.outcome import Outcome


@dataclass(frozen=True, slots=True)
class BodyLimits:
    bytes_max: int
    timeout_s: float  # from the request's head to the last byte of its body


async def read_body(headers: Headers, receive: Receive, limits: BodyLimits) -> bytes:
    """Raises Rejection (408, 413, 415) and ClientGone."""
    for name, value in headers:
        if name == b"content-length" and int(value) > limits.bytes_max:
            raise _too_large(limits)
        if name == b"content-encoding" and value.lower() != b"identity":
            raise Rejection(
                415, "Compressed request bodies are not accepted; send the JSON as it is.", Outcome.REJECTED_INVALID
            )
    try:
        async with asyncio.timeout(limits.timeout_s):
            return await _collect(receive, limits)
    except TimeoutError:
        raise Rejection(
            408,
            f"The body of the request did not arrive within {limits.timeout_s:g} s.",
            Outcome.REJECTED_INVALID,
        ) from None


async def _collect(receive: Receive, limits: BodyLimits) -> bytes:
    parts = bytearray()
    while (message := await receive())["type"] == "http.request":
        body: bytes = message["body"]
        if len(parts) + len(body) > limits.bytes_max:
            raise _too_large(limits)
        if not message.get("more_body", False):
            return bytes(parts + body) if parts else body
        parts += body
    raise ClientGone


def _too_large(limits: BodyLimits) -> Rejection:
    return Rejection(
        413,
        f"The body of the request is longer than {limits.bytes_max} bytes, the most that is accepted here.",
        Outcome.REJECTED_INVALID,
        code="request_too_large",
    )
