"""The default placement: fewest predicted seconds."""

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocol.usage import Usage
from router.policy.cost import PredictedSettings
from router.policy.interface import PlacementRequest, ReplicaFacts, Ticket
from router.policy.predicted import REFRESH_EVERY, Predicted
from router.policy.targets import PredictedTicket
from router.types import ReplicaId
from tests.router.policy.prompts import UNIT, prompt, text

A, B, C = ReplicaId("a:1"), ReplicaId("b:1"), ReplicaId("c:1")


def fleet(*ids: ReplicaId, seed: int = 1, policy_settings: PredictedSettings | None = None, **facts: object) -> Predicted:
    policy = Predicted(random.Random(seed), policy_settings)
    for replica in ids:
        policy.changed(ReplicaFacts(replica, **facts))  # type: ignore[arg-type]
    return policy


def ask(*parts: bytes, affinity: str | None = None, output_max: int | None = None, streams: bool = True) -> PlacementRequest:
    return PlacementRequest("m", prompt(*parts), affinity=affinity, output_max=output_max, streams=streams)


def place(policy: Predicted, request: PlacementRequest, ids: Sequence[ReplicaId], now: float) -> PredictedTicket:
    ticket = policy.place(request, ids, now)
    assert isinstance(ticket, PredictedTicket)
    return ticket


