"""Runs a planned stack: router first, replicas as the machine can bear them, watched until told to stop."""

import asyncio
import time
from collections.abc import Callable

import httpx

from intellect.problem import EXIT_FAILURE
from intellect.stack.failure import failure_line
from intellect.stack.member import Member
from intellect.stack.plan import LEASH_GRACE_S, ROUTER_DRAIN_S, StackPlan
from intellect.stack.process import last_lines, lines_of_last_run
from intellect.stack.view import Row, View, sign_of_life
from protocol.status import ReplicaState

_TICK_S = 0.25
_WATCH_S = 1.0
# Before it was ever ready, a process that dies this often will not get better by itself.
_EXITS_MAX = 3
_ENGINE_RESTARTS_MAX = 2
_EXIT_STATUS_USAGE = 2
_LINES_SHOWN = 15
_LINES_SEARCHED = 200  # for a cause
_LINES_WATCHED = 10  # for a sign of life
# Beyond their own grace periods, which the plan promises to sum up to less than 10 s.
_STOP_SLACK_S = 1.0


class StackRunner:
    def __init__(self, plan: StackPlan, view: View, admin_token: str | None) -> None:
        self._plan = plan
        self._view = view
        self._admin_token = admin_token
        self._router = Member(plan.router, view.line)
        self._replicas = [Member(replica, view.line) for replica in plan.replicas]

    async def run(self, stop: asyncio.Event, when_ready: Callable[[float], None]) -> int:
        """Runs until `stop` is set. Returns the exit status: 0 after a stop, 1 if the stack could not be started.

        `when_ready` is called once with the seconds it took until every replica served.
        """
        begun = time.monotonic()
        async with httpx.AsyncClient(trust_env=False) as http:
            try:
                failed = await self._start(http, stop)
                self._view.end_start()
                if failed is not None:
                    self._explain(failed)
                elif not stop.is_set():
                    when_ready(time.monotonic() - begun)
                    await self._watch(http, stop)
            finally:
                self._view.end_start()
                self._view.line("stopping")
                await self._stop()
        return 0 if failed is None else EXIT_FAILURE

    async def _start(self, http: httpx.AsyncClient, stop: asyncio.Event) -> Member | None:
        """Returns when all serve, when told to stop, or with the member that will not start."""
        self._router.launch()  # first: /health answers early, and a port that is lost meanwhile shows at once
        waiting = list(self._replicas)
        launched: list[Member] = []
        announced = len(self._replicas) == 1
        while not stop.is_set():
            while waiting and sum(member.ready_after_s is None for member in launched) < self._plan.at_once:
                launched.append(waiting.pop(0))
                launched[-1].launch()
            seen = await self._probe(http)
            self._view.show([_row(member) for member in (self._router, *self._replicas)])
            if seen == len(self._replicas):
                return None
            if seen and not announced:
                announced = True
                self._view.line(f"the first of {len(self._replicas)} replicas is ready: requests are answered from now on")
            for member in (self._router, *launched):
                if _will_not_start(member):
                    return member
            await _wait(stop, _TICK_S)
        return None

    async def _watch(self, http: httpx.AsyncClient, stop: asyncio.Event) -> None:
        """Says what changes. Restarting is the keepers' and the agents' business."""
        members = (self._router, *self._replicas)
        known = {member.plan.name: member.state for member in members}
        while not stop.is_set():
            await _wait(stop, _WATCH_S)
            await self._probe(http)
            for member in members:
                if known[member.plan.name] != member.state and not stop.is_set():
                    self._view.line(f"{member.plan.name}: {member.state}" + (f" ({member.reason})" if member.reason else ""))
                    known[member.plan.name] = member.state

    async def _probe(self, http: httpx.AsyncClient) -> int:
        """Asks everyone; returns how many replicas are ready, to themselves and to the router."""
        async with asyncio.TaskGroup() as probes:
            seen = probes.create_task(self._router.probe_router(http, self._admin_token))
            for member in self._replicas:
                if member.started_at is not None:
                    probes.create_task(member.probe_replica(http))
        ready = sum(member.state == ReplicaState.READY for member in self._replicas)
        return min(ready, seen.result())

    def _explain(self, failed: Member) -> None:
        log = failed.plan.log
        self._view.line(f"the last lines of {log}:")
        for line in last_lines(log, _LINES_SHOWN):
            self._view.line(f"  {line}")
        reason = failed.failure or failed.reason or "it does not start"
        why = failure_line(reason, lines_of_last_run(log, _LINES_SEARCHED), of_engine=reason != failed.own_end)
        self._view.error(f"{failed.plan.name}: {why}; the whole log is in {log}")

    async def _stop(self) -> None:
        # The router drains while the engines still answer.
        await self._router.stop(ROUTER_DRAIN_S + _STOP_SLACK_S)
        async with asyncio.TaskGroup() as stopping:
            for member in self._replicas:
                stopping.create_task(member.stop(LEASH_GRACE_S + _STOP_SLACK_S))


def _will_not_start(member: Member) -> bool:
    if member.ready_after_s is not None:
        return False
    return (
        member.state == ReplicaState.FAILED
        or member.exits >= _EXITS_MAX
        or member.exit_status == _EXIT_STATUS_USAGE
        or member.engine_restarts >= _ENGINE_RESTARTS_MAX
    )


def _row(member: Member) -> Row:
    lines = [] if member.started_at is None else last_lines(member.plan.log, _LINES_WATCHED)
    return Row(member.plan.name, member.state, member.seconds, sign_of_life(lines))


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        pass
