"""Which rollouts may run side by side, and what is remembered of them."""

import pytest

from router.state.rollouts import REMEMBERED, Rollout, RolloutRefused, Rollouts, RolloutState, Strategy


def rollout(name: str, model: str = "m", started: float = 0.0) -> Rollout:
    return Rollout(name, model, "v2", Strategy.IN_PLACE, started)


def test_a_second_rollout_of_a_model_is_refused_until_the_first_has_ended() -> None:
    """Two operators cannot pull one model to two versions at once; another model is not in the way."""
    rollouts = Rollouts()
    first = rollout("a")
    rollouts.start(first)
    rollouts.start(rollout("b", model="other"))
    with pytest.raises(RolloutRefused, match="rollout a of m"):
        rollouts.start(rollout("c"))
    rollouts.end(first, RolloutState.DONE, now=2.5)
    assert first.seconds == 2.5
    rollouts.start(rollout("c"))


def test_ended_rollouts_are_forgotten_from_the_oldest_and_running_ones_never() -> None:
    """A trainer that swaps every few minutes for months does not fill the router's memory."""
    rollouts = Rollouts()
    running = rollout("running", model="other")
    rollouts.start(running)
    for number in range(REMEMBERED + 5):
        ended = rollout(f"r{number}")
        rollouts.start(ended)
        rollouts.end(ended, RolloutState.DONE, now=1.0)
    known = [known.id for known in rollouts.all()]
    assert known[0] == "running"
    assert len(known) <= REMEMBERED + 2
    assert known[-1] == f"r{REMEMBERED + 4}"
