"""Whole runs: requests from arrival to outcome, failures, news of the fleet, and several routers."""

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.usage import Usage
from router.policy.interface import EngineLoad, PlacementRequest, Policy, ReplicaFacts, Ticket
from router.sim.cluster import simulate
from router.sim.fleet import EngineLimits, Failure, FleetSettings, KvEvents
from router.sim.gateway import DirectGateway, Outlet
from router.sim.request import SimRequest
from router.sim.result import RequestOutcome, Result
from router.sim.timing import H200_GLM
from router.types import ReplicaId
from tests.router.sim.loads import InTurn, OpenLoad, SessionLoad, fresh, request_of

SMALL = EngineLimits(kv_capacity_tokens=1600, max_num_seqs=16, max_num_batched_tokens=256)


def requests(count: int, *, seed: int = 0, rate: float = 20.0, output: int = 40) -> list[SimRequest]:
    rng = random.Random(seed)
    stems = [fresh(rng, 48) for _ in range(3)]
    at, made = 0.0, []
    for number in range(count):
        at += rng.expovariate(rate)
        prompt = [*rng.choice(stems), *fresh(rng, rng.randint(1, 100))]
        made.append(request_of(number, at, prompt, fresh(rng, rng.randint(1, output))))
    return made


class Recorder(InTurn):
    """Remembers all that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[float, str, object]] = []
        self.in_flight: Counter[ReplicaId] = Counter()
        self.stored_blocks: set[int] = set()

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket:
        ticket = super().place(request, candidates, now)
        self.heard.append((now, "place", ticket))
        self.in_flight[ticket.replica] += 1
        return ticket

    def adopt(self, request: PlacementRequest, replica: ReplicaId, rank: int, now: float) -> Ticket:
        ticket = super().adopt(request, replica, rank, now)
        self.heard.append((now, "adopt", ticket))
        self.in_flight[replica] += 1
        return ticket

    def first_token(self, ticket: Ticket, now: float) -> None:
        self.heard.append((now, "first_token", ticket))

    def ended(self, ticket: Ticket, usage: Usage | None, now: float) -> None:
        self.heard.append((now, "ended", usage))
        self.in_flight[ticket.replica] -= 1

    def changed(self, facts: ReplicaFacts) -> None:
        self.heard.append((0.0, "changed", facts))

    def restarted(self, replica: ReplicaId) -> None:
        self.heard.append((0.0, "restarted", replica))

    def scraped(self, replica: ReplicaId, load: EngineLoad, now: float) -> None:
        self.heard.append((now, "scraped", load))

    def stored(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self.heard.append((now, "stored", blocks))
        self.stored_blocks.update(blocks)

    def evicted(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self.heard.append((now, "evicted", blocks))
        self.stored_blocks.difference_update(blocks)

    def of(self, kind: str) -> list[tuple[float, object]]:
        return [(at, what) for at, said, what in self.heard if said == kind]


class Heaped(Policy):
    """Everything to the first candidate, at most `most` at a time."""

    def __init__(self, most: int) -> None:
        self._left = most

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket | None:
        if not self._left:
            return None
        self._left -= 1
        return Ticket(request, candidates[0])

    def ended(self, ticket: Ticket, usage: Usage | None, now: float) -> None:
        self._left += 1


def fleet(replicas: int = 2, **changes: object) -> FleetSettings:
    return FleetSettings(**{"replicas": replicas, "limits": SMALL, "startup_s": 5.0, **changes})  # type: ignore[arg-type]


def run_many(seed: int, *, gateways: int = 2, count: int = 60) -> Result:
    """A busy fleet in which much goes wrong."""
    failures = (Failure(at=0.7, replica=0), Failure(at=1.5, replica=1), Failure(at=1.6, replica=3))
    settings = fleet(4, failures=failures, startup_s=0.8, events=KvEvents(loss=0.3), replicas_per_group=2, ranks=2)
    routers = [DirectGateway(InTurn(ranks=2)) for _ in range(gateways)]
    return simulate(settings, OpenLoad(requests(count, seed=seed)), routers, seed=seed, sharing_delay_s=0.01)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 3))
def test_every_request_gets_exactly_one_outcome(seed: int, gateways: int) -> None:
    """Also when replicas die under it; what completed has all its tokens, and the engines made no fewer."""
    result = run_many(seed, gateways=gateways)
    asked = {request.id: request for request in requests(60, seed=seed)}
    assert [record.id for record in result.requests] == sorted(asked)
    for record in result.requests:
        request = asked[record.id]
        assert record.outcome in (RequestOutcome.COMPLETED, RequestOutcome.FAILED)
        assert record.attempts >= 1
        assert record.cached_tokens < record.prompt_tokens == request.prompt_tokens
        if record.outcome is RequestOutcome.COMPLETED:
            assert record.output_tokens == request.output_tokens
            assert record.sent_at is not None
            assert record.first_token_at is not None
            assert record.arrives_at <= record.sent_at < record.first_token_at <= record.ended_at
    completed = [record for record in result.requests if record.outcome is RequestOutcome.COMPLETED]
    assert sum(rank.generated_tokens for rank in result.ranks) >= sum(record.output_tokens for record in completed)
    for rank in result.ranks:
        assert all(0 <= sample.kv_usage <= 1 for sample in rank.samples)
        assert rank.busy_s <= result.ended_at + 1e-9


def test_the_same_seed_gives_the_same_result() -> None:
    """To the last digit; another seed does not."""
    assert run_many(3) == run_many(3)
    assert run_many(3) != run_many(4)


def test_without_failures_tokens_add_up() -> None:
    """What was computed, read from the cache and generated is what the requests had."""
    result = simulate(fleet(limits=EngineLimits()), OpenLoad(requests(80)), [DirectGateway(InTurn())], seed=1)
    records = result.requests
    assert sum(rank.generated_tokens for rank in result.ranks) == sum(record.output_tokens for record in records)
    cached = sum(record.cached_tokens for record in records)
    assert cached == sum(rank.cached_tokens for rank in result.ranks) > 0
    assert sum(rank.prefilled_tokens for rank in result.ranks) == sum(record.prompt_tokens for record in records) - cached


def test_work_that_does_not_fit_is_preempted_and_still_ends() -> None:
    """A KV cache far too small for the batch costs time, never a request."""
    limits = EngineLimits(kv_capacity_tokens=400, max_num_seqs=16, max_num_batched_tokens=256)
    load = OpenLoad(requests(40, rate=1000.0, output=120))
    result = simulate(fleet(1, limits=limits), load, [DirectGateway(InTurn())], seed=1)
    assert sum(rank.preemptions for rank in result.ranks) > 10
    assert {record.outcome for record in result.requests} == {RequestOutcome.COMPLETED}
    assert sum(record.preemptions for record in result.requests) == result.ranks[0].preemptions


def test_a_killed_replica_loses_its_cache_but_no_request() -> None:
    """Its requests are sent elsewhere; it gets nothing while it is away, and begins anew afterwards."""
    policy = Recorder()
    prompt = list(range(200))
    load = OpenLoad(
        [request_of(number, 1.0 + number / 100, prompt, fresh(random.Random(number), 200)) for number in range(4)]
        + [request_of(10 + number, 3.0 + number, prompt, [1, 2]) for number in range(6)]
    )
    settings = fleet(2, failures=(Failure(at=1.5, replica=0),), startup_s=4.0)
    result = simulate(settings, load, [DirectGateway(policy)], seed=0)
    records = {record.id: record for record in result.requests}
    assert all(record.outcome is RequestOutcome.COMPLETED for record in records.values())
    assert [records[number].attempts for number in range(4)] == [2, 1, 2, 1]
    assert all(records[number].replica == "r1" for number in (0, 1, 2, 3, 10, 11))
    assert policy.of("restarted") == [(0.0, "r0")]
    later = [records[number] for number in range(13, 16) if records[number].replica == "r0"]
    assert later[0].cached_tokens == 0
    assert all(record.cached_tokens > 0 for record in later[1:])
    assert not +policy.in_flight


def test_a_request_whose_replicas_die_too_often_fails() -> None:
    """And its place in the policy's accounts is given back each time."""
    policy = Recorder()
    failures = tuple(Failure(at=1.0 + number, replica=0) for number in range(3))
    load = OpenLoad([request_of(0, 0.5, [1] * 50, fresh(random.Random(0), 1500))])
    result = simulate(fleet(1, failures=failures, startup_s=0.5), load, [DirectGateway(policy)], seed=0)
    assert result.requests[0].outcome is RequestOutcome.FAILED
    assert result.requests[0].attempts == 3
    assert [usage for _, usage in policy.of("ended")] == [None] * 3
    assert not +policy.in_flight


