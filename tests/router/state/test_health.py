"""When a replica counts as down."""

import pytest

from router.state.health import TIMEOUTS_TO_EJECT, after_refused, after_timeout
from router.types import Health, Observation

READY = Observation(Health.READY)


def test_a_refused_connection_takes_a_replica_out_at_once() -> None:
    """No second request is sent to a dead process."""
    kept, _ = after_refused("connection refused")
    assert (kept.health, kept.problem) == (Health.DOWN, "connection refused")


def test_one_slow_answer_does_not_take_a_busy_replica_out() -> None:
    """A replica under load that misses a probe keeps its requests; one that misses several in a row does not."""
    kept, failures = READY, 0
    for _ in range(TIMEOUTS_TO_EJECT - 1):
        kept, failures = after_timeout(kept, failures, "slow")
        assert kept.health is Health.READY
    kept, failures = after_timeout(kept, failures, "slow")
    assert (kept.health, kept.problem) == (Health.DOWN, "slow")


@pytest.mark.parametrize("health", [Health.UNKNOWN, Health.STARTING, Health.DOWN])
def test_a_replica_that_never_answered_is_not_given_the_benefit(health: Health) -> None:
    """A replica is used only after it has answered."""
    kept, _ = after_timeout(Observation(health), 0, "slow")
    assert kept.health is Health.DOWN
