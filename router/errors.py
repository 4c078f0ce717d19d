"""What can go wrong between the router and an engine. Socket and parser errors are turned into these at the edge."""


class UpstreamError(Exception):
    """The message says what happened to the connection; it never goes to a client."""


class UnreachableError(UpstreamError):
    """No connection could be made: the engine has seen nothing of the request."""


class NoAnswerError(UpstreamError):
    """The connection ended before the first byte of an answer: nothing has reached the client."""


class BrokenAnswerError(UpstreamError):
    """The answer ended early or was not HTTP. Part of it may have reached the client."""


class UpstreamTimeoutError(UpstreamError):
    """The engine was silent for too long. The message says which of the limits it was."""


class LocalLimitError(UpstreamError):
    """No connection could be made for want of something of our own (file descriptors, ports): no replica's fault."""


class OtherWeightsError(UpstreamError):
    """The replica is sound but serves other weights than those with which the answer began."""


class StalledError(UpstreamError):
    """The engine answers its health probe but computes nothing; this request had no output yet, so it can be placed again."""
