"""What a client saw of one request. Pure."""

from dataclasses import dataclass, field
from enum import StrEnum

from loadtests.soak.answers import Said
from loadtests.soak.requests import Asked

# Beyond it a body is an engine's that never ends.
BODY_BYTES_MAX = 2 * 1024 * 1024


class Manner(StrEnum):
    """How a client behaves."""

    READS = "reads"
    LEAVES_AT_ONCE = "leaves at once"  # RST right behind the request
    LEAVES_BEFORE_ANSWER = "leaves before the answer"
    LEAVES_INSIDE = "leaves inside the answer"
    LEAVES_AFTER = "leaves after the answer"
    HALF_CLOSES = "half-closes"  # FIN behind the request, then waits: gone, by contract
    READS_SLOWLY = "reads slowly"
    SENDS_SLOWLY = "sends slowly"
    HTTP10 = "speaks HTTP/1.0"
    PIPELINES = "pipelines"
    PIPELINES_AND_LEAVES = "pipelines and leaves"
    SPEAKS_NO_HTTP = "speaks no HTTP"


class Ending(StrEnum):
    WHOLE = "whole"  # a status below 300 and all of the answer
    REFUSED = "refused"  # an error status with its body
    ERROR_EVENT = "error event"  # a stream that says it failed, and is broken off
    BROKEN = "broken"  # a status, then the connection ended inside the answer without a word
    NO_ANSWER = "no answer"  # the connection ended before a status
    LEFT = "left"  # the client's own doing
    CUT_OFF = "cut off"  # pipelined behind an answer that ended the connection
    HUNG = "hung"  # neither an answer nor an end within the bound


@dataclass(slots=True)
class View:
    request_id: str
    asked: Asked
    manner: Manner
    ending: Ending = Ending.NO_ANSWER
    status: int = 0
    seconds: float = 0.0
    body: bytes = b""  # of an answer that is no stream, up to BODY_BYTES_MAX
    said: Said | None = None
    continuations: int = 0
    faults: list[str] = field(default_factory=list)  # what no answer may be
    note: str = ""
    is_withdrawn: bool = False  # left in a way that can hide the request from the router: RST, or behind an unanswered one
