"""While there is not enough for everybody, tenants get equal shares of the tokens and no class is left without any."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.usage import Usage
from router.admission.dispatcher import Dispatcher
from router.admission.priorities import RANKED, AdmissionSettings, ClassLimits
from router.admission.waiting import Waiting
from router.policy.interface import PlacementRequest, Priority, Ticket
from tests.router.admission.slots import A, Served, Slots, asks, at, run

PATIENT = AdmissionSettings(
    limits={priority: ClassLimits(max_wait_s=1e6, promote_after_s=1e5, waiting_max=10**6) for priority in RANKED}
)


def stream(
    seed: int, tenant: str, per_second: float, until: float, *, tokens: tuple[int, int] = (100, 300), priority: Priority
) -> Iterator[tuple[float, PlacementRequest]]:
    rng = random.Random(seed)
    now = rng.expovariate(per_second)
    while now < until:
        yield now, asks(tenant, rng.randint(*tokens), priority)
        now += rng.expovariate(per_second)


def jain(shares: list[float]) -> float:
    return float(sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares)))


def backlog(dispatcher: Dispatcher, tenant: str, count: int, tokens: int = 100, *, now: float = 0.0) -> list[Waiting]:
    answers = [dispatcher.submit(asks(tenant, tokens), at(A), now) for _ in range(count)]
    assert all(isinstance(answer, Waiting) for answer in answers)
    return [answer for answer in answers if isinstance(answer, Waiting)]


def held(dispatcher: Dispatcher) -> Ticket:
    ticket = dispatcher.submit(asks("holder", 1), at(A), 0.0)
    assert isinstance(ticket, Ticket)
    return ticket


def one_by_one(dispatcher: Dispatcher, ticket: Ticket, count: int, *, now: float = 0.0, cached: int = 0) -> tuple[str, Ticket]:
    """The tenants served next, one letter each, and the last one's ticket."""
    order = ""
    for _ in range(count):
        size = ticket.request.prompt.size // 4
        dispatcher.ended(ticket, Usage(size, 0, min(cached, size)), now)
        [(waiting, placed)] = dispatcher.due(now)
        assert placed is not None
        ticket = placed
        order += waiting.request.tenant[0]
    return order, ticket


@given(st.integers(1, 400), st.integers(1, 400), st.integers(20, 60))
@settings(max_examples=40, deadline=None)
def test_tenants_that_both_wait_are_served_the_same_to_within_a_request(mine: int, theirs: int, steps: int) -> None:
    """It does not matter who sends more or larger requests: at every moment each has had as many tokens."""
    dispatcher = Dispatcher(Slots(), PATIENT)
    ticket = held(dispatcher)
    for _ in range(20):
        backlog(dispatcher, "a", 20, mine)
    backlog(dispatcher, "b", 400, theirs)
    had = {"a": 0, "b": 0}
    for _ in range(steps):
        order, ticket = one_by_one(dispatcher, ticket, 1)
        had[order] += {"a": mine, "b": theirs}[order]
        assert abs(had["a"] - had["b"]) <= max(mine, theirs)


@pytest.mark.parametrize(("seed", "priority"), list(enumerate(RANKED)))
def test_a_tenant_that_sends_twenty_times_as_much_gets_no_more(seed: int, priority: Priority) -> None:
    """Two clients share a full fleet in halves, whatever each of them asks for."""
    light, heavy = 7.5, 150.0  # requests per second of 200 tokens: 1500 and 30 000 of 2000 tokens per second
    until = 40.0
    arrivals = [
        *stream(seed, "light", light, until, priority=priority),
        *stream(seed + 100, "heavy", heavy, until, priority=priority),
    ]
    served = run(arrivals, rate=2000.0, slots=8, observed=(5.0, until))
    assert jain(list(map(float, served.tokens.values()))) >= 0.99
    assert len(served.tokens) == 2


@pytest.mark.parametrize("seed", range(3))
def test_a_flood_delays_no_other_tenant(seed: int) -> None:
    """A client within its share waits hardly longer beside one that floods the fleet than beside one that does not."""
    until = 40.0

    def light_waits(others_per_second: float) -> list[float]:
        arrivals = [
            *stream(seed, "light", 5.0, until, priority=Priority.DEFAULT),
            *stream(seed + 100, "other", others_per_second, until, priority=Priority.DEFAULT),
        ]
        return run(arrivals, rate=4000.0, slots=8).waits("light")

    flooded = light_waits(200.0)
    assert len(flooded) == len(light_waits(5.0))  # none was refused
    # One request of 8 slots at 500 tokens/s is at most 0.6 s; half of the rate is free for it.
    assert flooded[int(len(flooded) * 0.99)] <= 0.6


def test_weights_divide_the_tokens() -> None:
    """A tenant of weight 3 gets three times as much as one of weight 1."""
    dispatcher = Dispatcher(Slots(), PATIENT, weight_of=lambda tenant: 3.0 if tenant == "a" else 1.0)
    ticket = held(dispatcher)
    backlog(dispatcher, "a", 100)
    backlog(dispatcher, "b", 100)
    order, _ = one_by_one(dispatcher, ticket, 80)
    assert abs(order.count("a") - 60) <= 1