def serve(policy: Predicted, ticket: Ticket, now: float, *, cached: int | None = None, completion: int = 50) -> float:
    """Lets the request run alone. Returns the time at its end."""
    assert isinstance(ticket, PredictedTicket)
    policy.first_token(ticket, now + 0.1)
    policy.ended(ticket, Usage(ticket.request.prompt.size // 4, completion, cached), now + 1.0)
    return now + 1.0


def test_a_conversation_goes_back_to_the_replica_that_has_it_cached() -> None:
    """The second turn finds its first turn and its answer in the cache of the same replica, whichever that was."""
    for seed in range(10):
        policy = fleet(A, B, C, seed=seed)
        first = place(policy, ask(text("chat", 20)), [A, B, C], 0.0)
        serve(policy, first, 0.0, completion=600)
        second = place(policy, ask(text("chat", 20), text("answer", 9), text("next", 1)), [A, B, C], 2.0)
        assert second.replica == first.replica
        assert second.cached_tokens == pytest.approx((20 * UNIT + 600 * 4) / 4, rel=0.05)


def test_a_cached_beginning_does_not_outweigh_a_long_queue() -> None:
    """When the replica with the cache is busy for longer than computing the prompt anew takes, another one does it."""
    policy = fleet(A, B, policy_settings=PredictedSettings(startable_s=100.0))
    first = place(policy, ask(text("shared", 20)), [A, B], 0.0)
    serve(policy, first, 0.0)
    for number in range(8):  # each a second of prefill
        policy.adopt(ask(text(f"long {number}", 125)), first.replica, 0, 1.0)
    other = place(policy, ask(text("shared", 20), b"?"), [A, B], 1.0)
    assert other.replica != first.replica


def test_where_nothing_repeats_requests_go_to_the_shortest_queue() -> None:
    """Without anything to reuse it places as a balancer does."""
    policy = fleet(A, B, C, policy_settings=PredictedSettings(startable_s=100.0))
    chosen = Counter(place(policy, ask(text(f"{n}", 10)), [A, B, C], 0.0).replica for n in range(30))
    assert set(chosen.values()) == {10}


def test_equal_replicas_are_chosen_by_chance() -> None:
    """Several routers that start together do not all begin with the same replica."""
    chosen = Counter(place(fleet(A, B, C, seed=seed), ask(b"hi"), [A, B, C], 0.0).replica for seed in range(300))
    assert all(count > 60 for count in chosen.values())
    assert len(chosen) == 3


def test_sixteen_equal_prompts_at_once_prefill_once_and_do_not_crowd_one_replica_for_ever() -> None:
    """The siblings of a group follow the first where its prompt is being computed, until decoding there is dearer."""
    policy = fleet(A, B)
    for number in range(40):  # learn that answers are long and that sequences slow each other down
        ticket = place(policy, ask(text(f"warm {number}", 1)), [A, B], 0.0)
        policy.first_token(ticket, 0.1)
        policy.ended(ticket, Usage(64, 4000, 0), 0.1 + 4000 * 0.02)
    tickets = [place(policy, ask(text("group", 30)), [A, B], 100.0 + n / 1000) for n in range(16)]
    computed = [ticket for ticket in tickets if ticket.uncached > 100]
    assert 1 <= len(computed) <= 2, "one prefill for each replica that takes part"


def test_a_swapped_checkpoint_takes_the_credit_of_the_old_cache_with_it() -> None:
    """KV of other weights is never counted, also when its request ends after the swap."""
    policy = fleet(A, version="v1")
    old = place(policy, ask(text("p", 20)), [A], 0.0)
    policy.first_token(old, 0.1)
    policy.changed(ReplicaFacts(A, version="v2+1"))
    policy.ended(old, Usage(1280, 100, 0), 0.5)
    again = place(policy, ask(text("p", 20), text("next", 2)), [A], 1.0)
    assert again.cached_tokens == 0
    policy.restarted(A)
    assert place(policy, ask(text("p", 20)), [A], 1.1).cached_tokens == 0, "nor after a restart"


def test_nobody_gets_the_credit_of_another_model_or_tenant() -> None:
    """Equal text under another scope is not cached."""
    policy = fleet(A)
    serve(policy, place(policy, PlacementRequest("m", prompt(text("p", 20), scope=1)), [A], 0.0), 0.0)
    assert place(policy, PlacementRequest("m", prompt(text("p", 20), scope=2)), [A], 2.0).cached_tokens == 0
    assert place(policy, PlacementRequest("m", prompt(text("p", 20), scope=1)), [A], 2.0).cached_tokens > 1000


def test_a_request_waits_while_no_replica_could_start_it_soon() -> None:
    """It is placed when it can start, not when it comes; an idle replica always takes it."""
    policy = fleet(A, B)
    for number in range(REFRESH_EVERY):
        serve(policy, place(policy, ask(text(f"before {number}", 60)), [A, B], 2.0 * number), 2.0 * number)
    now = 2.0 * REFRESH_EVERY
    running: list[Ticket] = []
    while (ticket := policy.place(ask(text(f"{len(running)}", 60)), [A, B], now)) is not None:
        running.append(ticket)
        assert len(running) < 1000
    assert {ticket.replica for ticket in running} == {A, B}
    for ticket in running:
        if ticket.replica == B:
            policy.ended(ticket, None, now + 1.0)
    assert place(policy, ask(text("late", 60)), [A, B], now + 1.0).replica == B


def test_nothing_waits_for_a_pace_that_is_only_assumed() -> None:
    """A burst right after the start goes to the replicas at once, as many as it may be."""
    policy = fleet(A, B)
    replicas = {place(policy, ask(text(f"{number}", 60)), [A, B], 0.0).replica for number in range(300)}
    assert replicas == {A, B}


def test_a_request_that_does_not_fit_into_the_kv_cache_waits_unless_the_replica_is_idle() -> None:
    """Running requests are not pushed out of memory; what is too long for all is the engine's to refuse."""
    policy = fleet(A, kv_capacity_tokens=3000)
    big = ask(text("big", 40), output_max=10)
    first = place(policy, big, [A], 0.0)
    policy.first_token(first, 0.1)
    assert policy.place(ask(text("other", 40)), [A], 0.2) is None
    policy.ended(first, Usage(2560, 10, 0), 1.0)
    place(policy, ask(text("huge", 100)), [A], 1.1)


def test_the_prefill_rate_is_learned_from_first_tokens() -> None:
    """The predicted time to first token becomes the measured one, on engines of any speed."""
    policy = fleet(A, policy_settings=PredictedSettings(startable_s=1e9))
    rng, now = random.Random(5), 0.0
    for number in range(300):
        ticket = place(policy, ask(text(f"{number}", rng.uniform(2, 60)), output_max=20), [A], now)
        now += 0.05 + ticket.uncached / 1500
        policy.first_token(ticket, now)
        now += 20 * 0.04
        policy.ended(ticket, Usage(ticket.request.prompt.size // 4, 20, 0), now)
    ticket = place(policy, ask(text("x", 40)), [A], now)
    assert ticket.predicted_s == pytest.approx(0.05 + 2560 / 1500, rel=0.15)


def test_a_replica_of_half_the_speed_gets_fewer_requests() -> None:
    """In a fleet of different GPUs each takes what it can do."""
    policy = fleet(A, B, policy_settings=PredictedSettings(startable_s=1e9))
    rate = {A: 16_000.0, B: 4_000.0}
    free = {A: 0.0, B: 0.0}
    pending: list[tuple[float, Ticket]] = []
    chosen: Counter[ReplicaId] = Counter()
    now = 0.0
    for number in range(600):
        now += 0.08
        for at, ticket in [entry for entry in pending if entry[0] <= now]:
            pending.remove((at, ticket))
            policy.first_token(ticket, at)
            policy.ended(ticket, Usage(1280, 1, 0), at)
        ticket = place(policy, ask(text(f"{number}", 20)), [A, B], now)
        free[ticket.replica] = max(now, free[ticket.replica]) + 0.02 + ticket.uncached / rate[ticket.replica]
        pending.append((free[ticket.replica], ticket))
        if number > 300:
            chosen[ticket.replica] += 1
    assert chosen[A] > 2 * chosen[B]


def test_a_session_id_leads_back_where_the_text_alone_does_not() -> None:
    """A client that rewrites its history keeps its replica when it names its session, at a price and no more."""
    hits = 0
    for seed in range(20):
        policy = fleet(A, B, C, seed=seed)
        first = place(policy, ask(text("turn one", 20), affinity="s1"), [A, B, C], 0.0)
        serve(policy, first, 0.0)
        second = place(policy, ask(text("turn two", 25), affinity="s1"), [A, B, C], 2.0)
        hits += second.replica == first.replica
    assert hits == 20


def test_a_session_ids_promise_is_worth_what_it_was_worth_before() -> None:
    """An id under which nothing was ever found cached no longer holds requests together against load."""
    policy = fleet(A, B, seed=3)
    now = 0.0
    for number in range(60):
        ticket = place(policy, ask(text(f"unrelated {number}", 20), affinity="same"), [A, B], now)
        now = serve(policy, ticket, now, cached=0)
    last = place(policy, ask(text("unrelated last", 20), affinity="same"), [A, B], now)
    assert last.cached_tokens < 0.15 * 1280


def test_data_parallel_ranks_have_caches_of_their_own() -> None:
    """Behind one port the request goes to the rank that has it cached, and others to the other ranks."""
    policy = fleet(A, ranks=4)
    first = place(policy, ask(text("p", 20)), [A], 0.0)
    serve(policy, first, 0.0)
    assert place(policy, ask(text("p", 20), b"more"), [A], 2.0).rank == first.rank
    others = {place(policy, ask(text(f"{n}", 20)), [A], 2.0).rank for n in range(3)}
    assert len(others) == 3


def test_ranks_that_run_in_lockstep_wait_for_the_fullest() -> None:
    """Decoding is as slow everywhere in an expert-parallel group as at its busiest rank, so its idle ranks are no bargain."""
    policy = fleet(A, B, group="g1")
    policy.changed(ReplicaFacts(C, group="g2"))
    for number in range(20):
        ticket = policy.adopt(ask(text(f"{number}", 1)), A, 0, 0.0)
        policy.first_token(ticket, 0.05)
    chosen = Counter(place(policy, ask(text(f"x{n}", 4)), [A, B, C], 0.1).replica for n in range(3))
    assert chosen[C] >= 2


def test_the_explanation_names_the_terms_that_decided() -> None:
    """An operator reads why a replica was chosen: the chosen one has the least total."""
    policy = fleet(A, B, C, kv_capacity_tokens=100_000)
    rng = random.Random(4)
    for number in range(40):
        request = ask(text(rng.choice("xyz"), rng.uniform(2, 40)), text(f"{number}", 2))
        terms = {term.replica: term for term in policy.explain(request, [A, B, C])}
        ticket = policy.place(request, [A, B, C], number / 1000)
        least = min(term.total for term in terms.values())
        if ticket is None:
            assert not min(terms.values(), key=lambda term: term.total).is_startable
            continue
        assert terms[ticket.replica].total <= least + 0.001
        assert isinstance(ticket, PredictedTicket)
        assert terms[ticket.replica].cached_tokens == pytest.approx(ticket.cached_tokens)


def test_whole_answers_teach_as_well() -> None:
    """With clients that do not stream, the pace is learned from how long their answers take."""
    policy = fleet(A, policy_settings=PredictedSettings(startable_s=1e9))
    rng, now = random.Random(6), 0.0
    for number in range(400):
        request = ask(text(f"{number}", rng.uniform(2, 60)), output_max=4, streams=False)
        ticket = place(policy, request, [A], now)
        now += 0.05 + ticket.uncached / 1500 + 3 * 0.05
        policy.ended(ticket, Usage(request.prompt.size // 4, 4, 0), now)
    ticket = place(policy, ask(text("x", 40)), [A], now)
    assert ticket.predicted_s == pytest.approx(0.1 + 2560 / 1500, rel=0.25)


def test_the_prompt_of_an_unseen_first_token_does_not_count_as_queued_for_ever() -> None:
    """A long whole answer that is only decoding does not keep others away as if its prompt were still to come."""
    policy = fleet(A, B)
    slow = place(policy, ask(text("long answer", 60), streams=False), [A, B], 0.0)
    later = place(policy, ask(text("x", 60), streams=False), [A, B], 30.0)
    other = place(policy, ask(text("y", 60), streams=False), [A, B], 30.0)
    assert {later.replica, other.replica} == {A, B}
    assert {term.wait for term in policy.explain(ask(b"z"), [slow.replica])} != {0.0}, "what was just placed is queued"
    place(policy, ask(b"z"), [A, B], 60.0)
    assert all(term.wait < 0.01 for term in policy.explain(ask(b"z"), [A, B]))


def learned(policy: Predicted, ids: Sequence[ReplicaId], *, requests: int = 40, tokens_per_s: float = 8000.0) -> float:
    """Requests that come one after another teach the pace. Returns the time."""
    now = 0.0
    for number in range(requests):
        ticket = place(policy, ask(text(f"teach {number}", 8 + number % 7)), ids, now)
        policy.first_token(ticket, now + 0.02 + ticket.uncached / tokens_per_s)
        now += 2.0
        policy.ended(ticket, Usage(ticket.request.prompt.size // 4, 50, 0), now)
    return now


def test_an_image_counts_as_the_tokens_that_it_becomes_and_teaches_nothing_of_text() -> None:
    """A picture of some megabytes neither keeps others away nor makes text look shorter than it is."""
    policy = fleet(A, kv_capacity_tokens=500_000)
    now = learned(policy, [A])
    busy = place(policy, ask(text("running", 8)), [A], now)
    picture = text("aGVsbG8", 10_000)
    request = PlacementRequest("m", prompt(picture), media=1, media_bytes=len(picture))
    ticket = place(policy, request, [A], now)
    assert ticket.uncached < 3000
    policy.first_token(ticket, now + 0.3)
    policy.ended(ticket, Usage(1500, 50, 0), now + 1.0)
    assert place(policy, ask(text("text", 40)), [A], now + 1.0).uncached == pytest.approx(40 * UNIT / 4, rel=0.1)
    policy.ended(busy, None, now + 1.0)


def test_a_prompt_that_fits_into_no_cache_is_sent_and_not_kept_waiting() -> None:
    """The engine says that it is too long; waiting would only keep it, and others, from an answer."""
    policy = fleet(A, kv_capacity_tokens=10_000)
    now = learned(policy, [A])
    place(policy, ask(text("running", 8)), [A], now)
    assert policy.place(ask(text("far too long", 400)), [A], now) is not None


def test_a_stream_that_is_stuck_before_its_first_token_does_not_block_its_replica() -> None:
    """One answer that hangs in the engine costs the others a moment and no more."""
    policy = fleet(A)
    now = learned(policy, [A])
    place(policy, ask(text("stuck", 160)), [A], now)
    assert policy.place(ask(text("behind it", 8)), [A], now) is None, "its prompt is being computed"
    assert policy.place(ask(text("behind it", 8)), [A], now + 12.0) is not None


def test_nothing_of_a_request_is_kept_when_it_has_ended() -> None:
    """Long bodies that an engine refuses at once do not fill the router's memory."""
    policy = fleet(A)
    for streams in (True, False):
        request = ask(text("long", 4000), streams=streams)
        kept = weakref.ref(request)
        policy.ended(place(policy, request, [A], 0.0), None, 0.1)
        del request
        gc.collect()
        assert kept() is None


def test_a_request_that_must_not_wait_goes_where_it_would_start_soonest() -> None:
    """Retries of a replica that died under load are spread over the others."""
    policy = fleet(A, B, C, kv_capacity_tokens=50_000)
    now = learned(policy, [A, B, C])
    chosen = Counter(policy.place_anyway(ask(text(f"retry {n}", 60)), [A, B, C], now).replica for n in range(60))
    assert all(15 <= count <= 25 for count in chosen.values())


@pytest.mark.parametrize(
    ("request_of", "usage"),
    [
        (lambda n: PlacementRequest("m", prompt(text(f"{n}", 2)), is_whole=False), Usage(20_000, 50, 0)),
        (lambda n: PlacementRequest("m", prompt(b""), generates=False), Usage(30, 0, None)),
        (lambda n: PlacementRequest("m", prompt(b""), generates=False, streams=False), Usage(30, 0, None)),
    ],
    ids=["stored response", "embedding", "embedding, whole"],
)
def test_requests_that_say_nothing_of_prompts_teach_nothing(
    request_of: Callable[[int], PlacementRequest], usage: Usage
) -> None:
    """A continued stored response, whose beginning the engine keeps, or an embedding leaves the predictions as they are."""
    policy = fleet(A)
    now = learned(policy, [A])
    before = place(policy, ask(text("before", 40)), [A], now)
    policy.ended(before, None, now)
    for number in range(100):
        ticket = place(policy, request_of(number), [A], now)
        now += 0.9
        policy.ended(ticket, usage, now)
    after = place(policy, ask(text("after", 40)), [A], now)
    assert after.uncached == pytest.approx(before.uncached, rel=0.05)
    assert after.predicted_s == pytest.approx(before.predicted_s, rel=0.5)


def test_long_whole_answers_teach_the_pace_as_well() -> None:
    """A fleet whose clients never stream learns how slow it is, and lets requests wait for it."""
    policy = fleet(A)
    now = 0.0
    for number in range(120):
        ticket = place(policy, ask(text(f"{number}", 10), streams=False), [A], now)
        now += ticket.uncached / 200 + 100 * 0.1
        policy.ended(ticket, Usage(640, 100, 0), now)
        now += 1.0
    assert place(policy, ask(text("x", 10), streams=False), [A], now).predicted_s > 0.5, "0.1 is what was assumed"
    sent = [policy.place(ask(text(f"y{n}", 10), streams=False), [A], now) for n in range(30)]
    assert None in sent, "at first nothing was held back"


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_the_same_seed_makes_the_same_decisions(seed: int) -> None:
    """A log of decisions can be replayed."""

    def run() -> list[ReplicaId | None]:
        policy, rng, now = fleet(A, B, C, seed=seed), random.Random(seed), 0.0
        running: list[Ticket] = []
        chosen: list[ReplicaId | None] = []
        for number in range(60):
            now += rng.random() / 10
            ticket = policy.place(ask(text(rng.choice("xyz"), 10), text(f"{number}", 3)), [A, B, C], now)
            chosen.append(None if ticket is None else ticket.replica)
            if ticket is not None:
                policy.first_token(ticket, now + rng.random())
                running.append(ticket)
            if len(running) > 5:
                policy.ended(running.pop(rng.randrange(5)), Usage(800, rng.randrange(1, 300), 0), now)
        return chosen

    assert run() == run()


class Accounts(RuleBasedStateMachine):
    """Whatever happens to requests and replicas, the accounts never go below zero and come back to it."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = fleet(A, B, kv_capacity_tokens=5000)
        self.there = {A, B}
        self.tickets: list[PredictedTicket] = []
        self.now = 0.0

    @rule(name=st.sampled_from("abc"), chunks=st.floats(0.1, 30), streams=st.booleans(), session=st.sampled_from([None, "s"]))
    def place(self, name: str, chunks: float, streams: bool, session: str | None) -> None:
        if self.there:
            request = ask(text(name, chunks), text("end", 1), streams=streams, affinity=session)
            ticket = self.policy.place(request, sorted(self.there), self.now)
            if ticket is None:
                assert all(self.policy.in_flight(replica) for replica in self.there)
                return
            assert isinstance(ticket, PredictedTicket)
            assert ticket.replica in self.there
            assert ticket.uncached >= 0
            self.tickets.append(ticket)

    @rule(replica=st.sampled_from([A, B, C]))
    def adopt(self, replica: ReplicaId) -> None:
        ticket = self.policy.adopt(ask(text("adopted", 5)), replica, 0, self.now)
        assert isinstance(ticket, PredictedTicket)
        self.tickets.append(ticket)
        self.there.add(replica)

    @precondition(lambda self: any(ticket.request.streams and not ticket.is_seen for ticket in self.tickets))
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        waiting = [ticket for ticket in self.tickets if ticket.request.streams and not ticket.is_seen]
        ticket = data.draw(st.sampled_from(waiting))
        self.policy.first_token(ticket, self.now)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), cached=st.sampled_from([None, 0, 500]), completion=st.integers(0, 400), failed=st.booleans())
    def end(self, data: st.DataObject, cached: int | None, completion: int, failed: bool) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        self.tickets.remove(ticket)
        self.policy.ended(ticket, None if failed else Usage(ticket.request.prompt.size // 4, completion, cached), self.now)

    @rule(replica=st.sampled_from([A, B, C]), version=st.sampled_from(["v1", "v2"]), ranks=st.sampled_from([1, 1, 2]))
    def change(self, replica: ReplicaId, version: str, ranks: int) -> None:
        self.policy.changed(ReplicaFacts(replica, version=version, kv_capacity_tokens=5000, ranks=ranks))
        self.there.add(replica)

    @rule(replica=st.sampled_from([A, B, C]))
    def remove(self, replica: ReplicaId) -> None:
        self.policy.removed(replica)
        self.there.discard(replica)

    @rule(replica=st.sampled_from([A, B, C]))
    def restart(self, replica: ReplicaId) -> None:
        self.policy.restarted(replica)

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def accounts_are_sound(self) -> None:
        for target in {ticket.target for ticket in self.tickets} | set(self.policy.targets):
            of_it = [ticket for ticket in self.tickets if ticket.target is target]
            assert target.in_flight == len(of_it)
            assert target.queued >= -1e-6
            assert target.outputs >= -1e-6
            assert 0 <= target.running <= target.in_flight
            if not of_it:
                assert (target.queued, target.outputs, target.context, target.running) == (0.0, 0.0, 0.0, 0)


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
