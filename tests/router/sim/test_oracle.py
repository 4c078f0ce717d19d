"""The oracle is a bar worth the name: with and without reuse it beats what looks at load or at caches alone."""

import random
from collections.abc import Callable, Sequence

import pytest

from router.policy.interface import PlacementRequest, Policy, Ticket
from router.policy.simple import LeastLoaded
from router.sim.cluster import simulate
from router.sim.fleet import EngineLimits, FleetSettings
from router.sim.gateway import DirectGateway
from router.sim.oracle import Oracle
from router.sim.request import SimRequest
from router.sim.result import RequestOutcome, Result
from router.types import ReplicaId
from tests.router.sim.loads import InTurn, OpenLoad, fresh, request_of

FLEET = FleetSettings(replicas=4, limits=EngineLimits(kv_capacity_tokens=40_000))


class LongestPrefix(Policy):
    """Where most of the prompt has been sent before; ties are random. It knows nothing of load."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._seen: dict[ReplicaId, set[int]] = {}

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket:
        known = [sum(block in self._seen.get(candidate, ()) for block in request.blocks) for candidate in candidates]
        chosen = self._rng.choice(
            [candidate for candidate, blocks in zip(candidates, known, strict=True) if blocks == max(known)]
        )
        self._seen.setdefault(chosen, set()).update(request.blocks)
        return Ticket(request, chosen)


OTHERS: list[Callable[[random.Random], Policy]] = [LeastLoaded, lambda rng: InTurn(), LongestPrefix]


def shared_prefixes(seed: int) -> list[SimRequest]:
    """24 system prompts of 2000 tokens that together do not fit on one replica, some asked far more often than others."""
    rng = random.Random(seed)
    systems = [fresh(rng, 2000) for _ in range(24)]
    weights = [1 / (number + 1) for number in range(24)]
    return arrivals(rng, 300, 55.0, lambda: [*rng.choices(systems, weights)[0], *fresh(rng, rng.randint(20, 300))], 150)


def no_reuse(seed: int) -> list[SimRequest]:
    """Prompts from short to very long, with nothing in common."""
    rng = random.Random(seed)
    return arrivals(rng, 250, 18.0, lambda: fresh(rng, min(8000, int(rng.lognormvariate(7, 0.9)) + 1)), 200)


def arrivals(rng: random.Random, count: int, rate: float, prompt: Callable[[], list[int]], output: int) -> list[SimRequest]:
    at, made = 0.0, []
    for number in range(count):
        at += rng.expovariate(rate)
        made.append(request_of(number, at, prompt(), fresh(rng, 1 + int(rng.expovariate(1 / output))), ttft_target_s=0.6))
    return made


def run(requests: list[SimRequest], policy: Policy, seed: int) -> Result:
    reveal_to = [policy] if isinstance(policy, Oracle) else []
    result = simulate(FLEET, OpenLoad(requests), [DirectGateway(policy)], seed=seed, reveal_to=reveal_to)
    assert all(record.outcome is RequestOutcome.COMPLETED for record in result.requests)
    return result


def p90(result: Result) -> float:
    waits = sorted(record.ttft_s or 0.0 for record in result.requests)
    return waits[len(waits) * 9 // 10]


def good(result: Result) -> int:
    return sum(record.is_good for record in result.requests)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("load", [shared_prefixes, no_reuse])
def test_it_beats_load_alone_and_caches_alone(load: Callable[[int], list[SimRequest]], seed: int) -> None:
    """More requests in time and a shorter wait than least loaded, round robin and longest prefix, each in its weakness."""
    requests = load(seed)
    oracle = run(requests, Oracle(random.Random(seed)), seed)
    for make in OTHERS:
        other = run(requests, make(random.Random(seed)), seed)
        assert good(oracle) >= good(other)
        assert p90(oracle) < p90(other)
    assert good(oracle) >= 0.95 * len(oracle.requests)


def test_groups_of_siblings_that_come_together_are_not_computed_everywhere() -> None:
    """What is about to be cached counts as cached, although no engine has it yet."""
    rng = random.Random(0)
    prompts = [fresh(rng, 4000) for _ in range(4)]
    load = [request_of(number, 1.0 + number / 1000, prompts[number // 6], [1] * 20) for number in range(24)]
    oracle, least_loaded = (run(load, make(random.Random(0)), 0) for make in (Oracle, LeastLoaded))
    computed, everywhere = (sum(rank.prefilled_tokens for rank in result.ranks) for result in (oracle, least_loaded))
    assert everywhere > 4 * 4 * 4000
    assert computed < 0.5 * everywhere
    assert p90(oracle) < 0.6 * p90(least_loaded)


def test_it_sees_what_a_router_cannot_know() -> None:
    """Of two replicas that look alike it takes the one whose long answer is nearly done: the KV cache is about to be free."""
    limits = EngineLimits(kv_capacity_tokens=2000)
    rng = random.Random(0)
    load = [request_of(0, 0.0, fresh(rng, 1500), fresh(rng, 400)), request_of(1, 0.001, fresh(rng, 1500), fresh(rng, 60))]
    load.append(request_of(2, 0.3, fresh(rng, 1000), fresh(rng, 10)))
    for seed in range(5):
        oracle = Oracle(random.Random(seed))
        fleet = FleetSettings(replicas=2, limits=limits)
        result = simulate(fleet, OpenLoad(load), [DirectGateway(oracle)], seed=seed, reveal_to=[oracle])
        long, short, last = result.requests
        assert long.replica != short.replica
        assert last.replica == short.replica


def test_it_keeps_requests_back_that_no_engine_could_start_soon() -> None:
    """A burst waits in the router, and all of it is served."""

    class Counted(Oracle):
        kept_back = 0

        def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket | None:
            ticket = super().place(request, candidates, now)
            self.kept_back += ticket is None
            return ticket

    rng = random.Random(0)
    patient = Counted(random.Random(0))
    run([request_of(number, 0.0, fresh(rng, 3000), [1] * 5) for number in range(40)], patient, 0)
    assert patient.kept_back > 0
