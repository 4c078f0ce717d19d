"""Whatever becomes of messages and routers, what one router has placed ends at every other exactly once."""

import random
from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.usage import Usage
from router.policy.interface import Policy, Priority, ReplicaFacts, Ticket
from router.state.peer_messages import FORMAT, Malformed
from router.state.peers import Heard, Peers
from router.state.shared_policy import WAITING_MAX, Outbox, SharedPolicy
from tests.router.state.recording_policy import A, B, RecordingPolicy, request

SILENT_S = 5.0


class Router:
    """A router without a network: `outbox.take(0.0)` of one goes to `peers.receive` of another."""

    def __init__(self, name: str, incarnation: int = 1, *, open_max: int = 100, replicas: tuple[str, ...] = (A, B)) -> None:
        self.placements = RecordingPolicy()
        self.woken: list[bool] = []
        self.outbox = Outbox(name, incarnation, with_prompt=True, wake=self.woken.append)
        self.policy = SharedPolicy(self.placements, self.outbox)
        self.peers = Peers(
            self.placements,
            router=name,
            incarnation=incarnation,
            knows=lambda replica: replica in replicas,
            silent_s=SILENT_S,
            open_max=open_max,
        )
        self.outbox.open_up()

    def place(self, text: str = "x") -> Ticket:
        ticket = self.policy.place(request(text), [A, B], 0.0)
        assert ticket is not None
        return ticket


def test_a_placement_of_one_router_is_reserved_at_another_until_it_ends() -> None:
    """Two routers see each other's load as it is, and learn from each other's usage."""
    one, two = Router("one"), Router("two")
    asked = request("y" * 1000, tenant="t", affinity="session")
    ticket = one.policy.place(asked, [A], 0.0)
    assert ticket is not None
    assert two.peers.receive(one.outbox.take(0.0), 1.0) is Heard.HELLO
    assert two.placements.in_flight == {A: 1}
    (adopted,) = two.placements.adopted
    assert (adopted.model, adopted.tenant, adopted.affinity, adopted.output_max) == ("m", "t", "session", 99)
    assert adopted.priority is Priority.DEFAULT
    assert list(adopted.prompt.chunks) == list(asked.prompt.chunks)
    assert (adopted.prompt.size, adopted.prompt.digest(1000)) == (1000, asked.prompt.digest(1000))
    assert adopted.prompt.digest(999) == 0
    one.policy.first_token(ticket, 2.0)
    assert two.peers.receive(one.outbox.take(0.0), 2.0) is Heard.NEWS
    assert list(two.placements.open.values()) == [True]
    one.policy.ended(ticket, Usage(10, 20, 5), 3.0)
    two.peers.receive(one.outbox.take(0.0), 3.0)
    assert two.placements.in_flight == {A: 0}
    assert two.placements.usages == [Usage(10, 20, 5)]
    assert one.outbox.open == two.peers.open == 0


@pytest.mark.parametrize("usage", [None, Usage(0, 0), Usage(1, 2), Usage(1, 2, 0), Usage(2**31 - 1, 2, 3)])
def test_usage_arrives_as_the_engine_told_it(usage: Usage | None) -> None:
    """An engine that says nothing is not one that used nothing."""
    one, two = Router("one"), Router("two")
    one.policy.ended(one.place(), usage, 0.0)
    two.peers.receive(one.outbox.take(0.0), 0.0)
    assert two.placements.usages == [usage]


def test_after_a_gap_all_of_that_peer_ends_until_its_next_snapshot() -> None:
    """A lost ending does not stay reserved for ever, and a lost placement is made good."""
    one, two, three = Router("one"), Router("two"), Router("three")
    kept, lost = one.place(), one.place()
    two.peers.receive(one.outbox.take(0.0), 0.0)
    three.place()
    two.peers.receive(three.outbox.take(0.0), 0.0)
    one.policy.ended(lost, None, 0.0)
    one.outbox.take(0.0)  # lost on its way
    one.policy.first_token(kept, 3.0)
    two.peers.receive(one.outbox.take(0.0), 0.0)
    assert (two.peers.open, two.peers.gaps) == (1, 1), "only what the third router has"
    one.outbox.snapshot()
    two.peers.receive(one.outbox.take(10.0), 110.0)
    assert two.peers.open == 2
    assert two.placements.first_tokens[-1] == 3.0, "as long as it took, not as late as we heard of it"


