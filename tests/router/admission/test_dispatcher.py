"""Requests that no replica can start yet wait in the router, each with one answer in the end, and are placed when one can."""

from collections.abc import Sequence

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocol.usage import Usage
from router.admission.dispatcher import WAITING_BYTES_MAX, Dispatcher
from router.admission.priorities import RANKED, AdmissionSettings, ClassLimits
from router.admission.waiting import Ending, Shed, ShedReason, Waiting
from router.policy.interface import PlacementRequest, Priority, Ticket
from router.policy.prompt import BytesPrompt
from router.types import ReplicaId
from tests.router.admission.slots import A, B, Slots, asks, at, run, uses

SHORT = AdmissionSettings(
    limits={
        Priority.INTERACTIVE: ClassLimits(max_wait_s=4.0, promote_after_s=1.0, waiting_max=20),
        Priority.DEFAULT: ClassLimits(max_wait_s=8.0, promote_after_s=3.0, floor=0.1, waiting_max=20),
        Priority.BATCH: ClassLimits(max_wait_s=16.0, promote_after_s=6.0, floor=0.05, waiting_max=20),
    },
    idle_tenants_max=3,
)


def placed(dispatcher: Dispatcher, now: float) -> list[PlacementRequest]:
    return [waiting.request for waiting, ticket in dispatcher.due(now) if ticket is not None]


def submitted(dispatcher: Dispatcher, request: PlacementRequest, now: float, *, deadline: float | None = None) -> Waiting:
    waiting = dispatcher.submit(request, at(A), now, deadline)
    assert isinstance(waiting, Waiting)
    return waiting


def occupied(policy: Slots, dispatcher: Dispatcher, now: float = 0.0, replica: ReplicaId = A) -> Ticket:
    ticket = dispatcher.submit(asks("occupant"), at(replica), now)
    assert isinstance(ticket, Ticket)
    return ticket


def test_a_request_that_can_start_is_placed_at_once() -> None:
    """While there is room, nobody notices that there is a queue."""
    policy = Slots(2)
    dispatcher = Dispatcher(policy)
    tickets = [dispatcher.submit(asks(), at(A), 0.0) for _ in range(2)]
    assert all(isinstance(ticket, Ticket) for ticket in tickets)
    assert dispatcher.next_deadline() is None
    assert dispatcher.due(1.0) == []
    assert dispatcher.counts.dispatched[Priority.DEFAULT] == 2


def test_a_request_waits_until_another_has_ended() -> None:
    """It is placed anew when something has changed, not when it came."""
    policy = Slots()
    dispatcher = Dispatcher(policy)
    first = occupied(policy, dispatcher)
    waiting = submitted(dispatcher, asks("t"), 1.0)
    assert dispatcher.due(1.5) == []
    assert (dispatcher.waiting_of(Priority.DEFAULT), dispatcher.tokens_of(Priority.DEFAULT)) == (1, 100.0)
    dispatcher.ended(first, None, 2.0)
    [(dispatched, ticket)] = dispatcher.due(2.0)
    assert dispatched is waiting
    assert ticket is not None
    assert ticket.request is waiting.request
    assert waiting.ending is Ending.DISPATCHED
    assert (dispatcher.waiting_of(Priority.DEFAULT), dispatcher.tokens_of(Priority.DEFAULT)) == (0, 0.0)


def test_the_earliest_deadline_of_a_tenant_goes_first() -> None:
    """A client that says when it needs its answer is served in that order; others in the order they came."""
    policy = Slots()
    dispatcher = Dispatcher(policy)
    ticket = occupied(policy, dispatcher)
    deadlines = [None, 9.0, None, 5.0, 7.0, 1000.0]
    waiting = [submitted(dispatcher, asks("t"), 1.0, deadline=deadline) for deadline in deadlines]
    order: list[PlacementRequest] = []
    for step in range(len(waiting)):
        dispatcher.ended(ticket, None, 2.0 + step / 10)
        [(dispatched, next_ticket)] = dispatcher.due(2.0 + step / 10)
        assert next_ticket is not None
        order.append(dispatched.request)
        ticket = next_ticket
    assert order == [waiting[index].request for index in (3, 4, 1, 0, 2, 5)]


