"""How long one step of a simulated engine takes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """A fixed part, prefill by tokens, decode by sequences and by the KV they read. Seconds and tokens."""

    base_s: float
    prefill_tokens_per_s: float
    per_sequence_s: float  # of each decoding sequence
    per_context_token_s: float  # of each token of KV that the decoding sequences read
    # Attention over what comes before: prefilling n tokens behind c others costs this times n * (2 * c + n). It is the `q` of
    # a prefill time that grows with q * prompt^2.
    per_attended_pair_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("base_s", "per_sequence_s", "per_context_token_s", "per_attended_pair_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be 0 or more")
        if not self.prefill_tokens_per_s > 0:
            raise ValueError(f"prefill_tokens_per_s is {self.prefill_tokens_per_s}, but must be above 0")
        if self.base_s + self.per_sequence_s + self.per_context_token_s == 0:
            raise ValueError("base_s, per_sequence_s and per_context_token_s are all 0, but a decode step must take time")

    def seconds(self, *, prefill_tokens: int, attended_pairs: int, sequences: int, context_tokens: int) -> float:
        """Duration of a step that prefills `prefill_tokens` and decodes `sequences` over `context_tokens` of KV."""
        return (
            self.base_s
            + prefill_tokens / self.prefill_tokens_per_s
            + attended_pairs * self.per_attended_pair_s
            + sequences * self.per_sequence_s
            + context_tokens * self.per_context_token_s
        )


# One H200 with a 106 B mixture of experts (12 B active) in FP8: 24 GFLOP a token at about 400 TFLOP/s; 3 ms to read the
# weights that are always active plus launch and sampling; 188 kB of KV a token at 4.8 TB/s.
H200_GLM = StepTiming(base_s=0.008, prefill_tokens_per_s=16_000.0, per_sequence_s=80e-6, per_context_token_s=40e-9)

# The decode step fitted for program scheduling of agents (step s = 0.0106 + 0.000419 batch + 1.42e-7 context tokens) with the
# peak prefill rate of the machines of llm-d's published prefix-cache ladders.
LLMD_LADDER = StepTiming(base_s=0.0106, prefill_tokens_per_s=16_000.0, per_sequence_s=419e-6, per_context_token_s=1.42e-7)