def test_being_away_earns_no_credit() -> None:
    """A tenant that comes back after others were served for a long time does not go before them for as long."""
    dispatcher = Dispatcher(Slots(), PATIENT)
    ticket = held(dispatcher)
    backlog(dispatcher, "a", 500)
    backlog(dispatcher, "b", 2)
    _, ticket = one_by_one(dispatcher, ticket, 200)
    backlog(dispatcher, "b", 100)
    order, _ = one_by_one(dispatcher, ticket, 40)
    assert abs(order.count("b") - 20) <= 1


def test_leaving_pays_no_debt() -> None:
    """A tenant that was served much, withdrew and came back stands where it stood."""
    dispatcher = Dispatcher(Slots(), PATIENT)
    ticket = held(dispatcher)
    [big] = backlog(dispatcher, "a", 1, 1000)
    backlog(dispatcher, "b", 100)
    order, ticket = one_by_one(dispatcher, ticket, 1)
    assert (order, big.ending) == ("a", "dispatched")
    for waiting in backlog(dispatcher, "a", 5):
        assert dispatcher.withdraw(waiting, 0.0)
    order, ticket = one_by_one(dispatcher, ticket, 3)  # the big one has ended
    backlog(dispatcher, "a", 20)
    order, _ = one_by_one(dispatcher, ticket, 8)
    assert order == "bbbbbbba"


def test_cached_tokens_are_not_charged() -> None:
    """A tenant whose prompts are in the cache anyway gets as many computed tokens as others, so more requests."""
    dispatcher = Dispatcher(Slots(), PATIENT)
    ticket = held(dispatcher)
    backlog(dispatcher, "cached", 200)
    backlog(dispatcher, "new", 200)
    order = ""
    for _ in range(120):
        size = ticket.request.prompt.size // 4
        dispatcher.ended(ticket, Usage(size, 0, 80 if ticket.request.tenant == "cached" else 0), 0.0)
        [(_, placed)] = dispatcher.due(0.0)
        assert placed is not None
        ticket = placed
        order += ticket.request.tenant[0]
    assert order.count("c") == pytest.approx(100, abs=3)


def test_a_charge_is_settled_once() -> None:
    """Hearing twice that a request has ended gives nothing back twice."""

    class Deaf(Slots):
        def ended(self, ticket: Ticket, usage: Usage | None, now: float) -> None:
            self.running.pop(ticket, None)

    dispatcher = Dispatcher(Deaf(), PATIENT)
    ticket = held(dispatcher)
    backlog(dispatcher, "a", 100)
    backlog(dispatcher, "b", 100)
    order = ""
    for _ in range(40):
        for _ in range(3):
            dispatcher.ended(ticket, Usage(100, 0, 50), 0.0)
        [(_, placed)] = dispatcher.due(0.0)
        assert placed is not None
        ticket = placed
        order += ticket.request.tenant
    assert abs(order.count("a") - 20) <= 1


@pytest.mark.parametrize("per_second", [0.1, 0.3])  # 4 %, within the floor of 5 %, and 12 %, within the promoted share
def test_batch_requests_start_within_their_bound_beside_endless_interactive_load(per_second: float) -> None:
    """However many people there are, a job that was let in is begun in time."""
    until = 900.0
    people = stream(1, "people", 3.0, until, tokens=(100, 100), priority=Priority.INTERACTIVE)  # 120 % of the rate
    jobs = list(stream(2, "job", per_second, until - 300.0, tokens=(100, 100), priority=Priority.BATCH))
    served = run([*people, *jobs], rate=250.0)
    assert len(served.waits("job")) == len(jobs)
    assert served.waits("job")[-1] <= 120.0 + 10.0


@pytest.mark.parametrize(("floor", "least", "most"), [(0.0, 0.0, 0.0), (0.05, 0.045, 0.055), (0.2, 0.19, 0.21)])
def test_a_class_gets_its_floor_and_no_more(floor: float, least: float, most: float) -> None:
    """What is reserved for the lower class while it waits is exactly what it gets."""
    limits = dict(PATIENT.limits) | {Priority.BATCH: ClassLimits(1e6, 1e5, floor=floor, waiting_max=10**6)}
    dispatcher = Dispatcher(Slots(), AdmissionSettings(limits=limits))
    ticket = held(dispatcher)
    for _ in range(2000):
        dispatcher.submit(asks("p", 100, Priority.INTERACTIVE), at(A), 0.0)
        dispatcher.submit(asks("j", 250, Priority.BATCH), at(A), 0.0)
    tokens = {"p": 0, "j": 0}
    for _ in range(1000):
        order, ticket = one_by_one(dispatcher, ticket, 1)
        tokens[order] += {"p": 100, "j": 250}[order]
    assert least <= tokens["j"] / (tokens["j"] + tokens["p"]) <= most