def test_classes_go_in_their_order() -> None:
    """What a person waits for goes before what nobody looks at yet."""
    policy = Slots(3)
    dispatcher = Dispatcher(policy)
    tickets = [occupied(policy, dispatcher) for _ in range(3)]
    low = submitted(dispatcher, asks(priority=Priority.BATCH), 1.0)
    middle = submitted(dispatcher, asks(priority=Priority.DEFAULT), 1.0)
    high = submitted(dispatcher, asks(priority=Priority.INTERACTIVE), 1.0)
    for ticket in tickets:
        dispatcher.ended(ticket, None, 1.1)
    assert placed(dispatcher, 1.1) == [high.request, middle.request, low.request]


def test_a_newcomer_overtakes_nobody_of_its_class() -> None:
    """A slot that became free between two events belongs to those that wait."""
    policy = Slots()
    dispatcher = Dispatcher(policy)
    ticket = occupied(policy, dispatcher)
    first = submitted(dispatcher, asks("a"), 1.0)
    policy.ended(ticket, None, 1.1)
    second = dispatcher.submit(asks("b"), at(A), 1.1)
    assert isinstance(second, Waiting)
    assert placed(dispatcher, 1.1) == [first.request]


def test_a_newcomer_of_a_higher_class_takes_what_is_free_at_once() -> None:
    """An interactive request does not queue up behind a batch job."""
    policy = Slots()
    dispatcher = Dispatcher(policy)
    ticket = occupied(policy, dispatcher)
    submitted(dispatcher, asks("job", priority=Priority.BATCH), 1.0)
    policy.ended(ticket, None, 1.1)
    assert isinstance(dispatcher.submit(asks("user", priority=Priority.INTERACTIVE), at(A), 1.1), Ticket)


@pytest.mark.parametrize("same_tenant", [False, True])
def test_a_blocked_head_blocks_no_other(same_tenant: bool) -> None:
    """A request whose only replica is full does not stop those behind it that have another."""
    policy = Slots()
    dispatcher = Dispatcher(policy)
    occupied(policy, dispatcher)
    blocked = submitted(dispatcher, asks("t"), 1.0)
    other = dispatcher.submit(asks("t" if same_tenant else "u"), at(A, B), 1.0)
    assert isinstance(other, Waiting)
    assert placed(dispatcher, 1.0) == [other.request]
    assert blocked.ending is None


def test_requests_for_another_model_do_not_queue_up_behind() -> None:
    """A model in high demand delays its own users only."""
    policy = Slots()
    dispatcher = Dispatcher(policy)
    occupied(policy, dispatcher)
    submitted(dispatcher, asks(), 1.0)
    assert isinstance(dispatcher.submit(asks(model="other"), at(B), 1.0), Ticket)


def test_nothing_overtakes_a_request_passed_over_for_too_long_on_its_replicas() -> None:
    """After its bound, what becomes free where it can go is its own, even when it needs more than others do."""

    class Picky(Slots):
        """A big request needs the whole replica."""

        def place(self, request: PlacementRequest, candidates: object, now: float) -> Ticket | None:
            if request.prompt.size > 4000 and any(self.running.values()):
                return None
            return super().place(request, candidates, now)  # type: ignore[arg-type]

    policy = Picky(2)
    dispatcher = Dispatcher(policy)
    tickets = [occupied(policy, dispatcher) for _ in range(2)]
    big = submitted(dispatcher, asks("big", tokens=2000), 0.0)
    now = 0.0
    while big.ending is None and now < 60.0:  # a steady stream of small ones keeps one slot busy at any time
        now += 1.0
        small = dispatcher.submit(asks("small", priority=Priority.INTERACTIVE), at(A), now)
        if isinstance(small, Ticket):
            tickets.append(small)
        if tickets:
            dispatcher.ended(tickets.pop(0), None, now)
        for _, ticket in dispatcher.due(now):
            assert ticket is not None
            tickets.append(ticket)
        dispatcher.expired(now)
    assert big.ending is Ending.DISPATCHED
    assert 15.0 <= now <= 18.0


