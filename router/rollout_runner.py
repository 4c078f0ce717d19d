"""Runs rollouts: asks the agents one after the other, and back again if one fails."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping

import msgspec

from protocol.status import SwapOutcome, SwapReport
from router.edge.agent_client import ControlClient, ControlError
from router.edge.metrics import RouterMetrics
from router.state.replicas import Replica, ReplicaTable
from router.state.rollouts import Rollout, RolloutRefused, Rollouts, RolloutState, Strategy
from router.types import Health

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

    def _targets(self, model: str) -> list[list[Replica]]:
        """The model's replicas by what must be swapped together, in the order of their ids. Raises RolloutRefused."""
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
        groups: dict[str, list[Replica]] = {}
        for replica in replicas:
            assert replica.status is not None, "checked above"
            groups.setdefault(replica.status.expert_parallel_group or replica.id, []).append(replica)
        return list(groups.values())

    async def _run(self, rollout: Rollout, groups: list[list[Replica]]) -> None:
        reason: str | None = "the router was stopped; some replicas may serve the new version, some the old"
        try:
            reason = await self._swap_all(rollout, groups)
        except Exception as error:  # a fault of ours in a rollout must not end the requests that run
            log.exception("rollout %s failed", rollout.id)
            reason = f"a fault in the router: {error!r}; its log has more"
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

    async def _swap_all(self, rollout: Rollout, groups: list[list[Replica]]) -> str | None:
        """Returns why not all replicas serve the version, after those that did were asked back; None if all do."""
        former = {replica: replica.status.checkpoint for group in groups for replica in group if replica.status is not None}
        for done, group in enumerate(groups, start=1):
            failure = await self._swap_group(rollout, group, dict.fromkeys(group, rollout.version))
            if failure is not None:
                for swapped in reversed(groups[:done]):
                    await self._undo(rollout, swapped, former)
                return failure
        return None

    async def _swap_group(self, rollout: Rollout, group: list[Replica], versions: Mapping[Replica, str]) -> str | None:
        """All ranks of an expert-parallel group at once: the engine's pause waits until each of them was asked."""
        reasons = await asyncio.gather(*(self._swap(rollout, replica, versions[replica]) for replica in group))
        return next((reason for reason in reasons if reason is not None), None)

    async def _swap(self, rollout: Rollout, replica: Replica, version: str) -> str | None:
        """Returns why the replica does not serve `version` now, or None if it does."""
        if replica.removed:
            return None  # an operator took it out meanwhile
        before = replica.observed
        if before.health in (Health.READY, Health.DRAINING):
            # Until the next probe says more: requests go elsewhere if there is an elsewhere, and no watchdog fires.
            paused = dataclasses.replace(before, health=Health.SWAPPING, problem="swapping a checkpoint")
            self._table.observe(replica, paused, 0)
        try:
            report = await self._control.swap(replica.url, version)
        except ControlError as error:
            return f"replica {replica.id}: {error}"
        self._take_over(replica, report)
        rollout.reports.append((replica.id, report))
        self._metrics.replica_swapped(report.outcome)
        if report.outcome is SwapOutcome.SWAPPED:
            return None
        return f"replica {replica.id} {report.outcome} {version}: {report.reason}"

    def _take_over(self, replica: Replica, report: SwapReport) -> None:
        """What the report says is newer than the last probe."""
        if replica.status is None:
            return
        status = msgspec.structs.replace(replica.status, checkpoint=report.version, epoch=report.epoch)
        observed = replica.observed
        if report.outcome is SwapOutcome.FAILED:
            observed = dataclasses.replace(observed, health=Health.STARTING, problem=report.reason)
        elif observed.health is Health.SWAPPING:
            observed = dataclasses.replace(observed, health=Health.READY, problem=None)
        self._table.observe(replica, dataclasses.replace(observed, status=status), 0)

    async def _undo(self, rollout: Rollout, group: list[Replica], former: Mapping[Replica, str]) -> None:
        """A fleet that answers with two versions is worse than one that answers with the old one."""
        if all(replica.status is not None and replica.status.checkpoint == former[replica] for replica in group):
            return
        if problem := await self._swap_group(rollout, group, former):
            log.error("rollout %s could not be undone: %s", rollout.id, problem)
