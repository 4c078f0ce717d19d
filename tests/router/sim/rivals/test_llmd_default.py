"""llm-d's default profile is a weighted sum of queue, KV usage and prefix."""

import pytest

from router.policy.interface import EngineLoad
from router.sim.rivals.llmd_default import PRECISE, PRIME_RL, LlmdDefault, LlmdDefaultSettings
from tests.router.sim.rivals.shapes import TARGETS, A, B, C, chain, chosen, put, request, rng


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # queue: 0, 0.5, 1; kv: 0.2, 0.5, 1 (never scraped); prefix: 8 of 16 blocks of 64 tokens on a; active: 0, 1, 1
        (LlmdDefaultSettings(), [0 + 0.4 + 1.5, 1 + 1 + 0, 2 + 2 + 0]),
        (LlmdDefaultSettings(queue_weight=1, kv_weight=0, prefix_weight=8), [0 + 4, 0.5, 1]),
        (PRIME_RL, [0 + 1.5, 2, 2]),
        # 512 matched tokens: 0.5 * (512 / 8192)^2 + 0.5 * 0.5
        (LlmdDefaultSettings(long_match_share=0.5), [0.4 + 3 * (0.5 * 0.00390625 + 0.25), 2, 4]),
    ],
)
def test_the_score_is_the_weighted_sum(settings: LlmdDefaultSettings, expected: list[float]) -> None:
    """Three replicas, worked out by hand."""
    policy = LlmdDefault(rng(), settings)
    put(policy, A, request(chain(1, 32)))
    policy.scraped(A, EngineLoad(running=9, waiting=4, kv_usage=0.8), 0.0)
    policy.scraped(B, EngineLoad(running=9, waiting=2, kv_usage=0.5), 0.0)
    assert policy.scores(request(chain(1, 64)), TARGETS, 0.0) == pytest.approx(expected)


def test_equal_queues_all_score_one() -> None:
    """Without a difference the queue decides nothing."""
    policy = LlmdDefault(rng(), LlmdDefaultSettings())
    for replica, _ in TARGETS:
        policy.scraped(replica, EngineLoad(running=0, waiting=7, kv_usage=1.0), 0.0)
    assert policy.scores(request(), TARGETS, 0.0) == [2.0, 2.0, 2.0]


def test_the_approximate_index_counts_whole_blocks_of_64_tokens() -> None:
    """Seven engine blocks of 16 tokens are one block and a rest."""
    policy = LlmdDefault(rng(), LlmdDefaultSettings(queue_weight=0, kv_weight=0))
    put(policy, B, request(chain(1, 7)))
    assert policy.scores(request(chain(1, 8)), TARGETS, 0.0) == [0.0, 1.5, 0.0]


def test_the_approximate_index_forgets_the_least_recently_routed() -> None:
    """With room for two blocks, the ends of older prompts go first."""
    policy = LlmdDefault(rng(), LlmdDefaultSettings(queue_weight=0, kv_weight=0, lru_blocks=2))
    put(policy, A, request(chain(1, 8)), now=0.0)
    put(policy, A, request(chain(2, 4)), now=1.0)
    assert policy.scores(request(chain(1, 8)), TARGETS, 1.0)[0] == 1.5
    assert policy.scores(request(chain(2, 4)), TARGETS, 1.0)[0] == 3.0


def test_the_precise_index_believes_only_events() -> None:
    """What was routed counts for nothing until the engine says that it is stored, unless speculation is on."""
    for speculative_ttl_s, routed in ((0.0, 0.0), (2.0, 3.0)):
        policy = LlmdDefault(
            rng(), LlmdDefaultSettings(queue_weight=0, kv_weight=0, precise=True, speculative_ttl_s=speculative_ttl_s)
        )
        put(policy, A, request(chain(1, 8)))
        policy.stored(B, 0, chain(1, 2), 0.0)
        assert policy.scores(request(chain(1, 8)), TARGETS, 1.0) == [routed, 0.75, 0.0]
        assert policy.scores(request(chain(1, 8)), TARGETS, 2.0)[0] == 0.0


def test_a_restart_is_noticed_only_by_events() -> None:
    """The approximate index goes on believing in a cache that is gone, the precise one does not."""
    approximate, precise = LlmdDefault(rng(), LlmdDefaultSettings()), LlmdDefault(rng(), PRECISE)
    for policy in (approximate, precise):
        put(policy, B, request(chain(1, 8)))
        policy.stored(B, 0, chain(1, 8), 0.0)
        assert chosen(policy, request(chain(1, 8))) == B
        policy.restarted(B)
    assert chosen(approximate, request(chain(1, 8))) == B
    assert {chosen(precise, request(chain(1, 8))) for _ in range(60)} == {A, B, C}
