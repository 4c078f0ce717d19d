"""Undoes the coding of a request's body, within limits."""

import asyncio
import zlib

from router.exchange import Rejection
from router.outcome import Outcome

GZIP = b"gzip"
_GZIP_WINDOW_BITS = 31  # zlib's way to say that a gzip header is expected


async def plain_body(body: bytes, coding: bytes | None, bytes_max: int) -> bytes:
    """`coding` is the content-encoding, gzip or none (others are refused at the head). Raises Rejection (400, 413)."""
    if coding is None or coding.strip().lower() != GZIP:
        return body
    try:
        # In a thread: 32 MiB take a tenth of a second, in which no stream would go on.
        return await asyncio.to_thread(_gunzip, body, bytes_max)
    except zlib.error as error:
        message = f"The body of the request is not valid gzip: {error}; send the JSON as it is or compress it anew."
        raise Rejection(400, message, Outcome.REJECTED_INVALID) from None


def _gunzip(body: bytes, bytes_max: int) -> bytes:
    decompressor = zlib.decompressobj(_GZIP_WINDOW_BITS)
    plain = decompressor.decompress(body, bytes_max)
    if decompressor.unconsumed_tail:
        message = f"The body of the request is longer than {bytes_max} bytes when decompressed, the most that is accepted here."
        raise Rejection(413, message, Outcome.REJECTED_INVALID, code="request_too_large")
    if not decompressor.eof:
        raise zlib.error("it ends too early")
    return plain
