"""llm-d's newest recipe stays with the cache unless that costs too much time."""

import pytest

from router.sim.rivals.llmd_token_load import LlmdTokenLoad, LlmdTokenLoadSettings
from tests.router.sim.rivals.shapes import A, B, C, chain, chosen, put, request, rng

SLOW = LlmdTokenLoadSettings(prefill_tokens_per_s=100.0, max_ttft_penalty_s=2.0)


@pytest.mark.parametrize(
    ("queued_on_a", "queued_on_b", "expected"),
    [
        (200, 0, A),  # 2 s more than the best of the others: not above the limit
        (208, 0, C),  # 2.08 s
        (208, 16, C),
    ],
)
def test_stickiness_ends_where_the_penalty_exceeds_the_limit(queued_on_a: int, queued_on_b: int, expected: str) -> None:
    """Tokens in flight over the calibrated rate are the time to the first token."""
    policy = LlmdTokenLoad(rng(), SLOW)
    (warm,) = put(policy, A, request(chain(1, 20)))
    policy.first_token(warm, 0.0)
    put(policy, A, request(chain(2, queued_on_a // 16), tokens=queued_on_a))
    put(policy, B, request(chain(3, (queued_on_b + 15) // 16 + 1), tokens=queued_on_b + 17))
    assert chosen(policy, request(chain(1, 20))) == expected


@pytest.mark.parametrize(("held", "expected"), [(16, B), (12, A)])
def test_a_replica_is_sticky_from_the_threshold_on(held: int, expected: str) -> None:
    """16 of 20 blocks are 0.8; 12 of 20 are not enough, and the load decides."""
    policy = LlmdTokenLoad(rng(), LlmdTokenLoadSettings())
    put(policy, B, request(chain(1, held)))
    put(policy, C, request(chain(2, 50)))
    assert chosen(policy, request(chain(1, 20))) == expected


def test_cached_tokens_are_no_load_and_the_first_token_releases_the_rest() -> None:
    """Of two sticky replicas the one with fewer uncached tokens before their first token wins."""
    policy = LlmdTokenLoad(rng(), LlmdTokenLoadSettings())
    first = put(policy, A, request(chain(1, 20))) + put(policy, B, request(chain(1, 20)))
    for ticket in first:
        policy.first_token(ticket, 0.0)
    put(policy, A, request(chain(1, 20)))  # cached but for nothing
    (queued,) = put(policy, B, request(chain(2, 10)))
    assert chosen(policy, request(chain(1, 20))) == A
    policy.first_token(queued, 1.0)
    put(policy, A, request(chain(3, 1)))
    assert chosen(policy, request(chain(1, 20))) == B


def test_without_a_limit_it_always_stays() -> None:
    """A limit of 0 turns the gate off."""
    policy = LlmdTokenLoad(rng(), LlmdTokenLoadSettings(max_ttft_penalty_s=0.0))
    put(policy, B, request(chain(1, 20)), request(chain(2, 100_000 // 16)))
    assert chosen(policy, request(chain(1, 20))) == B


def test_the_precise_variant_knows_only_what_engines_report() -> None:
    """Routing alone makes no replica sticky."""
    policy = LlmdTokenLoad(rng(), LlmdTokenLoadSettings(precise=True))
    put(policy, A, request(chain(1, 20)))
    policy.stored(B, 0, chain(1, 20), 0.0)
    put(policy, B, request(chain(2, 10)))
    assert chosen(policy, request(chain(1, 20))) == B
    policy.evicted(B, 0, chain(1, 20)[10:], 0.0)
    assert chosen(policy, request(chain(1, 20))) == C
