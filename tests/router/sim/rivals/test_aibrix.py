"""AIBrix takes the best match among the replicas that are not unusually busy."""

import pytest

from router.sim.rivals.aibrix import AibrixPrefixCache, AibrixSettings
from router.types import ReplicaId
from tests.router.sim.rivals.shapes import TARGETS, A, B, C, chain, chosen, put, request, rng


@pytest.mark.parametrize(
    ("running", "expected"),
    [
        ((4, 1, 1), B),  # mean 2, deviation 1.41: a is above 3.41, b matches less but more than c
        ((3, 1, 1), B),  # mean 1.67, deviation 0.94: a is above 2.61
        ((3, 3, 1), A),  # mean 2.33, deviation 0.94: 3 is within 3.28
        ((2, 9, 1), A),  # 9 - 1 is not above 8
        ((2, 10, 1), C),  # 10 - 1 is: the least busy
        ((10, 2, 1), C),
    ],
)
def test_the_best_match_within_the_limit_wins(running: tuple[int, int, int], expected: str) -> None:
    """Requests running: mean + standard deviation, worked out by hand. a has all of the prompt, b half, c nothing."""
    policy = AibrixPrefixCache(rng(), AibrixSettings())
    for (replica, _), count, blocks in zip(TARGETS, running, (10, 5, 0), strict=True):
        put(policy, replica, *[request(chain(1, blocks))] * count)
    assert chosen(policy, request(chain(1, 10))) == expected


def test_equal_matches_go_to_the_less_busy() -> None:
    """Matches are compared in whole per cent."""
    policy = AibrixPrefixCache(rng(), AibrixSettings(sigmas=3.0))
    put(policy, A, request(chain(1, 200)), request())
    put(policy, B, request(chain(1, 199)))
    assert chosen(policy, request(chain(1, 200))) == A  # 100 to 99
    assert chosen(policy, request(chain(1, 300)), candidates=(A, B)) == B  # 66 both


def homes(policy: AibrixPrefixCache, now: float) -> set[ReplicaId]:
    return {chosen(policy, request(chain(1, 10)), now=now) for _ in range(60)}


def test_the_table_forgets_by_age_and_by_size() -> None:
    """After the ttl, or when newer blocks need the room, a match is gone."""
    policy = AibrixPrefixCache(rng(), AibrixSettings(ttl_s=100.0, table_blocks=12))
    (ticket,) = put(policy, B, request(chain(1, 10)), now=0.0)
    policy.ended(ticket, None, 1.0)
    assert homes(policy, 100.0) == {B}
    assert homes(policy, 100.5) == {A, B, C}
    for ticket in put(policy, B, request(chain(1, 10)), request(chain(2, 12)), now=200.0):
        policy.ended(ticket, None, 200.0)
    assert homes(policy, 200.0) == {A, B, C}
