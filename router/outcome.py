"""How a request ended, and what became of a stream that broke off: closed sets of words for metrics and the log."""

import enum


class Outcome(enum.StrEnum):
    """Every request ends in exactly one; it is the metric's label and the log's field."""

    COMPLETED = "completed"  # the engine's whole answer reached the client
    ENGINE_REFUSED = "engine_refused"  # the engine answered 4xx: the request's fault, never the replica's
    ENGINE_ERROR = "engine_error"  # the engine answered 5xx
    REJECTED_UNAUTHORIZED = "rejected_unauthorized"
    REJECTED_INVALID = "rejected_invalid"  # malformed, too large, unknown model or path
    REJECTED_NO_REPLICA = "rejected_no_replica"  # nothing that serves the model is up
    REJECTED_OVERLOADED = "rejected_overloaded"  # it would have waited, or has waited, too long for a replica
    UPSTREAM_UNREACHABLE = "upstream_unreachable"  # no replica accepted it, within the attempts allowed
    UPSTREAM_TIMEOUT = "upstream_timeout"
    UPSTREAM_BROKEN = "upstream_broken"  # the replica died after its first byte
    CLIENT_GONE = "client_gone"
    SHUTDOWN = "shutdown"  # cut because the router's drain time was over
    ROUTER_ERROR = "router_error"  # a fault of ours


class ContinuationOutcome(enum.StrEnum):
    """What became of a stream whose replica failed in the middle; all but the first two say why it ended there."""

    CONTINUED = "continued"
    ONLY_THE_END = "only_the_end"  # all but the end was sent, so the router sent that
    # The service as it is.
    OFF = "off"
    NO_REPLICA = "no_replica"  # no other with the same weights is ready, or has answered
    TOO_OFTEN = "too_often"
    ENGINE_REFUSED = "engine_refused"  # the next engine answered with an error
    # What was asked for: everything whose meaning depends on where an answer began would change silently at the seam.
    SURFACE = "surface"  # no stream of chat or text completions
    SEVERAL_CHOICES = "several_choices"
    LOGPROBS = "logprobs"
    SEED = "seed"
    PENALTIES = "penalties"  # also bad words and repetition detection: all look back over the answer's own tokens
    LOGIT_BIAS = "logit_bias"
    TOOLS = "tools"  # also: a tool call was sent
    GRAMMAR = "grammar"
    ECHO = "echo"
    MIN_TOKENS = "min_tokens"
    PROMPT_FORM = "prompt_form"  # nothing can be appended to a prompt of this form
    TOKEN_IDS = "token_ids"  # ids are needed and not all are known, or they say more than the text
    REASONING = "reasoning"  # it was sent, or hidden
    # What was sent.
    HALF_STOP = "half_stop"  # the text ends with the beginning of a stop string
    TRAILING_SPACE = "trailing_space"  # chat templates may strip it, and the model would write it again
    UNREADABLE = "unreadable"
