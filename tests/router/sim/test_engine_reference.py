"""The simulator's engine agrees with the stepwise scheduler behind the simulated HTTP engine, to the step and the token."""

import heapq
import random
from dataclasses import dataclass
from itertools import pairwise

import pytest

from router.sim.cluster import simulate
from router.sim.fleet import EngineLimits, FleetSettings
from router.sim.gateway import DirectGateway
from router.sim.request import SimRequest
from router.sim.result import RequestOutcome, RequestRecord
from router.sim.timing import StepTiming
from server.sim_generation import Emission, FinishReason
from server.sim_scheduler import Scheduler, SequenceState
from server.sim_settings import SchedulerSettings, TimingModel
from tests.router.sim.loads import InTurn, SessionLoad, fresh, request_of

WEIGHTS = b"weights"
BLOCK = 4
THINK_S = 0.35


@dataclass(frozen=True, slots=True)
class Limits:
    blocks: int
    batch: int
    budget: int


class Recited:
    """An answer that is known beforehand."""

    def __init__(self, name: str, answer: list[int]) -> None:
        self._name = name
        self._answer = answer
        self._said = 0

    def mark_stale(self) -> None:
        raise AssertionError("the weights never change here")

    def advance(self, fingerprint: bytes, *, room: int) -> Emission:
        token = self._answer[self._said]
        self._said += 1
        is_last = self._said == len(self._answer)
        return Emission(self._name, token, finish_reason=FinishReason.LENGTH if is_last else None)


Turn = tuple[SimRequest, list[int], list[int]]  # with prompt and answer


def conversations(seed: int, sessions: int) -> list[list[Turn]]:
    """Sessions of one to four turns, each turn the whole conversation so far and something new."""
    rng = random.Random(seed)
    chains: list[list[Turn]] = []
    number = 0
    for session in range(sessions):
        at = rng.uniform(0, 3)
        history: list[int] = []
        chain: list[Turn] = []
        for _ in range(rng.randint(1, 4)):
            prompt = [*history, *fresh(rng, rng.randint(1, 60))]
            answer = fresh(rng, rng.randint(1, 50))
            chain.append((request_of(number, at, prompt, answer, block=BLOCK, session=str(session)), prompt, answer))
            history = [*prompt, *answer]
            number += 1
        chains.append(chain)
    return chains


def stepwise(chains: list[list[Turn]], limits: Limits, timing: TimingModel) -> dict[str, SequenceState]:
    """The same sessions on the stepwise scheduler."""
    scheduler = Scheduler(
        SchedulerSettings(
            max_num_seqs=limits.batch,
            max_num_batched_tokens=limits.budget,
            max_model_len=limits.blocks * BLOCK,
            block_size=BLOCK,
            num_blocks=limits.blocks,
        ),
        timing,
        WEIGHTS,
    )
    following: dict[str, Turn] = {}
    arrivals: list[tuple[float, int, Turn]] = []
    for chain in chains:
        heapq.heappush(arrivals, (chain[0][0].arrives_at, chain[0][0].id, chain[0]))
        following |= {str(turn[0].id): later for turn, later in pairwise(chain)}
    now = 0.0
    states: dict[str, SequenceState] = {}
    while arrivals or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            at, _, (request, prompt, answer) = heapq.heappop(arrivals)
            name = str(request.id)
            states[name] = SequenceState(name, prompt, Recited(name, answer), arrived_at=at)
            scheduler.add(states[name])
        step = scheduler.step(now)
        now += step.seconds
        for state in step.finished:
            if (later := following.get(state.id)) is not None:
                heapq.heappush(arrivals, (now + THINK_S * (1 + later[0].id / 1000), later[0].id, later))
    return states


def both(seed: int, limits: Limits) -> list[tuple[RequestRecord, SequenceState]]:
    """What became of each request in the simulator and on the stepwise scheduler."""
    chains = conversations(seed, sessions=30)
    states = stepwise(
        chains,
        limits,
        TimingModel(prefill_tokens_per_s=4000.0, step_base_s=0.01, decode_per_sequence_s=1e-3, decode_per_context_token_s=1e-5),
    )
    fleet = FleetSettings(
        replicas=1,
        limits=EngineLimits(
            kv_capacity_tokens=limits.blocks * BLOCK,
            kv_block_tokens=BLOCK,
            max_num_seqs=limits.batch,
            max_num_batched_tokens=limits.budget,
            reserve_full_prompt=False,
        ),
        timing=StepTiming(base_s=0.01, prefill_tokens_per_s=4000.0, per_sequence_s=1e-3, per_context_token_s=1e-5),
        network_delay_s=0.0,
    )
    turns = [[turn[0] for turn in chain] for chain in chains]
    load = SessionLoad([chain[0] for chain in turns], turns, THINK_S)
    result = simulate(fleet, load, [DirectGateway(InTurn())], seed=0)
    assert len(result.requests) == len(states)
    assert all(record.outcome is RequestOutcome.COMPLETED for record in result.requests)
    return [(record, states[str(record.id)]) for record in result.requests]


@pytest.mark.parametrize(
    "limits", [Limits(blocks=4000, batch=64, budget=256), Limits(blocks=4000, batch=5, budget=32)], ids=["large", "small"]
)
@pytest.mark.parametrize("seed", range(4))
def test_times_and_hits_equal_those_of_the_stepwise_scheduler(limits: Limits, seed: int) -> None:
    """Leaps over uneventful steps and counted blocks change nothing of what a client sees."""
    for record, state in both(seed, limits):
        assert record.first_token_at == pytest.approx(state.first_token_at, abs=1e-6)
        assert record.ended_at == pytest.approx(state.finished_at, abs=1e-6)
        assert record.cached_tokens == state.cached_tokens


def test_a_full_kv_cache_costs_as_much_as_on_the_stepwise_scheduler() -> None:
    """Preemptions, evictions and waiting come out alike.

    Not to the token: the stepwise scheduler counts a cache lookup of a prompt that then does not fit as a use of its blocks.
    """
    preempted = expected = 0
    first = expected_first = 0.0
    hits = expected_hits = 0
    for seed in range(6):
        for record, state in both(seed, Limits(blocks=120, batch=64, budget=64)):
            assert state.first_token_at is not None
            assert record.first_token_at is not None
            preempted, expected = preempted + record.preemptions, expected + state.preemptions
            hits, expected_hits = hits + record.cached_tokens, expected_hits + (state.cached_tokens or 0)
            first, expected_first = first + record.first_token_at, expected_first + state.first_token_at
    assert expected > 100
    assert preempted == pytest.approx(expected, rel=0.05)
    assert hits == pytest.approx(expected_hits, rel=0.05)
    assert first == pytest.approx(expected_first, rel=0.01)