def test_a_newcomer_asks_for_what_is_open_and_gets_it() -> None:
    """A router that joins late does not think that the fleet is idle."""
    one = Router("one")
    for _ in range(5):
        one.place()
    one.outbox.take(0.0)
    newcomer = Router("new")
    assert one.peers.receive(newcomer.outbox.take(0.0), 0.0) is Heard.HELLO
    one.outbox.snapshot()
    newcomer.peers.receive(one.outbox.take(0.0), 0.0)
    assert newcomer.peers.open == 5
    one.outbox.snapshot()
    newcomer.peers.receive(one.outbox.take(0.0), 0.0)
    assert newcomer.peers.open == 5, "a snapshot of what is known changes nothing"
    assert len(newcomer.placements.adopted) == 5


def _silence(one: Router, two: Router) -> None:
    two.peers.tick(SILENT_S)
    assert two.peers.count == 1
    two.peers.tick(SILENT_S + 0.1)


def _goodbye(one: Router, two: Router) -> None:
    two.peers.receive(one.outbox.take(0.0, last=True), 0.0)


def _restart(one: Router, two: Router) -> None:
    two.peers.receive(Router("one", incarnation=2).outbox.take(0.0), 0.0)


def _close(one: Router, two: Router) -> None:
    two.peers.close(0.0)


@pytest.mark.parametrize("end", [_silence, _goodbye, _restart, _close])
def test_what_a_router_had_open_ends_with_it(end: Callable[[Router, Router], None]) -> None:
    """A router that is killed, stopped or started anew leaves no load behind."""
    one, two = Router("one"), Router("two")
    for _ in range(3):
        one.place()
    two.peers.receive(one.outbox.take(0.0), 0.0)
    assert two.peers.open == 3
    end(one, two)
    assert two.peers.open == 0
    assert two.placements.usages == [None] * 3
    assert two.placements.in_flight.total() == 0


def test_old_batches_and_other_processes_of_the_same_name_change_nothing() -> None:
    """Redis may deliver late what was given up; a name given twice is noticed."""
    old, one, two = Router("one", incarnation=1), Router("one", incarnation=2), Router("two")
    one.place()
    first = one.outbox.take(0.0)
    two.peers.receive(first, 0.0)
    assert two.peers.receive(first, 0.0) is Heard.OLD
    old.place()
    assert two.peers.receive(old.outbox.take(0.0), 4.0) is Heard.CLASH
    assert two.peers.open == 1
    assert old.peers.receive(one.outbox.take(0.0), 0.0) is Heard.CLASH
    assert one.peers.receive(old.outbox.take(0.0), 0.0) is Heard.OLD
    assert one.peers.receive(one.outbox.take(0.0), 0.0) is Heard.OWN
    two.peers.tick(SILENT_S + 0.1)
    assert two.peers.count == 0, "the other process does not keep it alive"


def test_a_peer_with_too_many_open_loses_the_oldest() -> None:
    """Memory stays bounded, and a snapshot of more than that does not churn."""
    one, two = Router("one"), Router("two", open_max=10)
    tickets = [one.place() for _ in range(25)]
    two.peers.receive(one.outbox.take(0.0), 0.0)
    assert two.peers.open == 10
    adopted = len(two.placements.adopted)
    one.outbox.snapshot()
    two.peers.receive(one.outbox.take(0.0), 0.0)
    assert (two.peers.open, len(two.placements.adopted)) == (10, adopted)
    for ticket in tickets:
        one.policy.ended(ticket, None, 0.0)
    two.peers.receive(one.outbox.take(0.0), 0.0)
    assert two.peers.open == 0


