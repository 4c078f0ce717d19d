"""Runs gateways and engines against a workload on virtual time."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from protocol.usage import Usage
from router.policy.interface import EngineLoad, Ticket
from router.sim.blocks import KvEvent
from router.sim.fleet import Failure, FleetSettings
from router.sim.gateway import Gateway
from router.sim.ledger import Ledger, Tracked
from router.sim.lockstep import StepClock
from router.sim.replica import SimReplica, build_replicas
from router.sim.request import SimRequest
from router.sim.result import Result
from router.sim.sequence import EngineSequence
from router.sim.timeline import Timeline
from router.sim.workload import Workload
from router.types import ReplicaId


class Omniscient(Protocol):
    """A policy that is shown the true engines, as no real one could be."""

    def reveal(self, replicas: Sequence[SimReplica]) -> None: ...


def simulate(
    fleet: FleetSettings,
    workload: Workload,
    gateways: Sequence[Gateway],
    *,
    seed: int,
    sharing_delay_s: float | None = None,
    grace_s: float = 600.0,
    sample_interval_s: float = 1.0,
    reveal_to: Sequence[Omniscient] = (),
) -> Result:
    """Runs until everything that arrived has ended, at most until `grace_s` after the workload's horizon.

    Args:
        fleet: the engines.
        workload: used up by the run.
        gateways: the routers, used up as well; each request goes to one of them at random.
        seed: of everything that is random here and in the workload. The same seed, workload and gateways give the same result.
        sharing_delay_s: how late gateways hear of each other's placements; None: not at all.
        grace_s: what has not ended then is UNFINISHED.
        sample_interval_s: of the ranks' load.
        reveal_to: the oracle, which is shown the engines.

    Raises:
        ValueError: a setting out of range, or a request that no engine could ever hold.
    """
    if not gateways:
        raise ValueError("gateways is empty, but requests must arrive somewhere: give one or more")
    for name, value in (("grace_s", grace_s), ("sharing_delay_s", sharing_delay_s or 0.0)):
        if value < 0:
            raise ValueError(f"{name} is {value}, but must be 0 or more")
    if sample_interval_s <= 0:
        raise ValueError(f"sample_interval_s is {sample_interval_s}, but must be above 0")
    cluster = _Cluster(fleet, workload, gateways, seed, sharing_delay_s, grace_s, sample_interval_s)
    for omniscient in reveal_to:
        omniscient.reveal(cluster.replicas)
    return cluster.run()


class _Outlet:
    """What one gateway may do."""

    def __init__(self, cluster: "_Cluster", gateway: int) -> None:
        self._cluster = cluster
        self._gateway = gateway

    def send(self, request: SimRequest, ticket: Ticket, now: float) -> None:
        self._cluster.send(request, ticket, self._gateway, now)

    def refuse(self, request: SimRequest, retry_after_s: float, now: float) -> None:
        self._cluster.refuse(request, retry_after_s, now)


class _Cluster:
    def __init__(
        self,
        fleet: FleetSettings,
        workload: Workload,
        gateways: Sequence[Gateway],
        seed: int,
        sharing_delay_s: float | None,
        grace_s: float,
        sample_interval_s: float,
    ) -> None:
        self._fleet = fleet
        self._workload = workload
        self._gateways = gateways
        self._sharing_delay_s = sharing_delay_s if len(gateways) > 1 else None
        self._grace_s = grace_s
        self._sample_interval_s = sample_interval_s
        # One source each, so that a change of one part leaves the others' draws alone.
        self._workload_rng = random.Random(f"{seed} workload")
        self._arrival_rng = random.Random(f"{seed} gateway")
        self._loss_rng = random.Random(f"{seed} loss")
        self._timeline = Timeline()
        self._at = self._timeline.at
        self._now = 0.0
        self._arrivals: Iterator[SimRequest] = iter(())
        self._ledger = Ledger()
        self.replicas = build_replicas(fleet)
        self._by_id = {replica.id: replica for replica in self.replicas}
        self._home = {engine: (replica, rank) for replica in self.replicas for rank, engine in enumerate(replica.engines)}
        self._beginning: set[StepClock] = set()
        self._wakes: dict[StepClock, int] = {}  # number of the valid wake-up of each clock; older ones are void

    def run(self) -> Result:
        for index, gateway in enumerate(self._gateways):
            gateway.connect(_Outlet(self, index))
            for replica in self.replicas:
                gateway.changed(replica.facts, 0.0)
            if gateway.tick_interval_s is not None:
                self._at(gateway.tick_interval_s, self._tick, gateway, gateway.tick_interval_s)
        self._at(0.0, self._sample)
        self._at(self._fleet.scrape_interval_s, self._scrape)
        for failure in self._fleet.failures:
            self._at(failure.at, self._kill, failure)
        self._arrivals = iter(self._workload.initial(self._workload_rng))
        self._next_arrival()
        cut_at = self._workload.horizon_s + self._grace_s
        while self._timeline and self._ledger.has_open:
            at, call, arguments = self._timeline.next()
            if at > cut_at:
                self._now = cut_at
                break
            self._now = at
            call(at, *arguments)
        return self._ledger.result(
            self._workload.name,
            self._workload.horizon_s,
            self._now,
            self._sample_interval_s,
            self.replicas,
            self._gateways,
        )

    # Requests on their way.

    def _next_arrival(self) -> None:
        request = next(self._arrivals, None)
        self._ledger.expects_more = request is not None
        if request is not None:
            if request.arrives_at < self._now:
                raise ValueError(f"request {request.id} arrives at {request.arrives_at}, before one that was given earlier")
            self._at(request.arrives_at, self._arrive_in_order, request)

    def _arrive_in_order(self, now: float, request: SimRequest) -> None:
        self._arrive(now, request)
        self._next_arrival()

    def _arrive(self, now: float, request: SimRequest) -> None:
        gateway = self._arrival_rng.randrange(len(self._gateways)) if len(self._gateways) > 1 else 0
        self._ledger.arrived(request, gateway)
        self._gateways[gateway].submit(request, now)

    def send(self, request: SimRequest, ticket: Ticket, gateway: int, now: float) -> None:
        if ticket.replica not in self._by_id:
            raise ValueError(f"request {request.id} was placed on {ticket.replica!r}, which is none of {list(self._by_id)}")
        tracked = self._ledger.sent(request, ticket, now)
        self._at(now + self._fleet.network_delay_s, self._deliver, tracked, tracked.attempts)
        self._share(gateway, now, "peer_sent", request, ticket.replica, ticket.rank)

    def refuse(self, request: SimRequest, retry_after_s: float, now: float) -> None:
        self._ledger.refused(request, retry_after_s, now)

    def _deliver(self, now: float, tracked: Tracked, attempt: int) -> None:
        ticket = tracked.ticket
        assert ticket is not None
        replica = self._by_id[ticket.replica]
        if not replica.is_up:
            self._at(now + self._fleet.network_delay_s, self._failed, tracked, attempt)
            return
        rank = replica.least_loaded_rank() if self._fleet.engine_picks_rank else ticket.rank
        if not 0 <= rank < len(replica.engines):
            raise ValueError(
                f"request {tracked.request.id} was placed on rank {rank} of {replica.id}, which has {len(replica.engines)}"
            )
        tracked.rank = rank
        tracked.sequence = EngineSequence(tracked.request, attempt)
        replica.engines[rank].submit(tracked.sequence)
        clock = replica.clocks[rank]
        if not clock.is_stepping:
            if clock not in self._beginning:  # once all that is due at this very time has been delivered
                self._beginning.add(clock)
                self._at(now, self._begin_first, clock)
        elif (ends_at := clock.interrupt(now)) is not None:
            self._wake_at(clock, ends_at)

    def _first_token(self, now: float, tracked: Tracked) -> None:
        ticket = tracked.ticket
        assert ticket is not None
        tracked.first_token_at = now
        self._gateways[tracked.gateway].first_token(tracked.request, ticket, now)
        self._share(tracked.gateway, now, "peer_first_token", tracked.request)

    def _ended(self, now: float, tracked: Tracked) -> None:
        ticket, request, sequence = tracked.ticket, tracked.request, tracked.sequence
        assert ticket is not None
        assert sequence is not None
        usage = Usage(request.prompt_tokens, sequence.output, sequence.cached_tokens)
        self._ledger.completed(tracked, now)
        self._gateways[tracked.gateway].ended(request, ticket, usage, now)
        self._share(tracked.gateway, now, "peer_ended", request, usage)
        for following in self._workload.follow_up(request, now, self._workload_rng):
            if following.arrives_at < now:
                raise ValueError(f"request {following.id} follows at {following.arrives_at}, before the answer at {now}")
            if following.arrives_at <= self._workload.horizon_s:
                self._ledger.announced += 1
                self._at(following.arrives_at, self._arrive_after, following)

    def _arrive_after(self, now: float, request: SimRequest) -> None:
        self._ledger.announced -= 1
        self._arrive(now, request)

    def _failed(self, now: float, tracked: Tracked, attempt: int) -> None:
        ticket = tracked.ticket
        assert ticket is not None
        assert tracked.attempts == attempt
        gateway = self._gateways[tracked.gateway]
        has_attempt = tracked.attempts < self._fleet.attempts_max
        self._ledger.failed(tracked, now, for_good=not has_attempt)
        gateway.ended(tracked.request, ticket, None, now)
        self._share(tracked.gateway, now, "peer_ended", tracked.request, None)
        if has_attempt:
            gateway.submit(tracked.request, now)

    def _share(self, origin: int, now: float, method: str, *arguments: Any) -> None:
        if self._sharing_delay_s is not None:
            for index, gateway in enumerate(self._gateways):
                if index != origin:
                    self._at(now + self._sharing_delay_s, self._tell_peer, getattr(gateway, method), arguments)

    def _tell_peer(self, now: float, hear: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        hear(*arguments, now)

    # Engines.

    def _begin_first(self, now: float, clock: StepClock) -> None:
        self._beginning.discard(clock)
        if not clock.is_stepping:
            self._begin(clock, now)

    def _begin(self, clock: StepClock, now: float) -> None:
        if (ends_at := clock.begin(now)) is not None:
            self._wake_at(clock, ends_at)

    def _wake_at(self, clock: StepClock, at: float) -> None:
        number = self._wakes[clock] = self._wakes.get(clock, 0) + 1
        self._at(at, self._wake, clock, number)

    def _wake(self, now: float, clock: StepClock, number: int) -> None:
        if self._wakes[clock] != number:
            return
        heard_at = now + self._fleet.network_delay_s
        for engine, outcome in clock.finish(now):
            replica, rank = self._home[engine]
            for sequence in outcome.started:
                self._at(heard_at, self._first_token, self._ledger.tracked(sequence.request))
            for sequence in outcome.finished:
                self._at(heard_at, self._ended, self._ledger.tracked(sequence.request))
            self._publish(now, replica, rank, outcome.events)
        self._begin(clock, now)

    def _publish(self, now: float, replica: SimReplica, rank: int, batch: list[KvEvent]) -> None:
        events = self._fleet.events
        if events is None or not batch:
            return
        for gateway in self._gateways:
            if not events.loss or self._loss_rng.random() >= events.loss:
                self._at(now + events.delay_s, self._tell_events, gateway, replica.id, rank, batch)

    def _tell_events(self, now: float, gateway: Gateway, replica: ReplicaId, rank: int, batch: list[KvEvent]) -> None:
        for event in batch:
            hear = gateway.stored if event.is_stored else gateway.evicted
            hear(replica, rank, event.blocks, now)

    def _kill(self, now: float, failure: Failure) -> None:
        heard_at = now + self._fleet.network_delay_s
        dying = [replica for replica in self.replicas[failure.replica].together if replica.is_up]
        for replica in dying:
            replica.is_up = False
            for gateway in self._gateways:  # first, or what fails would be sent there again
                self._at(heard_at, self._lose, gateway, replica)
            self._at(now + self._fleet.startup_s, self._restart, replica)
        for replica in dying:
            for clock in replica.clocks:
                clock.kill(now)
                self._wakes[clock] = self._wakes.get(clock, 0) + 1
            for engine in replica.engines:
                for sequence in engine.kill():
                    tracked = self._ledger.tracked(sequence.request)
                    self._at(heard_at, self._failed, tracked, tracked.attempts)

    def _lose(self, now: float, gateway: Gateway, replica: SimReplica) -> None:
        gateway.lost(replica.id, now)

    def _restart(self, now: float, replica: SimReplica) -> None:
        replica.is_up = True
        for gateway in self._gateways:
            gateway.restarted(replica.id, now)
            gateway.changed(replica.facts, now)

    # What comes round.

    def _tick(self, now: float, gateway: Gateway, interval_s: float) -> None:
        gateway.tick(now)
        self._at(now + interval_s, self._tick, gateway, interval_s)

    def _scrape(self, now: float) -> None:
        loads = []
        for replica in self.replicas:
            if replica.is_up:
                replica.sync(now)
                loads.append((replica.id, replica.load))
        self._at(now + self._fleet.scrape_delay_s, self._tell_loads, loads)
        self._at(now + self._fleet.scrape_interval_s, self._scrape)

    def _tell_loads(self, now: float, loads: list[tuple[ReplicaId, EngineLoad]]) -> None:
        for gateway in self._gateways:
            for replica, load in loads:
                gateway.scraped(replica, load, now)

    def _sample(self, now: float) -> None:
        for replica in self.replicas:
            replica.sync(now)
            replica.sample()
        self._at(now + self._sample_interval_s, self._sample)
