"""The placement policies that `--policy` names."""

import enum
import random
from collections.abc import Callable

from router.policy.interface import Policy
from router.policy.predicted import Predicted
from router.policy.simple import ConsistentHash, LeastLoaded, PowerOfTwo, Random, RoundRobin


class PolicyName(enum.StrEnum):
    PREDICTED = "predicted"
    LEAST_LOADED = "least_loaded"
    P2C = "p2c"
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    CONSISTENT_HASH = "consistent_hash"


_POLICIES: dict[PolicyName, Callable[[random.Random], Policy]] = {
    PolicyName.PREDICTED: Predicted,
    PolicyName.LEAST_LOADED: LeastLoaded,
    PolicyName.P2C: PowerOfTwo,
    PolicyName.ROUND_ROBIN: RoundRobin,
    PolicyName.RANDOM: Random,
    PolicyName.CONSISTENT_HASH: ConsistentHash,
}


def make_policy(name: PolicyName, rng: random.Random) -> Policy:
    return _POLICIES[name](rng)
