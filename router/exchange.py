"""One request while it runs: what is known of it, and the ways in which it can end early."""

import time
from dataclasses import dataclass, field

from protocol import headers as names
from protocol.errors import ErrorDetail, error_type
from protocol.openai import Surface
from protocol.usage import Usage
from router.outcome import Outcome
from router.policy.interface import PlacementRequest, Ticket
from router.state.replicas import Replica

_REQUEST_ID_CHARACTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
_REQUEST_ID_BYTES_MAX = 128


class Rejection(Exception):
    """The request ends here with an error, as a status if nothing was sent yet, else as an event."""

    def __init__(
        self,
        status: int,
        message: str,
        outcome: Outcome,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: bytes | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.outcome = outcome
        self.detail = ErrorDetail(message=message, type=error_type(status), param=param, code=code)
        self.retry_after = retry_after  # the engine's word, if it had one


class ClientGone(Exception):
    """The client closed its connection; nobody is there to answer."""


def no_replica(message: str) -> Rejection:
    return Rejection(503, message, Outcome.REJECTED_NO_REPLICA, code="no_replica")


def unreachable() -> Rejection:
    return Rejection(502, "No replica could answer; try again.", Outcome.UPSTREAM_UNREACHABLE, code="upstream_error")


@dataclass(slots=True)
class Exchange:
    """Owned by the proxy for the time of one request; read for its metric and its log line when it ends."""

    surface: Surface
    route: str  # the surface's path, or the pattern of a path with an id: a label
    request_id: str  # as the client sees it
    engine_request_id: str  # never the client's own: engines key requests by it
    started: float  # time.perf_counter
    tenant: str = ""  # whose request it is: a digest of the key; empty for anonymous ones
    model: str = ""
    replica: str = ""
    checkpoint: str = ""
    status: int = 0
    attempts: int = 0
    continuations: int = 0
    first_byte_s: float | None = None
    request_bytes: int = 0
    response_bytes: int = 0
    events: int = 0  # of a stream whose events are numbered
    usage: Usage | None = None
    error: str = ""
    placement: PlacementRequest | None = None  # once it is understood
    ticket: Ticket | None = None  # of the last attempt
    waited_s: float = 0.0  # in the router, for a replica that could start it
    placed_at: float = 0.0  # the last time; time.perf_counter
    tried: list[Replica] = field(default_factory=list)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started


def client_request_id(headers: dict[bytes, bytes]) -> str | None:
    """The client's own x-request-id, to be echoed, if it is one that can be: short and of harmless characters."""
    value = headers.get(names.REQUEST_ID)
    if value is not None and 0 < len(value) <= _REQUEST_ID_BYTES_MAX and _REQUEST_ID_CHARACTERS.issuperset(value):
        return value.decode()
    return None