def test_a_group_steps_at_the_pace_of_its_slowest_member_and_dies_with_it() -> None:
    """A neighbour's long prefill is felt in the answers of the whole expert-parallel group, and nowhere else."""
    load = [request_of(number, 0.0, fresh(random.Random(number), 20), fresh(random.Random(number), 300)) for number in range(4)]
    load.append(request_of(9, 1.0, fresh(random.Random(9), 8000), [1]))
    settings = FleetSettings(replicas=4, replicas_per_group=2)
    result = simulate(settings, OpenLoad(load), [DirectGateway(InTurn())], seed=0)
    gaps = [record.itl_worst_s or 0.0 for record in result.requests[:4]]
    assert gaps[0] > 0.5
    assert gaps[1] == pytest.approx(gaps[0])
    assert max(gaps[2:]) < 0.02
    failing = FleetSettings(replicas=4, replicas_per_group=2, failures=(Failure(at=0.5, replica=1),))
    result = simulate(failing, OpenLoad(load[:4]), [DirectGateway(InTurn())], seed=0)
    assert [record.attempts for record in result.requests] == [2, 2, 1, 1]


def test_usage_is_what_the_engine_would_report() -> None:
    """Prompt, answer, and what came from the prefix cache."""
    policy = Recorder()
    load = OpenLoad([request_of(0, 0.0, [7] * 64, [1, 2, 3]), request_of(1, 5.0, [7] * 64, [1, 2])])
    simulate(fleet(1), load, [DirectGateway(policy)], seed=0)
    assert [usage for _, usage in policy.of("ended")] == [Usage(64, 3, 0), Usage(64, 2, 48)]


