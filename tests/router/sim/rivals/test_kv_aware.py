"""`kv_aware` weighs uncached prefill by the requests in flight, as vllm-router does."""

from router.policy.interface import ReplicaFacts
from router.sim.rivals.kv_aware import KvAware, KvAwareSettings
from tests.router.sim.rivals.shapes import TARGETS, A, B, C, chain, chosen, put, request, rng


def test_the_cost_is_new_and_active_prefill_times_requests_and_one() -> None:
    """Three replicas, worked out by hand."""
    policy = KvAware(rng(), KvAwareSettings())
    policy.stored(A, 0, chain(1, 4), 0.0)
    put(policy, A, request(chain(5, 10)), request(chain(6, 5)))  # 240 tokens to prefill, 2 requests
    (started,) = put(policy, B, request(chain(7, 20)))
    policy.first_token(started, 1.0)  # nothing to prefill any more, 1 request
    ask = request(chain(1, 10), tokens=165)
    assert policy.costs(ask, TARGETS) == [(165 - 64 + 240) * 3, 165 * 2, 165]
    assert chosen(policy, ask) == C
    policy.ended(started, None, 2.0)
    assert policy.costs(ask, TARGETS)[1] == 165


def test_what_is_reserved_is_the_uncached_part() -> None:
    """A request that hits the cache adds only the rest of its prompt to the replica's prefill."""
    policy = KvAware(rng(), KvAwareSettings())
    policy.stored(A, 0, chain(1, 9), 0.0)
    put(policy, A, request(chain(1, 10)))
    assert policy.costs(request(chain(2, 1)), TARGETS)[0] == (16 + 160 - 144) * 2


def test_the_last_block_is_never_credited() -> None:
    """A prompt that is wholly cached still computes the block of its last token."""
    policy = KvAware(rng(), KvAwareSettings())
    policy.stored(A, 0, chain(1, 10), 0.0)
    assert policy.costs(request(chain(1, 10)), TARGETS)[0] == 16
    assert policy.costs(request(chain(1, 10), tokens=161), TARGETS)[0] == 1


def test_only_contiguous_blocks_count_and_a_restart_forgets_them() -> None:
    """A hole in the cache ends the prefix, and events are the only source."""
    policy = KvAware(rng(), KvAwareSettings())
    ask = request(chain(1, 10), tokens=165)
    put(policy, C, ask)  # routing teaches it nothing
    policy.stored(A, 0, chain(1, 10), 0.0)
    policy.evicted(A, 0, chain(1, 10)[5:6], 0.0)
    policy.stored(B, 0, chain(1, 2), 0.0)
    assert policy.costs(ask, TARGETS) == [165 - 80, 165 - 32, (165 + 165) * 2]
    policy.restarted(A)
    assert policy.costs(ask, TARGETS) == [165, 165 - 32, 330 * 2]


def test_every_rank_has_a_cache_and_a_queue_of_its_own() -> None:
    """Behind one port, the rank that holds the prefix is chosen."""
    policy = KvAware(rng(), KvAwareSettings())
    policy.changed(ReplicaFacts(A, ranks=4))
    policy.stored(A, 2, chain(1, 10), 0.0)
    ticket = policy.place(request(chain(1, 10)), [A, B], 0.0)
    assert ticket is not None
    assert (ticket.replica, ticket.rank) == (A, 2)


def test_a_temperature_spreads_over_costs_that_are_close() -> None:
    """At 0 the cheapest always wins; hot, the others get their share."""
    shares = {}
    for temperature in (0.0, 1e6):
        policy = KvAware(rng(), KvAwareSettings(temperature=temperature))
        policy.stored(A, 0, chain(1, 9), 0.0)
        shares[temperature] = {chosen(policy, request(chain(1, 10))) for _ in range(60)}
    assert shares == {0.0: {A}, 1e6: {A, B, C}}
