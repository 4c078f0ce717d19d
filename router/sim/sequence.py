"""One request inside a simulated engine."""

from router.sim.blocks import Node
from router.sim.request import SimRequest


class EngineSequence:
    """Its tokens, the blocks it holds, and what it has seen of waiting. Owned by one engine.

    While it decodes, `output` and `computed` are not kept up to date: the engine derives both from its step number.
    """

    __slots__ = (
        "admission",
        "attempt",
        "cached_tokens",
        "computed",
        "computed_offset",
        "copies",
        "finish_step",
        "first_token_at",
        "hashes",
        "in_tree",
        "is_aborted",
        "is_decoding",
        "joined_step",
        "last_token_at",
        "output",
        "preemptions",
        "request",
        "tip",
        "worst_gap_s",
    )

    def __init__(self, request: SimRequest, attempt: int = 1) -> None:
        self.request = request
        self.attempt = attempt
        self.hashes = [*request.blocks, *request.answer_blocks]
        self.output = 0  # tokens generated
        self.computed = 0  # tokens with KV
        self.tip: Node | None = None  # None while it holds no blocks
        self.in_tree = 0  # blocks of its own beginning that are in the prefix cache's tree, up to its tip
        self.copies = 0  # private blocks besides, where another sequence computed the same at the same time
        self.admission = 0  # counts admissions to the batch
        self.is_decoding = False
        self.joined_step = 0  # the step that gave the first token of this stretch of decoding
        self.finish_step = 0  # the step that will give the last
        self.computed_offset = 0  # computed tokens minus step number, while it decodes
        self.cached_tokens: int | None = None  # prompt tokens found in the cache when first admitted
        self.preemptions = 0
        self.is_aborted = False
        self.first_token_at: float | None = None
        self.last_token_at = 0.0  # up to date only when not decoding
        self.worst_gap_s = 0.0

    @property
    def tokens(self) -> int:
        """Prompt and answer so far, while it does not decode."""
        return self.request.prompt_tokens + self.output

    def __repr__(self) -> str:
        return f"<EngineSequence {self.request.id} computed={self.computed} output={self.output} decoding={self.is_decoding}>"