def test_kv_events_come_late_and_may_be_lost() -> None:
    """After their delay they tell exactly what the engine has; lost ones are never told."""
    heard = {}
    for loss in (0.0, 0.4, 1.0):
        policy = Recorder()
        settings = fleet(1, events=KvEvents(delay_s=0.25, loss=loss), network_delay_s=0.0)
        load = OpenLoad([*requests(30), request_of(99, 10.0, [1], [1])])  # the last one lets the last event arrive
        simulate(settings, load, [DirectGateway(policy)], seed=0)
        heard[loss] = policy
    first_token = heard[0.0].of("first_token")[0][0]
    assert heard[0.0].of("stored")[0][0] == pytest.approx(first_token + 0.25)
    assert heard[0.0].of("evicted")
    assert not heard[1.0].of("stored")
    assert 0 < len(heard[0.4].of("stored")) < len(heard[0.0].of("stored"))
    assert 0 < len(heard[0.0].stored_blocks) <= SMALL.kv_capacity_tokens // SMALL.kv_block_tokens


def test_scraped_loads_are_old() -> None:
    """They say what was true a delay ago."""
    policy = Recorder()
    load = OpenLoad(
        [request_of(number, 0.0, fresh(random.Random(number), 20), fresh(random.Random(5), 50)) for number in range(3)]
    )
    simulate(fleet(1, scrape_interval_s=0.1, scrape_delay_s=0.03), load, [DirectGateway(policy)], seed=0)
    at, scraped = policy.of("scraped")[0]
    assert at == pytest.approx(0.13)
    assert isinstance(scraped, EngineLoad)
    assert (scraped.running, scraped.waiting) == (3, 0)
    assert 3 * 2 * 16 / 1600 <= scraped.kv_usage < 0.1


def test_the_network_takes_its_time_both_ways() -> None:
    """The time to the first token is what the router sees."""
    load = [request_of(0, 1.0, [1] * 16, [1])]
    near, far = (
        simulate(fleet(1, network_delay_s=delay), OpenLoad(load), [DirectGateway(InTurn())], seed=0).requests[0].ttft_s
        for delay in (0.0, 0.2)
    )
    assert near == pytest.approx(H200_GLM.base_s + 16 / 16_000)
    assert far == pytest.approx((near or 0.0) + 0.4)


