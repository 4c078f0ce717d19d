"""Dynamo's router adds up blocks to prefill and blocks to decode."""

import pytest

from router.sim.rivals.dynamo import Dynamo, DynamoSettings
from tests.router.sim.rivals.shapes import TARGETS, A, B, C, chain, chosen, put, request, rng


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # prefill: a 8 + 10 - 4, b 0 + 10, c 0 + 10 blocks; decode: a 8 + 10, b 6 + 10, c 0 + 10
        (DynamoSettings(), [14 + 18, 10 + 16, 10 + 10]),
        (DynamoSettings(overlap_credit=2.0), [10 + 18, 10 + 16, 10 + 10]),
        (DynamoSettings(overlap_credit=64.0), [0 + 18, 10 + 16, 10 + 10]),
        (DynamoSettings(prefill_scale=0.5), [7 + 18, 5 + 16, 5 + 10]),
        (DynamoSettings(lmetric=True), [14 * 2, 10 * 2, 10 * 1]),
    ],
)
def test_the_cost_is_prefill_and_decode_blocks(settings: DynamoSettings, expected: list[float]) -> None:
    """Three replicas, worked out by hand: a computes a prompt of 8 blocks and holds 4 of ours, b decodes one of 6."""
    policy = Dynamo(rng(), settings)
    policy.stored(A, 0, chain(1, 4), 0.0)
    put(policy, A, request(chain(2, 8)))
    (decoding,) = put(policy, B, request(chain(3, 6)))
    policy.first_token(decoding, 0.0)
    assert policy.costs(request(chain(1, 10)), TARGETS, 0.0) == pytest.approx(expected)
    policy.ended(decoding, None, 0.0)
    assert policy.costs(request(chain(1, 10)), TARGETS, 0.0)[1] == pytest.approx(expected[2])


@pytest.mark.parametrize(("shared_once", "decode"), [(True, 10 + 2), (False, 20 + 12)])
def test_blocks_that_requests_share_are_decoded_from_once_or_each_time(shared_once: bool, decode: int) -> None:
    """Two requests with the same 10 blocks run on a; a third shares them and has 2 more."""
    policy = Dynamo(rng(), DynamoSettings(shared_once=shared_once, predicted_ttl_s=None))
    tickets = put(policy, A, request(chain(1, 10)), request(chain(1, 10)))
    for ticket in tickets:
        policy.first_token(ticket, 0.0)
    ask = request(chain(1, 12))
    assert policy.costs(ask, TARGETS, 0.0)[0] == 12 + decode
    for ticket in tickets:
        policy.ended(ticket, None, 0.0)
    assert policy.costs(ask, TARGETS, 0.0)[0] == 12 + 12


def test_a_sibling_follows_while_the_prediction_lives() -> None:
    """The second of two equal prompts goes to the same replica before any event, but not 5 s later."""
    policy = Dynamo(rng(), DynamoSettings(predicted_ttl_s=5.0))
    (first,) = put(policy, B, request(chain(1, 100)), now=10.0)
    policy.first_token(first, 10.1)
    policy.ended(first, None, 10.2)
    ask = request(chain(1, 100))
    assert policy.costs(ask, TARGETS, 14.9) == [200, 100, 200]
    assert policy.costs(ask, TARGETS, 15.0) == [200, 200, 200]


def test_what_is_predicted_on_a_replica_that_restarts_is_forgotten() -> None:
    """A new engine has computed nothing."""
    policy = Dynamo(rng(), DynamoSettings())
    tickets = put(policy, A, request(chain(1, 10))) + put(policy, B, request(chain(1, 10)))
    policy.stored(A, 0, chain(1, 10), 0.0)
    for ticket in tickets:
        policy.ended(ticket, None, 0.0)
    policy.restarted(A)
    assert policy.costs(request(chain(1, 10)), TARGETS, 0.0) == [20, 10, 20]
    assert chosen(policy, request(chain(1, 10))) == B


def test_the_temperature_works_on_costs_scaled_to_one() -> None:
    """However large the costs, a small temperature keeps the best and a large one does not."""
    shares = {}
    for temperature in (0.01, 5.0):
        policy = Dynamo(rng(), DynamoSettings(temperature=temperature))
        policy.stored(A, 0, chain(1, 1_000), 0.0)
        shares[temperature] = {chosen(policy, request(chain(1, 1_000))) for _ in range(60)}
    assert shares == {0.01: {A}, 5.0: {A, B, C}}
