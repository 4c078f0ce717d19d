"""The workloads send what their names promise, the same for every policy, and never behind their horizon."""

import heapq
import statistics
from functools import cache
from itertools import count, pairwise
from random import Random

import pytest

from router.sim.request import SimRequest
from router.sim.workload import Workload
from router.sim.workloads.catalogue import SCENARIOS
from router.sim.workloads.draws import Quantiles, Skewed, arrivals
from router.sim.workloads.issuer import Issuer
from router.sim.workloads.rollouts import GroupShape, RolloutGroups


def played(workload: Workload, seed: int = 1, seconds_per_token: float = 0.02) -> list[SimRequest]:
    """All requests in the order of their arrival, where each is answered at a fixed pace."""
    rng = Random(seed)
    order = count()
    waiting = [(request.arrives_at, next(order), request) for request in workload.initial(rng)]
    assert [at for at, _, _ in waiting] == sorted(at for at, _, _ in waiting)
    heapq.heapify(waiting)
    ended: list[tuple[float, int, SimRequest]] = []
    requests = []
    while waiting or ended:
        if ended and (not waiting or ended[0][0] < waiting[0][0]):
            now, _, request = heapq.heappop(ended)
            for following in workload.follow_up(request, now, rng):
                assert following.arrives_at >= now
                if following.arrives_at < workload.horizon_s:
                    heapq.heappush(waiting, (following.arrives_at, next(order), following))
            continue
        at, _, request = heapq.heappop(waiting)
        requests.append(request)
        heapq.heappush(ended, (at + seconds_per_token * request.output_tokens, next(order), request))
    return requests


@cache
def scenario(name: str) -> list[SimRequest]:
    """At load 1.0, as long as it is meant to be. Not to be changed."""
    return played(SCENARIOS[name].build(1.0, SCENARIOS[name].duration_s))


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_workload_sends_sound_requests(name: str) -> None:
    """Ids are unique, sizes fit the blocks, arrivals lie before the horizon, and each request fits on a replica."""
    found, requests = SCENARIOS[name], scenario(name)
    workload = found.build(1.0, found.duration_s)
    assert (workload.name, workload.horizon_s) == (name, found.duration_s)
    assert 500 < len(requests) < 10_000
    assert len({request.id for request in requests}) == len(requests)
    for request in requests:
        assert 0 <= request.arrives_at < workload.horizon_s
        assert len(request.blocks) == request.prompt_tokens // 16
        total = request.prompt_tokens + request.output_tokens
        assert len(request.answer_blocks) == total // 16 - len(request.blocks)
        assert total <= found.fleet.limits.kv_capacity_tokens
        assert request.output_max is not None
        assert 1 <= request.output_tokens <= request.output_max


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_seed_gives_the_same_requests_again_and_another_seed_others(name: str) -> None:
    """Policies are compared on the same traffic."""

    def gist(seed: int) -> list[tuple[float, int, int, str, int]]:
        requests = played(SCENARIOS[name].build(0.3, 20.0), seed)
        return [(one.arrives_at, one.prompt_tokens, one.output_tokens, one.tenant, sum(one.blocks)) for one in requests]

    assert gist(1) == gist(1)
    assert gist(1) != gist(2)


@pytest.mark.parametrize("name", ["ladder_73", "agents", "extraction", "no_reuse", "giant_prefix"])
def test_load_multiplies_the_rate(name: str) -> None:
    """Twice the load is twice the requests, so that past saturation is one number away."""
    counts = [len(played(SCENARIOS[name].build(load, 40.0))) for load in (1.0, 2.0)]
    assert counts[1] / counts[0] == pytest.approx(2.0, rel=0.25)


def test_the_ladders_have_the_published_shape() -> None:
    """150 system prompts of 6000 tokens, five users behind each with 1200 of their own, and a rate that rises twentyfold."""
    requests = scenario("ladder_73")
    assert {(one.prompt_tokens, one.output_tokens) for one in requests} == {(7200, 1000)}
    assert len({tuple(one.blocks) for one in requests}) == 750
    assert len({one.blocks[374] for one in requests}) == 150
    horizon = SCENARIOS["ladder_73"].duration_s
    first, last = (sum(low <= one.arrives_at / horizon < high for one in requests) for low, high in ((0, 0.05), (0.95, 1)))
    assert last / max(1, first) == pytest.approx(20.0, rel=0.6)
    working_set = 150 * 6000 + 750 * 1200
    fleet = SCENARIOS["ladder_73"].fleet
    assert working_set / (fleet.replicas * fleet.limits.kv_capacity_tokens) == pytest.approx(0.73, abs=0.01)


def test_sessions_grow_by_answer_and_step() -> None:
    """Each turn begins with the whole turn before it and its answer: what an engine kept is what the next turn needs."""
    turns: dict[str, list[SimRequest]] = {}
    for request in scenario("agents"):
        turns.setdefault(request.session, []).append(request)
    assert all([one.turn for one in session] == list(range(len(session))) for session in turns.values())
    long = [session for session in turns.values() if len(session) > 5]
    assert len(long) > 100
    for session in long:
        for before, after in pairwise(session):
            kept = [*before.blocks, *before.answer_blocks]
            assert list(after.blocks[: len(kept)]) == kept
            assert after.arrives_at >= before.arrives_at + 0.02 * before.output_tokens
            assert after.prompt.digest(before.prompt.size) == before.prompt.digest(before.prompt.size)
    begun_early = [session for session in turns.values() if session[0].arrives_at < 20]
    assert statistics.mean(map(len, begun_early)) == pytest.approx(8.0, rel=0.25)


