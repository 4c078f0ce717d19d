"""`cache_aware` switches between the longest match and the least load as sglang's and vllm-router's do."""

import pytest

from router.sim.rivals.cache_aware import CacheAware, CacheAwareSettings, Fallback
from tests.router.sim.rivals.shapes import TARGETS, A, B, C, chain, chosen, put, request, rng

FEW = CacheAwareSettings(threshold=0.5, balance_abs=2, balance_rel=2.0)


@pytest.mark.parametrize(
    ("matched", "tokens", "expected"),
    [
        (6, 160, A),  # 96 of 160 tokens: 0.6
        (5, 160, C),  # exactly the threshold is too little: the least loaded
        (6, 190, A),  # 96 / 190 = 0.505
        (6, 200, C),  # 96 / 200 = 0.48
    ],
)
def test_the_longest_match_wins_from_the_threshold_on(matched: int, tokens: int, expected: str) -> None:
    """The matched share is of the prompt's true length, not of its whole blocks."""
    policy = CacheAware(rng(), FEW)
    put(policy, A, request(chain(1, matched)))
    put(policy, B, request(chain(2, 1)))
    blocks = chain(1, matched) + chain(9, tokens // 16 - matched)
    assert chosen(policy, request(blocks, tokens=tokens)) == expected


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ((2, 0, 1), A),  # 2 - 0 is not above balance_abs
        ((3, 0, 1), B),  # it is, and 3 > 2 * 0
        ((6, 3, 3), A),  # 6 - 3 is, but 6 is not above 2 * 3
        ((7, 3, 4), B),
    ],
)
def test_uneven_loads_discard_the_match(loads: tuple[int, int, int], expected: str) -> None:
    """Both the difference and the ratio must be too large."""
    policy = CacheAware(rng(), FEW)
    for (replica, _), load in zip(TARGETS, loads, strict=True):
        put(policy, replica, *[request(chain(1 if replica == A else 2, 10))] * load)
    assert chosen(policy, request(chain(1, 10))) == expected


def test_equal_matches_go_to_the_less_loaded() -> None:
    """A prefix that two replicas hold is computed where there is more room."""
    policy = CacheAware(rng(), FEW)
    put(policy, A, request(chain(1, 10)), request(chain(2, 1)))
    put(policy, B, request(chain(1, 10)))
    assert chosen(policy, request(chain(1, 10))) == B


def test_the_old_fallback_prefers_the_smallest_tree_over_the_least_load() -> None:
    """This is what sent everything to a replica that had just come back."""
    old = CacheAware(rng(), CacheAwareSettings(fallback=Fallback.SMALLEST_TREE))
    new = CacheAware(rng(), CacheAwareSettings())
    for policy in (old, new):
        put(policy, A, request(chain(1, 100)))
        put(policy, B, *[request(chain(2, 10))] * 9)
        put(policy, C, request(chain(3, 100)), request(chain(4, 100)))
    assert chosen(old, request(chain(7, 10))) == B
    assert chosen(new, request(chain(7, 10))) == A


def test_trees_are_cut_at_the_interval_and_not_before() -> None:
    """Between two evictions a tree may outgrow its bound; then the least recently routed leaves go first."""
    policy = CacheAware(rng(), CacheAwareSettings(threshold=0.5, evict_every_s=30.0, max_tree_tokens=160))
    put(policy, A, request(chain(1, 10)), now=1.0)
    put(policy, B, request(chain(3, 10)), now=1.0)
    put(policy, A, request(chain(2, 6)), now=2.0)
    ask = request(chain(1, 10))
    put(policy, C, request(chain(5, 1)), request(chain(5, 1)))
    assert chosen(policy, ask, now=29.0, candidates=(A, C)) == A
    put(policy, A, request(chain(6, 1)))
    # A keeps 6 blocks of the second, 1 of the third and 3 of the first: 0.3 is too little.
    assert chosen(policy, ask, now=31.0, candidates=(A, C)) == C
    assert chosen(policy, request(chain(2, 6)), now=31.0, candidates=(A, C)) == A


def test_a_session_stays_where_it_was_only_when_sessions_are_on() -> None:
    """The newest vllm-router follows the session id before the prompt."""
    for sessions, expected in ((True, B), (False, A)):
        policy = CacheAware(rng(), CacheAwareSettings(sessions=sessions))
        put(policy, A, request(chain(1, 10)))
        put(policy, B, request(chain(2, 10), affinity="s"))
        assert chosen(policy, request(chain(1, 10), affinity="s")) == expected
    policy.removed(A)
    put(policy, B, request(chain(2, 10)), request(chain(2, 10)))
    assert chosen(policy, request(chain(1, 10)), candidates=(A, B)) == A  # now only as the less loaded
