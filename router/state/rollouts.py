"""Rollouts: bringing all replicas of a model to one checkpoint. Who runs, and how far it is. Synchronous, one owner."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from protocol.status import SwapReport
from router.types import ReplicaId

# Ended rollouts that are remembered for `GET /admin/rollouts`.
REMEMBERED = 100


class RolloutState(enum.StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # every replica that had been swapped was asked back to the version it served before


class Strategy(enum.StrEnum):
    IN_PLACE = "in_place"  # pause, load, resume, one replica after the other


class RolloutRefused(Exception):
    """The rollout cannot be started; the message says why and what to do."""


@dataclass(slots=True)
class Rollout:
    id: str
    model: str
    version: str
    strategy: Strategy
    started: float  # the caller's clock, seconds
    state: RolloutState = RolloutState.RUNNING
    reason: str | None = None
    seconds: float = 0.0
    reports: list[tuple[ReplicaId, SwapReport]] = field(default_factory=list)  # in the order of the swaps, undoing included


class Rollouts:
    """At most one running rollout for each model."""

    def __init__(self) -> None:
        self._by_id: dict[str, Rollout] = {}

    def check_free(self, model: str) -> None:
        """Raises RolloutRefused while a rollout of this model runs."""
        for other in self._by_id.values():
            if other.state is RolloutState.RUNNING and other.model == model:
                raise RolloutRefused(
                    f"rollout {other.id} of {other.model} to {other.version} is still running; wait for it to end"
                )

    def start(self, rollout: Rollout) -> None:
        """Raises RolloutRefused while another one runs for the same model."""
        self.check_free(rollout.model)
        self._by_id[rollout.id] = rollout
        ended = [known.id for known in self._by_id.values() if known.state is not RolloutState.RUNNING]
        for rollout_id in ended[: max(0, len(ended) - REMEMBERED)]:
            del self._by_id[rollout_id]

    def end(self, rollout: Rollout, state: RolloutState, now: float, reason: str | None = None) -> None:
        rollout.state, rollout.reason, rollout.seconds = state, reason, now - rollout.started

    def get(self, rollout_id: str) -> Rollout:
        """Raises KeyError."""
        return self._by_id[rollout_id]

    def all(self) -> Iterable[Rollout]:
        """Oldest first."""
        return self._by_id.values()