def test_session_ids_are_sent_or_not() -> None:
    """The same traffic with and without what an affinity policy lives on."""
    told, untold = scenario("agents"), scenario("agents_anonymous")
    assert all(request.affinity == request.session for request in told)
    assert all(request.affinity is None for request in untold)
    assert [request.prompt_tokens for request in told] == [request.prompt_tokens for request in untold]


def test_dropped_reasoning_leaves_no_use_for_an_answers_blocks() -> None:
    """The history of a reasoning model is written otherwise than it was generated, and shorter."""
    turns = {(one.session, one.turn): one for one in scenario("agents_reasoning")}
    pairs = [(turns[session, turn - 1], one) for (session, turn), one in turns.items() if turn]
    assert len(pairs) > 100
    for before, after in pairs:
        assert list(after.blocks[: len(before.blocks)]) == list(before.blocks)
        assert not set(before.answer_blocks) & set(after.blocks)


def test_groups_are_siblings_within_a_tenth_of_a_second() -> None:
    """Sixteen identical prompts at once, with answers of very different lengths."""
    groups: dict[str, list[SimRequest]] = {}
    for request in scenario("rl_groups"):
        groups.setdefault(request.session, []).append(request)
    whole = [group for group in groups.values() if len(group) == 16]
    assert len(whole) >= len(groups) - 1
    for group in whole:
        assert len({one.prompt.digest(one.prompt.size) for one in group}) == 1
        assert max(one.arrives_at for one in group) - min(one.arrives_at for one in group) <= 0.1
    lengths = sorted(one.output_tokens for group in whole for one in group)
    assert lengths[-1] > 20 * lengths[len(lengths) // 2]


def test_rollouts_keep_their_number_in_flight() -> None:
    """A group comes when a whole one fits, and only then."""
    shape = GroupShape(4, 0.1, 16, Skewed(100, 0.1, 200), Skewed(10, 0.1, 20))
    workload = RolloutGroups("rl", Issuer(count(), ttft_target_s=1, output_max=20), shape, in_flight=10, horizon_s=50)
    rng = Random(1)
    first = list(workload.initial(rng))
    assert len(first) == 8
    assert workload.follow_up(first[0], 1.0, rng) == []
    assert len(workload.follow_up(first[1], 2.0, rng)) == 4
    assert list(workload.follow_up(first[2], 50.0, rng)) == []


def test_an_extraction_shares_each_jobs_template_and_nothing_else() -> None:
    """Documents differ; jobs come and go."""
    requests = scenario("extraction")
    templates: dict[int, list[SimRequest]] = {}
    for request in requests:
        templates.setdefault(request.blocks[0], []).append(request)
    assert len(templates) > 24
    assert all(len({one.blocks[-1] for one in jobs}) == len(jobs) for jobs in templates.values())
    assert max(map(len, templates.values())) <= 600


def test_controls_have_no_reuse_or_one_prefix() -> None:
    """What a cache-aware policy must not be misled by."""
    blocks = [block for request in scenario("no_reuse") for block in request.blocks]
    assert len(set(blocks)) == len(blocks)
    giants = scenario("giant_prefix")
    assert len({one.blocks[1249] for one in giants}) == 1
    own = [block for one in giants for block in one.blocks[1250:]]
    assert len(set(own)) == len(own)


def test_one_tenant_sends_twenty_times_another() -> None:
    """And with the calm variant no more than it, all else being equal."""
    for name, factor in (("mixed_tenants", 20.0), ("mixed_tenants_calm", 1.0)):
        tenants = [request.tenant for request in scenario(name)]
        assert set(tenants) == {"chat", "coding", "small", "large", "nightly"}
        assert tenants.count("large") / tenants.count("small") == pytest.approx(factor, rel=0.3)
    priorities = {(one.tenant, one.priority.value) for one in scenario("mixed_tenants")}
    assert {("chat", "interactive"), ("large", "default"), ("nightly", "batch")} <= priorities


def test_draws_follow_their_distribution() -> None:
    """Medians, quantiles and rates are those that were asked for."""
    rng = Random(3)
    sizes = [Skewed(100, 1.0, 2000).tokens(rng) for _ in range(20_000)]
    assert statistics.median(sizes) == pytest.approx(100, rel=0.05)
    assert max(sizes) == 2000
    turns = [Quantiles(((0.0, 5.0), (0.5, 29.0), (0.9, 56.0), (1.0, 99.0))).draw(rng) for _ in range(20_000)]
    assert min(turns) >= 5
    assert statistics.median(turns) == pytest.approx(29, rel=0.05)
    assert statistics.quantiles(turns, n=10)[-1] == pytest.approx(56, rel=0.05)
    times = list(arrivals((10.0, 0.0, 40.0), 300.0, rng))
    assert times == sorted(times)
    assert [sum(low <= at < low + 100 for at in times) for low in (0, 100, 200)] == [
        pytest.approx(1000, rel=0.12),
        0,
        pytest.approx(4000, rel=0.06),
    ]