def test_a_placement_on_a_replica_that_is_not_known_yet_counts_once_it_is() -> None:
    """Routers learn of a new replica at different moments."""
    one, two = Router("one"), Router("two", replicas=())
    two.peers = Peers(two.placements, router="two", incarnation=1, knows=two.policy.knows)
    one.policy.place(request(), [A], 0.0)
    two.peers.receive(one.outbox.take(0.0), 0.0)
    assert two.peers.open == 0
    two.policy.changed(ReplicaFacts(A))
    one.outbox.snapshot()
    two.peers.receive(one.outbox.take(0.0), 0.0)
    assert two.peers.open == 1
    two.policy.removed(A)
    assert not two.policy.knows(A)
    one.outbox.take(0.0, last=True)
    two.peers.tick(10)
    assert two.peers.open == 0


def test_nothing_is_kept_for_a_redis_that_is_away() -> None:
    """An hour without redis costs no memory; afterwards the peers learn what is open then."""
    one, two = Router("one"), Router("two")
    one.place()
    two.peers.receive(one.outbox.take(0.0), 0.0)
    one.outbox.shut()
    for _ in range(1000):
        one.policy.ended(one.place(), None, 0.0)
    still = one.place()
    one.outbox.open_up()
    two.peers.receive(one.outbox.take(0.0), 0.0)
    assert two.peers.open == 2
    one.policy.ended(still, None, 0.0)
    two.peers.receive(one.outbox.take(0.0), 0.0)
    assert two.peers.open == 1


def test_messages_beyond_the_bound_are_dropped_and_made_good_by_a_snapshot() -> None:
    """A redis that is slow bounds what waits for it, and the peers are right again with the next batch."""
    one, two = Router("one"), Router("two", open_max=WAITING_MAX)
    two.peers.receive(one.outbox.take(0.0), 0.0)
    for _ in range(WAITING_MAX // 2):
        one.policy.ended(one.place(), None, 0.0)
    one.place()
    two.peers.receive(one.outbox.take(0.0), 0.0)
    assert one.outbox.dropped == WAITING_MAX
    assert (two.peers.open, two.peers.gaps) == (1, 1)


def test_the_outbox_is_woken_once_for_few_messages_and_again_for_many() -> None:
    """A batch leaves after some milliseconds, or at once when it is large."""
    one = Router("one")
    one.woken.clear()
    one.outbox.take(0.0)
    for _ in range(300):
        one.place()
    assert one.woken == [False, True]


BATCH: list[object] = [FORMAT, "one", 1, 1, []]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"{}",
        msgspec.msgpack.encode(BATCH)[:-1],
        msgspec.msgpack.encode({"a": 1}),
        msgspec.msgpack.encode(BATCH[:4]),
        msgspec.msgpack.encode([FORMAT + 1, *BATCH[1:]]),
        msgspec.msgpack.encode([FORMAT, "one", 1, 1, [[99, 1]]]),
        msgspec.msgpack.encode([FORMAT, "one", 1, 1, [[0, "key", "a:1", 0, "m", "", 0, [], 0]]]),
        msgspec.msgpack.encode([FORMAT, "one", 1, 1, [[0, 1, "a:1", -1, "m", "", 0, [], 0]]]),
        msgspec.msgpack.encode([FORMAT, "one", 1, 1, [[0, 1, "a:1", 2**31, "m", "", 0, [], 0]]]),
        msgspec.msgpack.encode([FORMAT, "one", 1, 1, [[0, 1, "a:1", 0, "m", "", 2**31, [], 0]]]),
        msgspec.msgpack.encode([FORMAT, "one", 1, 1, [[0, 1, "a:1", 0, "m", "", 0, [], 0, None, "default", 2**31]]]),
        msgspec.msgpack.encode([FORMAT, "one", 1, 1, [[0, 1, "a:1", 0, "m", "", 0, [], 0, None, "default", -1]]]),
        msgspec.msgpack.encode([FORMAT, "one", 1, 1, [[2, 1, -5]]]),
        msgspec.msgpack.encode([FORMAT, "one", 1, 1, [[2, 1, 2**31]]]),
        msgspec.msgpack.encode([FORMAT, "one", 1, 1, [[2, 1, 0, 2**31]]]),
        msgspec.msgpack.encode([FORMAT, "one", 1, 1, [[2, 1, 0, 0, 2**31]]]),
        b"\x95\x01\xa1\xff\x01\x01\x90",
        b"\x91" * 100_000,
    ],
)
def test_a_payload_that_is_no_batch_is_refused(payload: bytes) -> None:
    """Whoever writes on the channel by mistake breaks nothing."""
    router = Router("two")
    with pytest.raises(Malformed):
        router.peers.receive(payload, 0.0)
    assert router.peers.count == 0


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_harmless(payload: bytes) -> None:
    """Nothing that comes from redis ends the task that reads it."""
    router = Router("two")
    with suppress(Malformed):
        router.peers.receive(payload, 0.0)
    assert router.peers.open == 0