def test_a_starving_backlog_does_not_stop_the_classes_above() -> None:
    """A job of thousands of old requests is promoted, but leaves three quarters to those who wait in front of a screen."""
    dispatcher = Dispatcher(Slots())
    ticket = held(dispatcher)
    for _ in range(1000):
        dispatcher.submit(asks("job", 100, Priority.BATCH), at(A), 0.0)
    for _ in range(500):
        dispatcher.submit(asks("people", 100, Priority.INTERACTIVE), at(A), 121.0)
    order, ticket = one_by_one(dispatcher, ticket, 100, now=121.0)
    assert order[0] == "j"  # what has waited beyond its bound is next
    assert order.count("j") == pytest.approx(25, abs=2)
    assert dispatcher.counts.promoted[Priority.BATCH] == order.count("j")


def test_a_stream_of_new_tenants_starves_no_old_one() -> None:
    """Whoever changes its key with every request cannot keep others out."""
    dispatcher = Dispatcher(Slots())
    ticket = held(dispatcher)
    backlog(dispatcher, "zero", 1)
    [old] = backlog(dispatcher, "old", 2, 1000)[1:]
    now, served = 0.0, 0
    while old.ending is None and served < 2000:
        now += 0.05
        dispatcher.submit(asks(f"new{served}", 100), at(A), now)
        dispatcher.submit(asks(f"more{served}", 100), at(A), now)
        dispatcher.ended(ticket, None, now)
        [(_, placed)] = dispatcher.due(now)
        assert placed is not None
        ticket = placed
        served += 1
    assert old.ending == "dispatched"
    assert now <= 16.0


def test_tenants_that_have_gone_are_forgotten() -> None:
    """Memory is that of the tenants that are here, and a few more, however many there have been."""
    dispatcher = Dispatcher(Slots(), AdmissionSettings(limits=PATIENT.limits, idle_tenants_max=10))
    ticket = held(dispatcher)
    backlog(dispatcher, "stays", 3000)
    gone: list[Waiting] = []
    for number in range(2000):
        gone += backlog(dispatcher, f"goes{number}", 1)
        _, ticket = one_by_one(dispatcher, ticket, 1)
        still_here = sum(waiting.ending is None for waiting in gone[-200:])
        assert dispatcher.tenants <= still_here + 12
    while dispatcher.waiting:
        _, ticket = one_by_one(dispatcher, ticket, 1)
    dispatcher.ended(ticket, None, 0.0)
    assert dispatcher.tenants <= 11


def test_the_same_arrivals_are_served_in_the_same_order() -> None:
    """A run can be repeated to the last decision."""

    def once() -> Served:
        arrivals = [
            arrival
            for number, priority in enumerate(RANKED * 3)
            for arrival in stream(number, f"t{number}", 3.0 + number, 20.0, priority=priority)
        ]
        return run(arrivals, rate=3000.0, slots=8)

    first, second = once(), once()
    for one, other in ((first.started, second.started), (first.shed, second.shed)):
        assert [(request.tenant, request.prompt.size, what) for request, what in one] == [
            (request.tenant, request.prompt.size, what) for request, what in other
        ]
    assert len(first.started) > 300


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limits": {}}, "limits lacks interactive, default, batch"),
        ({"promoted_share": 0.0}, "promoted_share is 0.0; it must be a share between 0 and 1"),
        ({"heads_max": 0}, "heads_max is 0; it must be at least 1"),
        ({"idle_tenants_max": 0}, "idle_tenants_max is 0; it must be at least 1"),
        ({"poll_s": 0.0}, "poll_s is 0.0; it must be above 0 seconds"),
        ({"limits": dict.fromkeys(RANKED, ClassLimits(9.0, 1.0, floor=0.5))}, "the floors add up to 1.5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: dict[str, object], message: str) -> None:
    """A wrong setting is named, with what it may be."""
    with pytest.raises(ValueError, match=message):
        AdmissionSettings(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1.0), "max_wait_s is 0.0; it must be above 0 seconds"),
        ((10.0, 10.0), "promote_after_s is 10.0; it must be below max_wait_s"),
        ((10.0, 5.0, 1.0), "floor is 1.0; it must be a share"),
        ((10.0, 5.0, 0.1, -1), "waiting_max is -1; it must be at least 0"),
    ],
)
def test_limits_that_make_no_sense_are_refused(arguments: tuple[float, ...], message: str) -> None:
    """A bound that could never hold is named with its remedy."""
    with pytest.raises(ValueError, match=message):
        ClassLimits(*arguments)  # type: ignore[arg-type]


def test_a_tenants_weight_must_be_above_zero() -> None:
    """A wrong weight is named with its tenant."""
    dispatcher = Dispatcher(Slots(), weight_of=lambda _: 0.0)
    held(dispatcher)
    with pytest.raises(ValueError, match=r"the weight of tenant 'a' is 0\.0; it must be above 0"):
        dispatcher.submit(asks("a"), at(A), 0.0)
    assert dispatcher.waiting == 0