def test_a_request_left_without_any_replica_is_handed_back() -> None:
    """When the last replica that could take it is gone, it is told so instead of waiting on."""
    policy = Slots()
    dispatcher = Dispatcher(policy)
    occupied(policy, dispatcher)
    replicas = [A]
    waiting = dispatcher.submit(asks(), lambda: replicas, 1.0)
    assert isinstance(waiting, Waiting)
    replicas.clear()
    assert dispatcher.due(2.0) == [(waiting, None)]
    assert waiting.ending is Ending.NO_REPLICA
    assert dispatcher.due(2.0) == []
    shed = dispatcher.submit(asks(), lambda: replicas, 3.0)
    assert isinstance(shed, Shed)
    assert shed.reason is ShedReason.NO_REPLICA


def test_what_waits_too_long_expires_at_its_bound() -> None:
    """Nobody waits for ever; the timer is told in time."""
    policy = Slots()
    dispatcher = Dispatcher(policy, SHORT)
    occupied(policy, dispatcher)
    waiting = {priority: submitted(dispatcher, asks(priority=priority), 1.0) for priority in RANKED}
    ended: dict[Priority, float] = {}
    while (now := dispatcher.next_deadline()) is not None:
        assert dispatcher.due(now) == []
        ended |= {gone.request.priority: now for gone in dispatcher.expired(now)}
    assert ended == {priority: 1.0 + SHORT.limits[priority].max_wait_s for priority in RANKED}
    assert {entry.ending for entry in waiting.values()} == {Ending.EXPIRED}


def test_a_client_that_leaves_is_forgotten() -> None:
    """Withdrawing is heard once, and leaves the rest in order."""
    policy = Slots()
    dispatcher = Dispatcher(policy)
    ticket = occupied(policy, dispatcher)
    first, second = submitted(dispatcher, asks("t"), 1.0), submitted(dispatcher, asks("t"), 1.0)
    assert dispatcher.withdraw(first, 1.5)
    assert not dispatcher.withdraw(first, 1.5)
    dispatcher.ended(ticket, None, 2.0)
    assert placed(dispatcher, 2.0) == [second.request]
    assert not dispatcher.withdraw(second, 2.0)
    assert (first.ending, second.ending) == (Ending.WITHDRAWN, Ending.DISPATCHED)


def test_a_tenant_leaves_room_in_a_full_queue_for_others() -> None:
    """However many requests one client sends at once, another one's are let in."""
    policy = Slots()
    dispatcher = Dispatcher(policy, SHORT)
    occupied(policy, dispatcher)
    answers = [dispatcher.submit(asks("flood"), at(A), 0.0) for _ in range(1000)]
    refused = [answer for answer in answers if isinstance(answer, Shed)]
    assert len(refused) == 982
    assert {answer.reason for answer in refused} == {ShedReason.QUEUE_FULL}
    assert isinstance(dispatcher.submit(asks("other"), at(A), 0.0), Waiting)
    assert dispatcher.counts.shed[Priority.DEFAULT, ShedReason.QUEUE_FULL] == 982


class Failing(Slots):
    """Placing a request of tenant "bad" is a fault of the program from second 2 on."""

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket | None:
        if request.tenant == "bad" and now >= 2.0:
            raise ArithmeticError("no cost")
        return super().place(request, candidates, now)


def gone() -> Sequence[ReplicaId]:
    raise LookupError("no such model")


