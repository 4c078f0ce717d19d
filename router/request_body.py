"""Reads a request's body from its client, within limits."""

import asyncio
from dataclasses import dataclass

from router.exchange import ClientGone, Headers, Receive, Rejection
from router.outcome import Outcome

# A body up to this many times too long is read to its end and thrown away before it is refused.
DISCARD_FACTOR = 2


@dataclass(frozen=True, slots=True)
class BodyLimits:
    bytes_max: int
    timeout_s: float  # from the request's head to the last byte of its body


async def read_body(headers: Headers, receive: Receive, limits: BodyLimits) -> bytes:
    """Raises Rejection (408, 413, 415) and ClientGone."""
    for name, value in headers:
        if name == b"content-encoding" and value.lower() != b"identity":
            raise Rejection(
                415, "Compressed request bodies are not accepted; send the JSON as it is.", Outcome.REJECTED_INVALID
            )
        if name == b"content-length" and int(value) > DISCARD_FACTOR * limits.bytes_max:
            raise _too_large(limits)
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
    size = 0
    while (message := await receive())["type"] == "http.request":
        body: bytes = message["body"]
        is_last = not message.get("more_body", False)
        size += len(body)
        if size > limits.bytes_max:
            # Refused while it still sends, a client sees a broken connection and not the reason, so a little more is read.
            parts.clear()
            if is_last or size > DISCARD_FACTOR * limits.bytes_max:
                raise _too_large(limits)
        elif is_last:
            return bytes(parts + body) if parts else body
        else:
            parts += body
    raise ClientGone


def _too_large(limits: BodyLimits) -> Rejection:
    return Rejection(
        413,
        f"The body of the request is longer than {limits.bytes_max} bytes, the most that is accepted here.",
        Outcome.REJECTED_INVALID,
        code="request_too_large",
    )
