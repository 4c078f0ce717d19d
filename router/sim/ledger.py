"""Keeps account of every request of a run: each gets exactly one outcome."""

import enum
from collections.abc import Sequence

from router.policy.interface import Ticket
from router.sim.gateway import Gateway
from router.sim.replica import SimReplica
from router.sim.request import SimRequest
from router.sim.result import RankRecord, RequestOutcome, RequestRecord, Result
from router.sim.sequence import EngineSequence


class Place(enum.Enum):
    GATEWAY = enum.auto()
    REPLICA = enum.auto()  # or on the way there or back
    OVER = enum.auto()


class Tracked:
    """A request that has arrived and not yet ended."""

    __slots__ = ("attempts", "first_token_at", "gateway", "place", "rank", "request", "sent_at", "sequence", "ticket")

    def __init__(self, request: SimRequest, gateway: int) -> None:
        self.request = request
        self.gateway = gateway
        self.place = Place.GATEWAY
        self.attempts = 0
        self.ticket: Ticket | None = None
        self.rank = 0
        self.sent_at: float | None = None
        self.first_token_at: float | None = None  # of the last attempt
        self.sequence: EngineSequence | None = None

    def record(self, outcome: RequestOutcome, now: float, retry_after_s: float | None = None) -> RequestRecord:
        request, sequence = self.request, self.sequence
        mean_s = worst_s = None
        if sequence is not None and sequence.output > 1 and outcome is RequestOutcome.COMPLETED:
            assert sequence.first_token_at is not None
            mean_s = (sequence.last_token_at - sequence.first_token_at) / (sequence.output - 1)
            worst_s = sequence.worst_gap_s
        return RequestRecord(
            id=request.id,
            tenant=request.tenant,
            session=request.session,
            turn=request.turn,
            priority=request.priority,
            ttft_target_s=request.ttft_target_s,
            outcome=outcome,
            arrives_at=request.arrives_at,
            prompt_tokens=request.prompt_tokens,
            gateway=self.gateway,
            attempts=self.attempts,
            ended_at=now,
            replica=None if self.ticket is None else self.ticket.replica,
            rank=self.rank,
            sent_at=self.sent_at,
            first_token_at=self.first_token_at,
            cached_tokens=0 if sequence is None else sequence.cached_tokens or 0,
            output_tokens=0 if sequence is None else sequence.output,
            preemptions=0 if sequence is None else sequence.preemptions,
            itl_mean_s=mean_s,
            itl_worst_s=worst_s,
            retry_after_s=retry_after_s,
        )


class Ledger:
    def __init__(self) -> None:
        self._open: dict[int, Tracked] = {}
        self._records: dict[int, RequestRecord] = {}
        self.expects_more = True  # the workload has further arrivals of its own
        self.announced = 0  # follow-ups that have not arrived yet

    @property
    def has_open(self) -> bool:
        return bool(self._open) or self.expects_more or self.announced > 0

    def tracked(self, request: SimRequest) -> Tracked:
        return self._open[request.id]

    def arrived(self, request: SimRequest, gateway: int) -> None:
        """Raises ValueError for an id that came before."""
        if request.id in self._open or request.id in self._records:
            raise ValueError(f"request id {request.id} came twice; the workload must give each request an id of its own")
        self._open[request.id] = Tracked(request, gateway)

    def sent(self, request: SimRequest, ticket: Ticket, now: float) -> Tracked:
        """Raises ValueError for a request that is not waiting in its gateway."""
        tracked = self._waiting(request, "sent")
        tracked.place = Place.REPLICA
        tracked.attempts += 1
        tracked.ticket = ticket
        tracked.rank = ticket.rank
        tracked.sent_at = now
        tracked.first_token_at = None
        tracked.sequence = None
        return tracked

    def refused(self, request: SimRequest, retry_after_s: float, now: float) -> None:
        """Raises ValueError for a request that is not waiting in its gateway."""
        self._close(self._waiting(request, "refused"), RequestOutcome.REFUSED, now, retry_after_s)

    def completed(self, tracked: Tracked, now: float) -> None:
        self._close(tracked, RequestOutcome.COMPLETED, now)

    def failed(self, tracked: Tracked, now: float, *, for_good: bool) -> None:
        if for_good:
            self._close(tracked, RequestOutcome.FAILED, now)
        else:
            tracked.place = Place.GATEWAY

    def result(
        self,
        workload: str,
        horizon_s: float,
        now: float,
        sample_interval_s: float,
        replicas: Sequence[SimReplica],
        gateways: Sequence[Gateway],
    ) -> Result:
        """Closes the books; what is still open is UNFINISHED."""
        for replica in replicas:
            replica.sync(now)
            for engine in replica.engines:
                for sequence in engine.running:
                    sequence.output = engine.output_of(sequence)
        for tracked in list(self._open.values()):
            self._close(tracked, RequestOutcome.UNFINISHED, now)
        ranks = tuple(
            RankRecord(
                replica=replica.id,
                rank=rank,
                busy_s=engine.busy_s,
                steps=engine.steps,
                prefilled_tokens=engine.prefilled_tokens,
                cached_tokens=engine.cached_tokens,
                generated_tokens=engine.generated_tokens,
                preemptions=engine.preemptions,
                samples=tuple(replica.samples[rank]),
            )
            for replica in replicas
            for rank, engine in enumerate(replica.engines)
        )
        facts: dict[str, float] = {}
        for gateway in gateways:
            for name, value in gateway.facts.items():
                facts[name] = facts.get(name, 0.0) + value
        return Result(
            workload=workload,
            horizon_s=horizon_s,
            ended_at=now,
            sample_interval_s=sample_interval_s,
            requests=tuple(self._records[request_id] for request_id in sorted(self._records)),
            ranks=ranks,
            decision_ns=tuple(nanoseconds for gateway in gateways for nanoseconds in gateway.decision_ns),
            gateway_facts=facts,
        )

    def _waiting(self, request: SimRequest, what: str) -> Tracked:
        tracked = self._open.get(request.id)
        if tracked is None or tracked.place is not Place.GATEWAY:
            raise ValueError(f"request {request.id} was {what}, but it is not waiting in a gateway")
        return tracked

    def _close(self, tracked: Tracked, outcome: RequestOutcome, now: float, retry_after_s: float | None = None) -> None:
        tracked.place = Place.OVER
        del self._open[tracked.request.id]
        self._records[tracked.request.id] = tracked.record(outcome, now, retry_after_s)
