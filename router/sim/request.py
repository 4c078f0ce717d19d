"""A request of the simulation: what a policy may know of it, and what only the engine and the oracle know."""

from collections.abc import Sequence

from router.policy.interface import PlacementRequest, Priority
from router.policy.prompt import Prompt


class SimRequest(PlacementRequest):
    """`blocks` (of PlacementRequest) are the chained hashes of the prompt's whole KV blocks, as the engines count them."""

    __slots__ = ("answer_blocks", "arrives_at", "id", "output_tokens", "prompt_tokens", "session", "ttft_target_s", "turn")

    def __init__(
        self,
        request_id: int,
        *,
        arrives_at: float,
        model: str,
        prompt: Prompt,
        prompt_tokens: int,
        output_tokens: int,
        blocks: Sequence[int],
        answer_blocks: Sequence[int],
        tenant: str = "",
        session: str = "",
        turn: int = 0,
        affinity: str | None = None,
        priority: Priority = Priority.DEFAULT,
        output_max: int | None = None,
        ttft_target_s: float = 2.0,
    ) -> None:
        super().__init__(
            model, prompt, tenant=tenant, affinity=affinity, priority=priority, output_max=output_max, blocks=blocks
        )
        self.id = request_id
        self.arrives_at = arrives_at  # virtual seconds
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens  # 1 or more; the engine generates exactly these
        # Chained hashes of the blocks that become full as the answer grows: those of prompt + answer behind `blocks`.
        self.answer_blocks = answer_blocks
        self.session = session
        self.turn = turn  # of its session, from 0
        self.ttft_target_s = ttft_target_s