def test_what_a_policy_does_not_place_waits_in_order() -> None:
    """It is tried again as soon as something has ended."""
    load = [request_of(number, number / 1000, fresh(random.Random(number), 20), [1] * 20) for number in range(5)]
    result = simulate(fleet(2), OpenLoad(load), [DirectGateway(Heaped(most=1))], seed=0)
    for earlier, later in itertools.pairwise(result.requests):
        assert later.sent_at == earlier.ended_at


def test_routers_that_share_hear_of_each_others_placements() -> None:
    """After the delay, once each, and without sharing never."""
    for sharing in (0.05, None):
        policies = [Recorder(), Recorder()]
        load = OpenLoad([*requests(40), request_of(99, 20.0, [1], [1])])
        result = simulate(fleet(2), load, [DirectGateway(policy) for policy in policies], seed=0, sharing_delay_s=sharing)
        placed = Counter(record.gateway for record in result.requests)
        assert placed[0] > 5
        assert placed[1] > 5
        if sharing is None:
            assert not policies[0].of("adopt")
            assert not policies[1].of("adopt")
            continue
        for mine, other in ((0, 1), (1, 0)):
            theirs = [at + sharing for at, _ in policies[other].of("place")]
            adopted = [at for at, _ in policies[mine].of("adopt")]
            assert adopted == pytest.approx(theirs[: len(adopted)])
            assert len(adopted) >= len(theirs) - 1  # the run may end before the last one is told


def test_ranks_of_a_replica_are_engines_of_their_own() -> None:
    """A prefix cached on one rank is unknown to the other; the replica may choose the rank itself."""
    load = [request_of(number, float(number), [7] * 64, [1, 2]) for number in range(4)]
    result = simulate(fleet(1, ranks=2), OpenLoad(load), [DirectGateway(InTurn(ranks=2))], seed=0)
    assert [(record.rank, record.cached_tokens) for record in result.requests] == [(0, 0), (1, 0), (0, 48), (1, 48)]
    burst = [request_of(number, 0.0, fresh(random.Random(number), 64), [1, 2]) for number in range(4)]
    picked = simulate(fleet(1, ranks=2, engine_picks_rank=True), OpenLoad(burst), [DirectGateway(InTurn())], seed=0)
    assert Counter(record.rank for record in picked.requests) == {0: 2, 1: 2}
    with pytest.raises(ValueError, match="request 1 was placed on rank 1 of r0, which has 1"):
        simulate(fleet(1), OpenLoad(load), [DirectGateway(InTurn(ranks=2))], seed=0)


def test_a_session_goes_on_after_each_answer_and_ends_with_a_failure() -> None:
    """Follow-ups come from completed requests only, and none behind the horizon."""
    turns = [request_of(number, 0.5, [7] * (20 + 20 * number), fresh(random.Random(number), 30)) for number in range(3)]
    result = simulate(fleet(1), SessionLoad(turns[:1], [turns], 1.0), [DirectGateway(InTurn())], seed=0)
    assert [record.outcome for record in result.requests] == [RequestOutcome.COMPLETED] * 3
    assert result.requests[1].arrives_at >= result.requests[0].ended_at + 1.0
    turns = [request_of(number, 0.5, [7] * (20 + 20 * number), fresh(random.Random(number), 30)) for number in range(3)]
    failing = fleet(1, failures=(Failure(at=0.6, replica=0),), attempts_max=1)
    result = simulate(failing, SessionLoad(turns[:1], [turns], 1.0), [DirectGateway(InTurn())], seed=0)
    assert [record.outcome for record in result.requests] == [RequestOutcome.FAILED]


def test_a_run_is_cut_off_after_its_grace() -> None:
    """What is not done by then is unfinished, with what it got so far."""
    load = OpenLoad([request_of(0, 0.0, [1] * 20, fresh(random.Random(0), 1500)), request_of(1, 0.5, [1], [1])], horizon_s=1.0)
    result = simulate(fleet(1), load, [DirectGateway(InTurn())], seed=0, grace_s=1.0)
    assert result.ended_at == 2.0
    assert [record.outcome for record in result.requests] == [RequestOutcome.UNFINISHED, RequestOutcome.COMPLETED]
    assert 200 < result.requests[0].output_tokens < 300
    assert not result.requests[0].is_good
    assert result.requests[1].is_good