@pytest.mark.parametrize("asked", ["place", "candidates"])
def test_an_error_while_placing_ends_that_request_alone(asked: str) -> None:
    """The one it came from is handed back with it, and those before and behind it are placed."""
    policy = Failing(3)
    dispatcher = Dispatcher(policy)
    tickets = [occupied(policy, dispatcher) for _ in range(3)]
    first = submitted(dispatcher, asks("t"), 1.0)
    bad = submitted(dispatcher, asks("bad" if asked == "place" else "t"), 1.0)
    if asked == "candidates":
        bad.candidates = gone
    last = submitted(dispatcher, asks("u"), 1.0)
    for ticket in tickets:
        dispatcher.ended(ticket, None, 2.0)
    answers = dict(dispatcher.due(2.0))
    assert answers.keys() == {first, bad, last}
    assert [answers[good] is not None for good in (first, last)] == [True, True]
    assert answers[bad] is None
    assert bad.ending is Ending.FAILED
    assert isinstance(bad.error, ArithmeticError if asked == "place" else LookupError)
    assert dispatcher.counts.ended[Priority.DEFAULT, Ending.FAILED] == 1
    assert (dispatcher.waiting, dispatcher.next_deadline()) == (0, None)


class Narrow(Slots):
    """No replica ever has room for a request above 1000 tokens."""

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket | None:
        return None if request.prompt.size > 4000 else super().place(request, candidates, now)


def looked(dispatcher: Dispatcher, begin: float, end: float) -> None:
    """Time passes, and the timer is served."""
    now = begin
    while now < end:
        assert dispatcher.due(now) == []
        assert dispatcher.expired(now) == []
        now += 0.5


def learned(dispatcher: Dispatcher) -> None:
    """The rate of replica A, at ten requests of 100 tokens per second, until second 5."""
    policy = Slots()
    ticket: Ticket | None = occupied(policy, dispatcher)
    for number in range(50):
        assert ticket is not None
        submitted(dispatcher, asks(), number / 10)
        dispatcher.ended(ticket, None, (number + 1) / 10)
        [(_, ticket)] = dispatcher.due((number + 1) / 10)
    assert ticket is not None
    dispatcher.ended(ticket, None, 5.0)


@pytest.mark.parametrize("stuck", [1, 3])
def test_requests_that_fit_nowhere_have_nobody_else_refused(stuck: int) -> None:
    """After minutes in which only they waited, others are let in as if they were not there."""
    dispatcher = Dispatcher(Narrow())
    learned(dispatcher)
    for _ in range(stuck):
        big = asks("big", tokens=2000, priority=Priority.BATCH)
        assert isinstance(dispatcher.submit(big, at(A, B), 5.0), Waiting)
    looked(dispatcher, 5.0, 300.0)
    answers = [dispatcher.submit(asks("t", priority=Priority.INTERACTIVE), at(A, B), 300.0) for _ in range(12)]
    assert not [answer for answer in answers if isinstance(answer, Shed)]
    tickets = [answer for answer in answers if isinstance(answer, Ticket)]
    for step in range(60):
        now = 300.0 + step / 10
        for ticket in tickets:
            dispatcher.ended(ticket, None, now)
        tickets = [ticket for _, ticket in dispatcher.due(now) if ticket is not None]
    assert dispatcher.waiting == stuck


def test_a_fleet_that_starts_nothing_any_more_refuses_who_would_wait_in_vain() -> None:
    """Time without a dispatch still counts when others than starving requests wait."""
    dispatcher = Dispatcher(Narrow())
    learned(dispatcher)
    occupied(Slots(), dispatcher, 5.0)
    submitted(dispatcher, asks("t", priority=Priority.BATCH), 5.0)
    looked(dispatcher, 5.0, 20.0)
    refused = dispatcher.submit(asks("u", priority=Priority.INTERACTIVE), at(A), 20.0)
    assert isinstance(refused, Shed)
    assert refused.predicted_wait_s >= 15.0


def test_a_request_that_fits_nowhere_holds_one_replica_and_no_more() -> None:
    """A starving request gets what becomes free on one of its replicas; the rest of the fleet goes on."""
    dispatcher = Dispatcher(Narrow(2))
    assert isinstance(dispatcher.submit(asks("big", tokens=2000), at(A, B), 0.0), Waiting)
    looked(dispatcher, 0.0, 20.0)
    other = dispatcher.submit(asks("t"), at(A, B), 20.0)
    assert isinstance(other, Waiting)
    [(started, ticket)] = dispatcher.due(20.0)
    assert started is other
    assert ticket is not None
    assert ticket.replica == B