def test_what_a_fault_of_ours_left_open_ends_with_the_next_snapshot() -> None:
    """An exception in a policy loses the rest of a batch, but reserves nothing for ever."""
    one, two = Router("one"), Router("two")
    first, second = one.place(), one.place()
    two.peers.receive(one.outbox.take(0.0), 0.0)
    one.policy.first_token(first, 0.0)
    one.policy.ended(second, None, 0.0)
    two.placements.open[next(iter(two.placements.open))] = True  # so that the policy protests
    with pytest.raises(AssertionError, match="twice"):
        two.peers.receive(one.outbox.take(0.0), 0.0)
    assert two.peers.open == 2
    one.outbox.snapshot()
    two.peers.receive(one.outbox.take(0.0), 0.0)
    assert two.peers.open == 1


@pytest.mark.parametrize("chunks", [[1] * 3, [1] * 5])
def test_a_prompt_whose_hashes_do_not_fit_its_size_is_refused(chunks: list[int]) -> None:
    """An index that counts bytes by hashes is not led astray."""
    router = Router("two")
    placed = [0, 1, "a:1", 0, "m", "", 1024, chunks, 0]
    router.peers.receive(msgspec.msgpack.encode([FORMAT, "one", 1, 1, [placed]]), 0.0)
    assert (router.peers.open, router.peers.refused) == (0, 1)


@given(seed=st.integers(0, 2**32), losses=st.floats(0, 0.5))
def test_with_any_losses_the_routers_agree_after_the_next_snapshots(seed: int, losses: float) -> None:
    """Batches lost, late and doubled, routers restarted: never a leak, never an ending twice."""
    rng = random.Random(seed)
    routers = [Router(str(number)) for number in range(3)]
    tickets: list[list[Ticket]] = [[] for _ in routers]
    for step in range(60):
        number = rng.randrange(3)
        router, own = routers[number], tickets[number]
        action = rng.random()
        if action < 0.5:
            own.append(router.place(rng.choice("abc") * rng.randrange(2000)))
        elif action < 0.8 and own:
            ticket = own.pop(rng.randrange(len(own)))
            if rng.random() < 0.5:
                router.policy.first_token(ticket, float(step))
            router.policy.ended(ticket, None, float(step))
        elif action < 0.85:
            routers[number] = Router(str(number), incarnation=step + 2)
            tickets[number] = []
        elif action < 0.9:
            router.outbox.shut()
            router.outbox.open_up()
        payload = routers[number].outbox.take(0.0)
        for other in routers:
            if rng.random() >= losses:
                other.peers.receive(payload, float(step))
                if rng.random() < 0.1:
                    other.peers.receive(payload, float(step))
    for router in routers:
        router.outbox.snapshot()
        payload = router.outbox.take(0.0)
        for other in routers:
            other.peers.receive(payload, 60.0)
    every = sum(len(own) for own in tickets)
    assert [router.placements.in_flight.total() for router in routers] == [every] * 3
    for router in routers:
        router.peers.close(60.0)
    assert [router.placements.in_flight.total() for router in routers] == [len(own) for own in tickets]


def test_the_shared_policy_hands_on_everything_that_a_policy_can_be_told() -> None:
    """A method that Policy gains later must not end in the wrapper."""
    for name, method in vars(Policy).items():
        if callable(method) and not name.startswith("_"):
            assert name in vars(SharedPolicy), name