def test_decisions_are_timed_by_the_clock_that_was_given() -> None:
    """No other clock is read."""
    clock = itertools.count(0, 250)
    gateway = DirectGateway(InTurn(), clock_ns=lambda: next(clock))
    result = simulate(fleet(2), OpenLoad(requests(7)), [gateway], seed=0)
    assert result.decision_ns == (250,) * 7
    assert simulate(fleet(2), OpenLoad(requests(7)), [DirectGateway(InTurn())], seed=0) == result


class Refusing(DirectGateway):
    """Refuses every other request, and counts its ticks."""

    tick_interval_s = 0.1

    def __init__(self) -> None:
        super().__init__(InTurn())
        self._ticks = 0
        self._out: Outlet | None = None

    def connect(self, outlet: Outlet) -> None:
        super().connect(outlet)
        self._out = outlet

    def submit(self, request: SimRequest, now: float) -> None:
        if request.id % 2:
            assert self._out is not None
            self._out.refuse(request, 1.5, now)
        else:
            super().submit(request, now)

    def tick(self, now: float) -> None:
        self._ticks += 1

    @property
    def facts(self) -> Mapping[str, float]:
        return {"ticks": float(self._ticks)}


def test_a_gateway_may_refuse_and_says_when_to_come_again() -> None:
    """Refused requests never reach a replica."""
    result = simulate(fleet(2), OpenLoad(requests(10)), [Refusing()], seed=0)
    for record in result.requests:
        expected = RequestOutcome.REFUSED if record.id % 2 else RequestOutcome.COMPLETED
        assert record.outcome is expected
        assert (record.retry_after_s, record.replica is None) == ((1.5, True) if record.id % 2 else (None, False))
    assert result.gateway_facts["ticks"] == pytest.approx(result.ended_at / 0.1, abs=1.0)


class Doubling(DirectGateway):
    """Sends everything twice."""

    def connect(self, outlet: Outlet) -> None:
        super().connect(outlet)
        self._out = outlet

    def submit(self, request: SimRequest, now: float) -> None:
        super().submit(request, now)
        self._out.send(request, Ticket(request, ReplicaId("r0")), now)


def test_mistakes_of_gateways_and_workloads_are_told() -> None:
    """A request cannot be in two places, and ids and times must make sense."""
    with pytest.raises(ValueError, match="request 0 was sent, but it is not waiting in a gateway"):
        simulate(fleet(1), OpenLoad(requests(1)), [Doubling(InTurn())], seed=0)
    with pytest.raises(ValueError, match="request id 0 came twice"):
        simulate(fleet(1), OpenLoad([*requests(1), *requests(1)]), [DirectGateway(InTurn())], seed=0)
    with pytest.raises(ValueError, match="gateways is empty"):
        simulate(fleet(1), OpenLoad(requests(1)), [], seed=0)
    with pytest.raises(ValueError, match="grace_s is -1"):
        simulate(fleet(1), OpenLoad(requests(1)), [DirectGateway(InTurn())], seed=0, grace_s=-1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replicas": 0}, "replicas is 0, but must be 1 or more"),
        ({"replicas": 4, "replicas_per_group": 3}, r"replicas_per_group is 3, but must be a divisor of replicas \(4\)"),
        ({"scrape_interval_s": 0.0}, "scrape_interval_s is 0.0, but must be above 0"),
        ({"startup_s": -1.0}, "startup_s is -1.0"),
        ({"failures": (Failure(at=1.0, replica=9),)}, "failures is .* but must be of a replica from 0 to 1"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    """The message names the field, its value and what it must be."""
    with pytest.raises(ValueError, match=message):
        fleet(**changes)  # type: ignore[arg-type]


def test_limits_that_would_starve_a_running_sequence_are_refused() -> None:
    """Each running sequence needs its token in every step."""
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 8, but must be max_num_seqs \(256\) or more"):
        EngineLimits(max_num_batched_tokens=8)
    with pytest.raises(ValueError, match=r"loss is 1\.5"):
        KvEvents(loss=1.5)
