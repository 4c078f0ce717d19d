"""What routers of one fleet tell each other of their placements, and how it is written: MessagePack arrays.

A batch is `[FORMAT, router, incarnation, seq, [message...]]`. Fields are only ever added at the end of a message, so routers of
neighbouring versions understand each other; anything else needs a new FORMAT.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

from protocol.usage import Usage
from router.policy.interface import Priority, Ticket

FORMAT = 1

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Malformed(Exception):
    """A payload that is no batch of ours. The message says what is wrong with it."""


class Placed(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A request was sent to a replica. `key` names it in the later messages of the same router."""

    key: int
    replica: str
    rank: Count
    model: str
    tenant: str
    size: Count  # bytes of the prompt
    chunks: tuple[int, ...]  # 64-bit hashes, see router.policy.prompt; none where the policy does not look at prompts
    digest: int  # hash of the whole prompt; 0 where the policy does not look at prompts
    affinity: str | None = None
    priority: Priority = Priority.DEFAULT
    output_max: Count | None = None
    streams: bool = True


class FirstToken(msgspec.Struct, frozen=True, array_like=True, tag=1):
    key: int


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The request has left its replica; token counts where the engine told them."""

    key: int
    prompt: Count | None = None
    completion: Count = 0
    cached: Count | None = None

    @property
    def usage(self) -> Usage | None:
        return None if self.prompt is None else Usage(self.prompt, self.completion, self.cached)


class Listed(NamedTuple):
    """One open placement in a snapshot, of which a router that has it already reads the key only."""

    key: int
    age_s: float  # since it was placed
    first_token_s: float | None  # from then to its first token, if that has come
    placed: msgspec.Raw


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """All placements that are open, oldest first. Sent every few seconds, so it is also the sign that its router lives."""

    open: tuple[Listed, ...]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The router has just begun to listen, and asks everyone for a snapshot."""


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The router stops. It says nothing after this."""


Message = Placed | FirstToken | Ended | Snapshot | Hello | Bye


class Header(NamedTuple):
    """The outside of a batch. `seq` grows by one with each batch of a router's `incarnation`, its start in Unix nanoseconds."""

    format: int
    router: str
    incarnation: int
    seq: int
    messages: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_headers = msgspec.msgpack.Decoder(Header)
_messages = msgspec.msgpack.Decoder(list[Message])
_placements = msgspec.msgpack.Decoder(Placed)


def placed(key: int, ticket: Ticket, *, with_prompt: bool) -> msgspec.Raw:
    """The message of a ticket, encoded: it is sent once by itself and again in each snapshot."""
    request = ticket.request
    prompt = request.prompt
    message = Placed(
        key,
        ticket.replica,
        ticket.rank,
        request.model,
        request.tenant,
        prompt.size,
        tuple(prompt.chunks) if with_prompt else (),
        prompt.digest(prompt.size) if with_prompt else 0,
        request.affinity,
        request.priority,
        request.output_max,
        request.streams,
    )
    return msgspec.Raw(_encoder.encode(message))


def encode_batch(router: str, incarnation: int, seq: int, messages: Sequence[Message | msgspec.Raw]) -> bytes:
    return _encoder.encode((FORMAT, router, incarnation, seq, messages))


def decode_header(payload: bytes) -> Header:
    """Raises Malformed."""
    try:
        header = _headers.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"not a batch: {error}") from error
    if header.format != FORMAT:
        raise Malformed(f"format {header.format}; this router understands {FORMAT}: run the same version everywhere")
    return header


def decode_messages(header: Header) -> list[Message]:
    """Raises Malformed."""
    try:
        return _messages.decode(header.messages)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"batch {header.seq} of {header.router!r}: {error}") from error


def decode_placed(listed: Listed) -> Placed:
    """Raises Malformed."""
    try:
        return _placements.decode(listed.placed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"placement {listed.key}: {error}") from error
