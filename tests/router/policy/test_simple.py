"""Where a request goes under the policies that look at no cache."""

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.interface import PlacementRequest, Policy, ReplicaFacts, Ticket
from router.policy.prompt import BytesPrompt
from router.policy.simple import ConsistentHash, LeastLoaded, PowerOfTwo, Random, RoundRobin
from router.types import ReplicaId

POLICIES: tuple[Callable[[random.Random], Policy], ...] = (RoundRobin, Random, LeastLoaded, PowerOfTwo, ConsistentHash)
IDS = [ReplicaId(f"r{index}") for index in range(10)]


def request(prompt: bytes = b"hello", *, affinity: str | None = None, tenant: str = "") -> PlacementRequest:
    return PlacementRequest("m", BytesPrompt(prompt, 7), affinity=affinity, tenant=tenant)


def placed(policy: Policy, candidates: Sequence[ReplicaId], asked: PlacementRequest | None = None) -> ReplicaId:
    ticket = policy.place(asked or request(), candidates, 0.0)
    assert ticket is not None
    return ticket.replica


def loaded(policy: Policy, in_flight: Sequence[int]) -> list[ReplicaId]:
    """Fills the replicas with that many requests each."""
    ids = [ReplicaId(f"r{index}") for index in range(len(in_flight))]
    for replica, count in zip(ids, in_flight, strict=True):
        for _ in range(count):
            policy.adopt(request(), replica, 0, 0.0)
    return ids


@given(st.lists(st.integers(0, 20), min_size=1, max_size=20), st.integers())
def test_least_loaded_never_picks_a_replica_that_is_busier_than_another(in_flight: list[int], seed: int) -> None:
    """A request never waits behind more requests than it has to."""
    policy = LeastLoaded(random.Random(seed))
    ids = loaded(policy, in_flight)
    assert in_flight[ids.index(placed(policy, ids))] == min(in_flight)


def test_least_loaded_spreads_ties_over_all_of_them() -> None:
    """Two routers that start together do not send all their first requests to the same replica."""
    policy = LeastLoaded(random.Random(1))
    ids = loaded(policy, [2, 2, 5, 2])
    chosen: Counter[ReplicaId] = Counter()
    for _ in range(300):
        ticket = policy.place(request(), ids, 0.0)
        chosen[ticket.replica] += 1
        policy.ended(ticket, None, 1.0)
    assert {replica: count > 60 for replica, count in chosen.items()} == {"r0": True, "r1": True, "r3": True}


def test_least_loaded_follows_requests_that_end() -> None:
    """A replica whose answers are short gets the requests that it has room for."""
    policy = LeastLoaded(random.Random(1))
    tickets = [policy.place(request(), IDS[:2], 0.0) for _ in range(6)]
    assert Counter(ticket.replica for ticket in tickets) == {"r0": 3, "r1": 3}
    for ticket in tickets:
        if ticket.replica == "r1":
            policy.ended(ticket, None, 1.0)
    assert [placed(policy, IDS[:2]) for _ in range(3)] == ["r1"] * 3


def test_power_of_two_takes_the_less_loaded_of_the_two_it_draws() -> None:
    """The busiest replica gets nothing, and every other gets its share."""
    policy = PowerOfTwo(random.Random(2))
    ids = loaded(policy, [50, 0, 0, 0])
    chosen = Counter(placed(policy, ids) for _ in range(120))
    assert chosen[IDS[0]] == 0
    assert all(chosen[replica] > 25 for replica in ids[1:])


def test_power_of_two_is_far_more_even_than_random() -> None:
    """With 10 000 requests in flight on 10 replicas, the largest queue is hardly longer than the mean."""
    counts = {}
    for make in (PowerOfTwo, Random):
        policy = make(random.Random(3))
        counts[make] = Counter(placed(policy, IDS) for _ in range(10_000))
    assert max(counts[PowerOfTwo].values()) < 1_010
    assert max(counts[Random].values()) > 1_025


def test_random_is_even_in_the_long_run() -> None:
    """No replica is preferred."""
    policy = Random(random.Random(4))
    chosen = Counter(placed(policy, IDS) for _ in range(10_000))
    assert all(850 < chosen[replica] < 1_150 for replica in IDS)


def test_round_robin_gives_each_its_turn_also_while_one_is_away() -> None:
    """A replica that restarts loses its turns, and nobody else's order changes."""
    policy = RoundRobin(random.Random(0))
    a, b, c = IDS[:3]
    while placed(policy, [b, a, c]) != c:
        pass
    order = [placed(policy, pool) for pool in ([a, b, c], [c, b, a], [a, c], [a, c], [a, b, c], [a, b, c])]
    assert order == ["r0", "r1", "r2", "r0", "r1", "r2"]


def test_routers_that_start_together_do_not_go_round_in_step() -> None:
    """The first turn is drawn by lot."""
    assert len({placed(RoundRobin(random.Random(seed)), IDS) for seed in range(50)}) > 5


def test_requests_of_one_session_stay_together_and_sessions_spread() -> None:
    """A session's KV cache is used by its next turn, and no replica gets much more than its share of sessions."""
    policy = ConsistentHash(random.Random(5))
    home = {session: placed(policy, IDS, request(affinity=str(session))) for session in range(5_000)}
    assert all(
        placed(policy, IDS, request(b"another turn", affinity=str(session))) == home[session] for session in range(0, 5_000, 50)
    )
    shares = Counter(home.values())
    assert all(350 < shares[replica] < 650 for replica in IDS)


