"""Every policy that can be named on the command line."""

import random

import pytest

from protocol.usage import Usage
from router.policy.catalogue import PolicyName, make_policy
from router.policy.interface import PlacementRequest, ReplicaFacts
from router.types import ReplicaId
from tests.router.policy.prompts import prompt, text

A, B = ReplicaId("a:1"), ReplicaId("b:1")


@pytest.mark.parametrize("name", list(PolicyName))
def test_every_policy_serves_with_a_single_replica_and_with_one_that_comes_and_goes(name: PolicyName) -> None:
    """A stack of one replica serves under any policy, also while others join and leave."""
    policy = make_policy(name, random.Random(0))
    policy.changed(ReplicaFacts(A))
    for number in range(20):
        candidates = [A] if number % 3 else [A, B]
        ticket = policy.place(PlacementRequest("m", prompt(text(f"{number}", 2))), candidates, number * 10.0)
        assert ticket is not None
        assert ticket.replica in candidates
        policy.first_token(ticket, number * 10.0 + 0.1)
        if number % 2:
            policy.removed(B)
        policy.ended(ticket, Usage(128, 10, 0) if number % 4 else None, number * 10.0 + 1.0)
