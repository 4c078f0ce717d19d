"""How a request ended. Every request ends in exactly one outcome; it is the metric's label and the log's field."""

import enum


class Outcome(enum.StrEnum):
    COMPLETED = "completed"  # the engine's whole answer reached the client
    ENGINE_REFUSED = "engine_refused"  # the engine answered 4xx: the request's fault, never the replica's
    ENGINE_ERROR = "engine_error"  # the engine answered 5xx
    REJECTED_UNAUTHORIZED = "rejected_unauthorized"
    REJECTED_INVALID = "rejected_invalid"  # malformed, too large, unknown model or path
    REJECTED_NO_REPLICA = "rejected_no_replica"  # nothing that serves the model is up
    UPSTREAM_UNREACHABLE = "upstream_unreachable"  # no replica accepted it, within the attempts allowed
    UPSTREAM_TIMEOUT = "upstream_timeout"
    UPSTREAM_BROKEN = "upstream_broken"  # the replica died after its first byte
    CLIENT_GONE = "client_gone"
    SHUTDOWN = "shutdown"  # cut because the router's drain time was over
    ROUTER_ERROR = "router_error"  # a fault of ours
