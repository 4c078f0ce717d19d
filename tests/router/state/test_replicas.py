"""What the router knows of its replicas, and the exactness of its counts."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocol.status import ReplicaState, ReplicaStatus
from router.state.replicas import Lease, Replica, ReplicaTable
from router.types import Endpoint, Health, Observation, ReplicaId, Verdict

ENDPOINT = Endpoint("127.0.0.1", 8200)


def seen(health: Health, *models: str) -> Observation:
    return Observation(health, engine=ENDPOINT, models=models or ("m",))


def add(table: ReplicaTable, name: str, health: Health = Health.READY, *models: str) -> Replica:
    replica = table.add(ReplicaId(name), f"http://{name}")
    table.observe(replica, seen(health, *models), 0)
    return replica


@pytest.mark.parametrize(
    ("healths", "expected"),
    [
        ([Health.READY, Health.READY], [0, 1]),
        ([Health.READY, Health.SWAPPING], [0]),  # a paused one would make the request wait
        ([Health.SWAPPING, Health.DOWN], [0]),  # but waiting is better than failing
        ([Health.DRAINING, Health.STARTING], []),
        ([Health.UNKNOWN, Health.DOWN], []),
    ],
)
def test_requests_go_to_ready_replicas_and_to_paused_ones_only_if_none_is_ready(
    healths: list[Health], expected: list[int]
) -> None:
    """A request is placed where it starts soonest, and during a swap of the only replica it waits instead of failing."""
    table = ReplicaTable()
    replicas = [add(table, f"r{index}", health) for index, health in enumerate(healths)]
    assert table.candidates("m") == [replicas[index] for index in expected]
    assert table.is_ready is bool(expected)


def test_a_drained_replica_gets_nothing_new_and_comes_back_when_told() -> None:
    """An operator can empty a replica without losing a request, and undo it."""
    table = ReplicaTable()
    replica = add(table, "a")
    table.drain(replica.id, True)
    assert table.candidates("m") == []
    table.observe(replica, seen(Health.READY), 0)
    assert table.candidates("m") == [], "a probe that finds it healthy does not undo the operator's order"
    table.drain(replica.id, False)
    assert table.candidates("m") == [replica]


def test_models_stay_listed_while_all_replicas_are_down() -> None:
    """A client that asks for a model during a restart is told to wait, not that the model does not exist."""
    table = ReplicaTable()
    replica = add(table, "a", Health.READY, "m", "m-lora")
    table.observe(replica, Observation(Health.DOWN, "connection refused"), 3)
    assert sorted(table.served) == ["m", "m-lora"]
    assert table.candidates("m") == []


def test_the_version_is_remembered_while_the_replica_is_down() -> None:
    """An operator sees what a dead replica served."""
    table = ReplicaTable()
    replica = table.add(ReplicaId("a"), "http://a")
    assert replica.checkpoint is None
    status = ReplicaStatus(state=ReplicaState.READY, engine_url="http://e:1", model="m", checkpoint="v2", epoch=1)
    table.observe(replica, Observation(Health.READY, engine=ENDPOINT, models=("m",), status=status), 0)
    table.observe(replica, Observation(Health.DOWN, "gone"), 3)
    assert replica.checkpoint == "v2+1"


def test_a_replica_added_again_while_old_requests_run_starts_at_zero() -> None:
    """Taking a replica out and in again under load never shows a negative or doubled count."""
    table = ReplicaTable()
    old = add(table, "a")
    lease = table.lease(old)
    table.remove(old.id)
    assert table.departing() == [old]
    new = add(table, "a")
    assert (old.in_flight, new.in_flight) == (1, 0)
    lease.settle(Verdict.NEUTRAL, 0.0)
    assert (old.in_flight, new.in_flight) == (0, 0)
    assert table.departing() == []


class Counting(RuleBasedStateMachine):
    """Any order of adding, removing, leasing and (repeated) settling keeps in_flight equal to the open leases."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ReplicaTable()
        self.leases: list[tuple[Lease, Replica, bool]] = []
        self.now = 0.0

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.table.tick(self.now)

    @rule(name=st.sampled_from("abc"))
    def add_or_remove(self, name: str) -> None:
        if name in {replica.id for replica in self.table.all()}:
            self.table.remove(ReplicaId(name))
        else:
            add(self.table, name)

    @precondition(lambda self: self.table.all())
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(self.table.all()))
        self.leases.append((self.table.lease(replica), replica, True))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.leases) - 1))
        lease, replica, _ = self.leases[index]
        lease.settle(data.draw(st.sampled_from(Verdict)), self.now)
        self.leases[index] = (lease, replica, False)

    @invariant()
    def counts_are_exact(self) -> None:
        for replica in [*self.table.all(), *self.table.departing()]:
            assert replica.in_flight == sum(is_open and owner is replica for _, owner, is_open in self.leases)
        assert all(replica.in_flight for replica in self.table.departing())


def test_a_replica_that_fails_again_and_again_gets_nothing_more_until_a_trial_succeeds() -> None:
    """Requests stop meeting a replica that is broken, and find it again when it is mended."""
    table = ReplicaTable()
    bad, good = add(table, "bad"), add(table, "good")
    for _ in range(5):
        table.lease(bad).settle(Verdict.BAD, 1.0)
    assert (bad.health, table.candidates("m")) == (Health.TRIPPED, [good])
    table.tick(7.0)
    assert bad in table.candidates("m")
    trial = table.lease(bad)
    assert table.candidates("m") == [good], "one trial at a time"
    trial.answered()
    assert bad in table.candidates("m"), "an answer may take minutes: the next trial need not wait for its end"
    trial.settle(Verdict.GOOD, 9.0)
    assert bad.health is Health.READY


def test_a_trial_that_fails_after_its_first_event_has_failed() -> None:
    """An engine whose streams always break is left alone for longer each time."""
    table = ReplicaTable()
    bad, good = add(table, "bad"), add(table, "good")
    for _ in range(5):
        table.lease(bad).settle(Verdict.BAD, 1.0)
    now = 1.0
    for delay in (5.0, 10.0, 20.0):
        table.tick(now + delay - 0.1)
        assert table.candidates("m") == [good]
        now += delay + 0.1
        table.tick(now)
        trial = table.lease(bad)
        trial.answered()
        trial.settle(Verdict.BAD, now)


def test_a_client_that_leaves_its_trial_proves_nothing() -> None:
    """The next request is the trial then."""
    table = ReplicaTable()
    bad, _ = add(table, "bad"), add(table, "good")
    for _ in range(5):
        table.lease(bad).settle(Verdict.BAD, 1.0)
    table.tick(7.0)
    table.lease(bad).settle(Verdict.NEUTRAL, 7.5)
    assert bad in table.candidates("m")


@pytest.mark.parametrize("fault", ["tripped", "stalled"])
def test_the_last_replica_is_never_taken_out(fault: str) -> None:
    """Where nothing better is left, a doubtful replica is better than none."""
    table = ReplicaTable()
    only = add(table, "only")
    if fault == "stalled":
        table.set_stalled(only, True)
    else:
        for _ in range(5):
            table.lease(only).settle(Verdict.BAD, 1.0)
    assert only.health == fault
    assert table.candidates("m") == [only]
    other = add(table, "other")
    assert table.candidates("m") == [other]


TestCounting = Counting.TestCase
TestCounting.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