def test_the_same_session_id_of_two_tenants_is_two_sessions() -> None:
    """Clients that number their sessions from 1 do not all meet on one replica."""
    policy = ConsistentHash(random.Random(5))
    assert len({placed(policy, IDS, request(affinity="1", tenant=str(tenant))) for tenant in range(50)}) > 5


@pytest.mark.parametrize(
    ("prompts", "together"),
    [
        ([b"s" * 1024 + b"one", b"s" * 1024 + b"two" * 200], True),  # the same first chunk
        ([b"t" * 1023, b"t" * 1023], True),  # too short for a chunk, and equal
        ([b"%d" % number for number in range(50)], False),  # short and different: nothing to share
        ([b"%03d" % number * 400 for number in range(50)], False),
    ],
)
def test_without_a_session_id_the_beginning_of_the_prompt_decides(prompts: list[bytes], together: bool) -> None:
    """Requests that share a system prompt share a replica; others are spread."""
    policy = ConsistentHash(random.Random(6))
    chosen = {placed(policy, IDS, request(prompt, tenant="acme")) for prompt in prompts}
    assert (len(chosen) == 1) is together


def test_requests_without_a_prompt_are_kept_together_by_tenant() -> None:
    """What a tenant sends to a route without prompts still goes to one replica."""
    policy = ConsistentHash(random.Random(6))
    by_tenant = {tenant: {placed(policy, IDS, request(b"", tenant=tenant)) for _ in range(5)} for tenant in "abcdefghijkl"}
    assert all(len(chosen) == 1 for chosen in by_tenant.values())
    assert len(set().union(*by_tenant.values())) > 1


@pytest.mark.parametrize("told", [False, True])
def test_only_the_sessions_of_a_replica_that_leaves_move(told: bool) -> None:
    """The others keep their caches, the moved ones are spread over all that remain, and they return with the replica."""
    policy = ConsistentHash(random.Random(7))
    for replica in IDS:
        policy.changed(ReplicaFacts(replica))
    sessions = [request(affinity=str(session)) for session in range(2_000)]
    before = [placed(policy, IDS, session) for session in sessions]
    if told:
        policy.removed(IDS[3])
    remaining = [replica for replica in IDS if replica != IDS[3]]
    without = [placed(policy, remaining, session) for session in sessions]
    assert all(new == old for new, old in zip(without, before, strict=True) if old != IDS[3])
    assert len({new for new, old in zip(without, before, strict=True) if old == IDS[3]}) == 9
    assert [placed(policy, IDS, session) for session in sessions] == before


def test_two_routers_hash_alike_whatever_they_learned_first() -> None:
    """A session finds its replica through any router."""
    one, other = ConsistentHash(random.Random(1)), ConsistentHash(random.Random(2))
    placed(other, IDS[5:])
    for session in range(100):
        assert placed(one, IDS, request(affinity=str(session))) == placed(other, IDS[::-1], request(affinity=str(session)))


def test_a_replica_whose_points_are_all_far_away_is_found() -> None:
    """The last candidate left is chosen, however many replicas stand before it on the ring."""
    policy = ConsistentHash(random.Random(8), points=1)
    for replica in IDS:
        policy.changed(ReplicaFacts(replica))
    assert all(placed(policy, [replica], request(affinity=str(session))) == replica for replica in IDS for session in range(20))


@pytest.mark.parametrize("make", POLICIES)
def test_every_policy_works_with_a_single_replica(make: Callable[[random.Random], Policy]) -> None:
    """A stack of one replica serves under any policy."""
    policy = make(random.Random(0))
    assert [placed(policy, IDS[:1]) for _ in range(3)] == ["r0"] * 3


Step = tuple[str, list[ReplicaId], int]
CANDIDATES = st.lists(st.sampled_from(IDS[:5]), min_size=1, max_size=5, unique=True)
STEPS = st.lists(
    st.tuples(st.sampled_from(["place", "place", "adopt", "ended", "removed", "changed"]), CANDIDATES, st.integers(0, 99)),
    max_size=60,
)


@pytest.mark.parametrize("make", POLICIES)
@given(steps=STEPS, seed=st.integers(0, 5))
def test_a_policy_chooses_only_candidates_and_counts_exactly(
    make: Callable[[random.Random], Policy], steps: list[Step], seed: int
) -> None:
    """Whatever comes and goes, no request is sent to a replica that was not offered, and no count is lost or negative."""
    policy = make(random.Random(seed))
    tickets: list[Ticket] = []
    for step, candidates, number in steps:
        if step == "place":
            ticket = policy.place(request(affinity=str(number)), candidates, 0.0)
            assert ticket is not None
            assert ticket.replica in candidates
            tickets.append(ticket)
        elif step == "adopt":
            tickets.append(policy.adopt(request(), candidates[0], 0, 0.0))
        elif step == "ended" and tickets:
            policy.ended(tickets.pop(number % len(tickets)), None, 0.0)
        elif step == "removed":
            policy.removed(candidates[0])
        elif step == "changed":
            policy.changed(ReplicaFacts(candidates[0]))
        if isinstance(policy, LeastLoaded | PowerOfTwo):
            open_tickets = Counter(ticket.replica for ticket in tickets)
            assert [policy.in_flight(replica) for replica in IDS] == [open_tickets[replica] for replica in IDS]
