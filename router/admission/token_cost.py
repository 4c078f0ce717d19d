"""What a request costs its tenant, in tokens: uncached prompt tokens, and output tokens counted twice.

The weights are those of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): an output token takes a decode
step, many prompt tokens share a prefill step. Cached tokens are free: the engine does not compute them.
"""

from protocol.usage import Usage
from router.policy.interface import PlacementRequest, Ticket
from router.policy.targets import PredictedTicket

OUTPUT_WEIGHT = 2.0
# The longest context that models commonly have. A longer body is mostly no text (an image in base64), or its engine refuses it:
# counted in full, it would be a backlog of minutes that nobody ever computes.
PROMPT_TOKENS_MAX = 131_072


class EstimatedCost:
    """Before the request has run: its prompt's bytes, and as much output as requests have on average, or its limit if less."""

    __slots__ = ("bytes_per_token", "output_tokens")

    def __init__(self, bytes_per_token: float = 4.0, output_tokens: float = 256.0) -> None:
        """Raises ValueError unless both are above 0. Either may be set later, as it is learned."""
        for name, value in (("bytes_per_token", bytes_per_token), ("output_tokens", output_tokens)):
            if not 0.0 < value < float("inf"):
                raise ValueError(f"{name} is {value}; it must be above 0, e.g. 4")
        self.bytes_per_token = bytes_per_token
        self.output_tokens = output_tokens

    def __call__(self, request: PlacementRequest) -> float:
        output = self.output_tokens
        if request.output_max is not None and request.output_max < output:
            output = max(request.output_max, 0)
        return min(request.prompt.size / self.bytes_per_token, PROMPT_TOKENS_MAX) + OUTPUT_WEIGHT * output


def used(usage: Usage) -> float:
    """After it has run. Where the engine does not say what was cached, nothing was."""
    return max(usage.prompt - (usage.cached or 0), 0) + OUTPUT_WEIGHT * usage.completion


def charge_of(ticket: Ticket, estimate: float) -> float:
    """What a placed request is charged until it ends: what its policy expects to be computed, where it expects something."""
    if isinstance(ticket, PredictedTicket):
        return ticket.uncached + OUTPUT_WEIGHT * ticket.output
    return estimate