def test_what_waits_is_bounded_in_bytes_too() -> None:
    """Large bodies are refused before they fill the memory, and let in again when others have left."""
    dispatcher = Dispatcher(Slots())
    occupied(Slots(), dispatcher)

    def large(model: str) -> PlacementRequest:
        return PlacementRequest(model, BytesPrompt(b"", 0, size=WAITING_BYTES_MAX // 4))

    assert isinstance(dispatcher.submit(asks(model="n"), at(A), 0.0), Waiting)
    held = [dispatcher.submit(large(model), at(A), 0.0) for model in ("m", "n", "m")]
    refused = dispatcher.submit(large("n"), at(A), 0.0)
    assert isinstance(refused, Shed)
    assert refused.reason is ShedReason.QUEUE_FULL
    assert isinstance(held[0], Waiting)
    assert dispatcher.withdraw(held[0], 1.0)
    assert isinstance(dispatcher.submit(large("n"), at(A), 1.0), Waiting)


def test_the_predicted_wait_is_the_wait() -> None:
    """In a steady fleet a request starts when it was told it would, and one that is refused would have waited too long."""
    arrivals = [(0.02 * number, asks("t", tokens=50 + 37 * number % 101)) for number in range(4000)]  # 5000 tokens/s
    served = run(arrivals, rate=3000.0, slots=8)
    assert not served.expired
    long = [(predicted, actual) for predicted, actual in served.predicted if actual > 1.0]
    assert len(long) > 500
    within = sum(abs(predicted - actual) <= 0.25 * actual for predicted, actual in long)
    assert within >= 0.99 * len(long)
    assert served.shed
    assert max(actual for _, actual in served.predicted) == pytest.approx(27.0, rel=0.1)
    for _, shed in served.shed:
        assert shed.reason is ShedReason.PREDICTED_WAIT
        assert shed.predicted_wait_s > 27.0
        assert shed.retry_after_s >= shed.predicted_wait_s - 27.0
        assert 1 <= shed.retry_after_s <= 60


def test_a_lower_class_is_predicted_what_the_higher_leaves_it() -> None:
    """A batch job is told the truth about how slowly it moves while people are served."""
    people = [(0.05 * number, asks("p", tokens=160, priority=Priority.INTERACTIVE)) for number in range(4000)]  # 80 %
    jobs = [
        (0.2 * number, asks("j", tokens=100, priority=Priority.BATCH)) for number in range(900)
    ]  # 12.5 % of a rate left of 20
    burst = [(20.0, asks("j", tokens=100, priority=Priority.BATCH)) for _ in range(400)]
    served = run(people + jobs + burst, rate=4000.0, slots=8)
    waited = [(predicted, actual) for predicted, actual in served.predicted if actual > 20.0]
    assert len(waited) > 100
    late = [predicted / actual for predicted, actual in waited]
    assert sorted(late)[len(late) // 2] == pytest.approx(1.0, abs=0.25)


class Life(RuleBasedStateMachine):
    """Any order of arrivals, ends, timers, departures and lost replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Slots(2)
        self.dispatcher = Dispatcher(self.policy, SHORT)
        self.now = 100.0
        self.replicas = [A, B]
        self.waiting: list[Waiting] = []
        self.tickets: list[Ticket] = []
        self.answered: list[Waiting] = []
        self.log: list[tuple[str, ...]] = []

    @rule(
        tenant=st.sampled_from("abcdefgh"),
        priority=st.sampled_from(RANKED),
        tokens=st.integers(0, 500),
        only=st.sampled_from([None, A, B]),
        model=st.sampled_from(["m", "n"]),
        deadline=st.none() | st.floats(-5.0, 30.0),
    )
    def submit(
        self, tenant: str, priority: Priority, tokens: int, only: ReplicaId | None, model: str, deadline: float | None
    ) -> None:
        request = asks(tenant, tokens, priority, model)
        by = None if deadline is None else self.now + deadline
        answer = self.dispatcher.submit(
            request, lambda: [replica for replica in self.replicas if only in (None, replica)], self.now, by
        )
        if isinstance(answer, Waiting):
            assert answer.ending is None
            self.waiting.append(answer)
        elif isinstance(answer, Ticket):
            self.tickets.append(answer)
        else:
            assert 1 <= answer.retry_after_s <= 60

    @rule(passed=st.floats(0.0, 0.5) | st.floats(0.0, 5.0))
    def pass_time(self, passed: float) -> None:
        self.now += passed

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), usage=st.none() | st.builds(Usage, st.integers(0, 900), st.integers(0, 900), st.integers(0, 900)))
    def end(self, data: st.DataObject, usage: Usage | None) -> None:
        ticket = self.tickets.pop(data.draw(st.integers(0, len(self.tickets) - 1)))
        self.dispatcher.ended(ticket, usage, self.now)

    @rule()
    def due(self) -> None:
        for waiting, ticket in self.dispatcher.due(self.now):
            self._answered(waiting)
            if ticket is None:
                assert waiting.ending is Ending.NO_REPLICA
            else:
                assert waiting.ending is Ending.DISPATCHED
                assert ticket.request is waiting.request
                self.tickets.append(ticket)
        for replica in self.replicas:  # whoever could start has started
            if not any(busy == replica for busy in self.policy.running.values()):
                assert not [left for left in self.waiting if replica in left.candidates()]

    @rule()
    def expire(self) -> None:
        for waiting in self.dispatcher.expired(self.now):
            self._answered(waiting)
            assert waiting.ending is Ending.EXPIRED
            assert self.now >= waiting.since + SHORT.limits[waiting.request.priority].max_wait_s
        for waiting in self.waiting:
            assert self.now < waiting.since + SHORT.limits[waiting.request.priority].max_wait_s

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        everything = self.waiting + self.answered
        if everything:
            waiting = data.draw(st.sampled_from(everything))
            was_waiting = waiting in self.waiting
            assert self.dispatcher.withdraw(waiting, self.now) is was_waiting
            if was_waiting:
                self._answered(waiting)

    @rule(replicas=st.sampled_from([[A], [B], [A, B], []]))
    def change_replicas(self, replicas: list[ReplicaId]) -> None:
        self.replicas = replicas

    def _answered(self, waiting: Waiting) -> None:
        self.waiting.remove(waiting)
        assert waiting not in self.answered
        self.answered.append(waiting)

    @invariant()
    def counts_are_exact(self) -> None:
        assert self.dispatcher.waiting == len(self.waiting)
        assert all(waiting.ending is None for waiting in self.waiting)
        for priority in RANKED:
            mine = [waiting for waiting in self.waiting if waiting.request.priority is priority]
            assert self.dispatcher.waiting_of(priority) == len(mine)
            assert self.dispatcher.tokens_of(priority) == pytest.approx(sum(waiting.cost for waiting in mine))
            assert self.dispatcher.tokens_of(priority) >= 0.0
        assert set(self.policy.running) == set(self.tickets)
        assert (self.dispatcher.next_deadline() is None) is (not self.waiting)

    @invariant()
    def memory_is_bounded(self) -> None:
        in_use = len(self.waiting) + len(self.tickets)
        assert self.dispatcher.tenants <= in_use + 2 * len(RANKED) * SHORT.idle_tenants_max

    def teardown(self) -> None:
        for ticket in self.tickets:
            self.dispatcher.ended(ticket, None, self.now)
        self.tickets.clear()
        self.now += 1000.0
        for waiting, placed_on in self.dispatcher.due(self.now):
            self._answered(waiting)
            if placed_on is not None:
                self.dispatcher.ended(placed_on, uses(placed_on.request), self.now)
        for waiting in self.dispatcher.expired(self.now):
            self._answered(waiting)
        assert not self.waiting
        assert not self.policy.running
        assert self.dispatcher.next_deadline() is None


TestLife = Life.TestCase
TestLife.settings = hypothesis_settings(max_examples=60, stateful_step_count=60, deadline=None)
TestLife.__doc__ = "Whatever happens in whatever order, each request gets exactly one answer and every count is right."
