"""Runs rollouts: asks the agents one after the other, and back again if one fails."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable

import msgspec

from protocol.status import SwapOutcome, SwapReport
from router.edge.agent_client import ControlClient, ControlError
from router.edge.metrics import RouterMetrics
from router.state.replicas import Replica, ReplicaTable
from router.state.rollouts import Rollout, RolloutRefused, Rollouts, RolloutState, Strategy
from router.types import Health, Observation

log = logging.getLogger(__name__)


class RolloutRunner:
    def __init__(
        self,
        *,
        rollouts: Rollouts,
        table: ReplicaTable,
        control: ControlClient,
        metrics: RouterMetrics,
        tasks: asyncio.TaskGroup,
        clock: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._rollouts = rollouts
        self._table = table
        self._control = control
        self._metrics = metrics
        self._tasks = tasks
        self._clock = clock
        self._new_id = new_id
        self._running: set[asyncio.Task[None]] = set()

    def start(self, model: str, version: str, strategy: Strategy) -> Rollout:
        """Starts a rollout in the background. Raises RolloutRefused."""
        self._rollouts.check_free(model)  # before the replicas, which are not ready because of it
        replicas = self._targets(model)
        rollout = Rollout(self._new_id(), model, version, strategy, self._clock())
        self._rollouts.start(rollout)
        task = self._tasks.create_task(self._run(rollout, replicas), name=f"rollout {rollout.id}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return rollout

    def close(self) -> None:
        """Stops waiting for running rollouts. An agent that is in a swap finishes it by itself."""
        for task in self._running:
            task.cancel()

    def _targets(self, model: str) -> list[Replica]:
        served = self._table.served
        if model not in served:
            known = ", ".join(sorted(served)) or "none"
            raise RolloutRefused(f"model {model!r} is not served here; served models: {known}")
        replicas = sorted(served[model], key=lambda replica: replica.id)
        for replica in replicas:
            if replica.status is None:
                raise RolloutRefused(
                    f"replica {replica.id} was added by its engine's URL, which cannot swap; add it by its agent's URL"
                )
            if replica.health not in (Health.READY, Health.DRAINING):
                problem = replica.observed.problem or replica.health
                raise RolloutRefused(
                    f"replica {replica.id} is {replica.health} ({problem}); wait until it is ready or remove it"
                )
        return replicas

    async def _run(self, rollout: Rollout, replicas: list[Replica]) -> None:
        swapped: list[tuple[Replica, str]] = []  # with the version each served before
        reason: str | None = "the router was stopped"
        try:
            for replica in replicas:
                assert replica.status is not None, "checked before the start"
                former = replica.status.checkpoint
                reason = await self._swap(rollout, replica, rollout.version)
                if reason is not None:
                    await self._undo(rollout, swapped)
                    break
                swapped.append((replica, former))
        finally:
            state = RolloutState.DONE if reason is None else RolloutState.FAILED
            self._rollouts.end(rollout, state, self._clock(), reason)
            log.info(
                "rollout %s of %s to %s: %s%s",
                rollout.id,
                rollout.model,
                rollout.version,
                state,
                f": {reason}" if reason else "",
            )

    async def _swap(self, rollout: Rollout, replica: Replica, version: str) -> str | None:
        """Returns why the replica does not serve `version` now, or None if it does."""
        before = replica.observed
        # Until the next probe says more: requests go elsewhere if there is an elsewhere, and no watchdog fires.
        self._table.observe(replica, dataclasses.replace(before, health=Health.SWAPPING, problem="swapping a checkpoint"), 0)
        try:
            report = await self._control.swap(replica.url, version)
        except ControlError as error:
            self._table.observe(replica, before, 0)
            return f"replica {replica.id}: {error}"
        self._table.observe(replica, _after(before, report), 0)
        rollout.reports.append((replica.id, report))
        self._metrics.replica_swapped(report.outcome)
        if report.outcome is SwapOutcome.SWAPPED:
            return None
        return f"replica {replica.id} {report.outcome} {version}: {report.reason}"

    async def _undo(self, rollout: Rollout, swapped: list[tuple[Replica, str]]) -> None:
        """A fleet that answers with two versions is worse than one that answers with the old one."""
        for replica, former in reversed(swapped):
            if problem := await self._swap(rollout, replica, former):
                log.error("rollout %s could not be undone: %s", rollout.id, problem)


def _after(before: Observation, report: SwapReport) -> Observation:
    """What the report says is newer than the last probe."""
    assert before.status is not None, "only replicas with an agent are swapped"
    status = msgspec.structs.replace(before.status, checkpoint=report.version, epoch=report.epoch)
    if report.outcome is SwapOutcome.FAILED:
        return dataclasses.replace(before, health=Health.STARTING, problem=report.reason, status=status)
    return dataclasses.replace(before, status=status)
