"""Where a request goes, given how busy each replica is."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.choose import PolicyName, make_policy
from router.types import ReplicaId, RequestInfo

REQUEST = RequestInfo(model="m", body_bytes=10)


@dataclass
class FakeReplica:
    id: ReplicaId
    in_flight: int


def replicas(*in_flight: int) -> list[FakeReplica]:
    return [FakeReplica(ReplicaId(f"r{index}"), count) for index, count in enumerate(in_flight)]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers())
def test_least_loaded_never_picks_a_replica_that_is_busier_than_another(in_flight: list[int], seed: int) -> None:
    """A request never waits behind more requests than it has to."""
    policy = make_policy(PolicyName.LEAST_LOADED, random.Random(seed))
    assert policy.choose(REQUEST, replicas(*in_flight)).in_flight == min(in_flight)


def test_least_loaded_spreads_ties_over_all_of_them() -> None:
    """Two routers that start together do not send all their first requests to the same replica."""
    policy = make_policy(PolicyName.LEAST_LOADED, random.Random(1))
    chosen = [policy.choose(REQUEST, replicas(2, 2, 5, 2)).id for _ in range(300)]
    assert {id_: chosen.count(id_) > 60 for id_ in set(chosen)} == {"r0": True, "r1": True, "r3": True}


def test_round_robin_gives_each_its_turn_also_while_one_is_away() -> None:
    """A replica that restarts loses its turns, and nobody else's order changes."""
    policy = make_policy(PolicyName.ROUND_ROBIN, random.Random(0))
    a, b, c = replicas(9, 0, 0)
    order = [policy.choose(REQUEST, pool).id for pool in ([a, b, c], [a, b, c], [a, c], [a, c], [a, b, c], [a, b, c])]
    assert order == ["r0", "r1", "r2", "r0", "r1", "r2"]


@pytest.mark.parametrize("name", list(PolicyName))
def test_every_policy_works_with_a_single_replica(name: PolicyName) -> None:
    """A stack of one replica serves under any policy."""
    (only,) = replicas(7)
    policy = make_policy(name, random.Random(0))
    assert [policy.choose(REQUEST, [only]) for _ in range(3)] == [only] * 3
