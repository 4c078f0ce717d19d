"""When a replica that fails requests gets no more of them, and how it comes back."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.state.breaker import (
    ENDINGS_TO_JUDGE,
    FAILURES_IN_A_ROW_TO_OPEN,
    OPEN_AT_FIRST_S,
    OPEN_AT_MOST_S,
    Breaker,
    BreakerState,
)


def feed(breaker: Breaker, endings: str, now: float, step_s: float = 0.01) -> list[bool]:
    """Ordinary requests end: `+` succeeds, `-` fails. What each call returned."""
    changes = []
    for number, ending in enumerate(endings):
        moment = now + number * step_s
        if ending == "+":
            changes.append(breaker.succeeded(moment, is_trial=False))
        else:
            changes.append(breaker.failed(moment, is_trial=False))
    return changes


def opened(now: float) -> Breaker:
    breaker = Breaker()
    feed(breaker, "-----", now, step_s=0.0)
    assert breaker.state is BreakerState.OPEN
    return breaker


def on_trial(now: float) -> Breaker:
    """Half open, with its trial running."""
    breaker = opened(now - OPEN_AT_FIRST_S)
    assert breaker.tick(now)
    assert breaker.trial_began()
    return breaker


@pytest.mark.parametrize(
    ("endings", "step_s", "opens"),
    [
        ("-----", 0.01, True),
        ("----", 0.01, False),
        ("-----", 100.0, True),  # in a row, however slowly
        ("----+----", 0.01, False),  # nine endings are too few to judge by share
        ("+++++-----", 0.01, True),
        ("----+----+", 0.01, False),  # a success takes nobody out
        ("----+----+-", 0.01, True),
        ("+-" * 5, 0.01, True),  # ten endings, half of them failures
        ("+-" * 4 + "+", 0.01, False),
        ("+-" * 50, 1.2, False),  # never ten endings within ten seconds
        ("++-" * 100, 0.01, False),  # a third fails
        ("+--" * 4, 0.01, True),
        ("+" * 100 + "----", 0.01, False),
        ("+" * 100 + "-----", 0.01, True),
    ],
)
def test_a_replica_is_out_after_failures_in_a_row_or_by_their_share(endings: str, step_s: float, opens: bool) -> None:
    """A dead engine costs five requests, a half-dead one about ten, and one bad request in three takes nobody out."""
    breaker = Breaker()
    changes = feed(breaker, endings, 1000.0, step_s)
    assert (breaker.state, breaker.admits) == ((BreakerState.OPEN, False) if opens else (BreakerState.CLOSED, True))
    assert changes.count(True) == opens


@given(st.text("+-", max_size=120), st.sampled_from([0.0, 0.01, 0.4, 0.9, 2.0]))
def test_a_replica_that_mostly_answers_stays(endings: str, step_s: float) -> None:
    """The breaker opens at the first failure that meets the rule as it is documented, at no other and not later."""
    breaker = Breaker()
    for number, changed in enumerate(feed(breaker, endings, 0.0, step_s), 1):
        seen = endings[:number]
        # A second of the ring is forgotten as a whole, so look back by whole seconds.
        newest = int((number - 1) * step_s)
        recent = [ending for index, ending in enumerate(seen) if int(index * step_s) > newest - 10]
        by_share = len(recent) >= ENDINGS_TO_JUDGE and recent.count("-") * 2 >= len(recent)
        expected = seen.endswith("-") and (seen.endswith("-" * FAILURES_IN_A_ROW_TO_OPEN) or by_share)
        assert changed is expected
        if changed:
            return


def test_after_a_delay_one_request_at_a_time_tries_the_replica() -> None:
    """A replica that came back gets one request first, not the whole load."""
    breaker = opened(100.0)
    assert [breaker.tick(now) for now in (100.0, 102.0, 104.99)] == [False, False, False]
    assert not breaker.admits
    assert breaker.tick(105.0)
    assert (breaker.state, breaker.admits) == (BreakerState.HALF_OPEN, True)
    assert not breaker.tick(106.0)
    assert breaker.trial_began()
    assert not breaker.admits
    assert not breaker.trial_began()  # only one
    assert not breaker.tick(1000.0)
    assert breaker.succeeded(1001.0, is_trial=True)
    assert (breaker.state, breaker.admits) == (BreakerState.CLOSED, True)


def test_a_trial_without_a_verdict_makes_room_for_the_next() -> None:
    """A client that leaves during the trial does not keep the replica out."""
    breaker = on_trial(100.0)
    assert breaker.trial_abandoned()
    assert (breaker.state, breaker.admits) == (BreakerState.HALF_OPEN, True)
    assert not breaker.trial_abandoned()
    assert breaker.trial_began()
    assert breaker.succeeded(101.0, is_trial=True)


def test_each_failed_trial_doubles_the_delay_up_to_a_minute() -> None:
    """A replica that stays broken costs its clients one request a minute at most."""
    breaker, now, delays = on_trial(100.0), 100.0, []
    for _ in range(6):
        assert not breaker.failed(now, is_trial=True)  # it admitted nobody before either
        assert (breaker.state, breaker.admits) == (BreakerState.OPEN, False)
        began = now
        while not breaker.tick(now):
            now += 0.5
        delays.append(now - began)
        assert breaker.trial_began()
    assert delays == [10.0, 20.0, 40.0, 60.0, 60.0, 60.0]
    assert breaker.succeeded(now, is_trial=True)
    feed(breaker, "-----", now, step_s=0.0)
    assert [breaker.tick(now + 4.9), breaker.tick(now + OPEN_AT_FIRST_S)] == [False, True]  # forgiven


@pytest.mark.parametrize("endings", ["-", "+", "-----", "+++++", "+-" * 20])
def test_requests_from_before_it_opened_decide_nothing(endings: str) -> None:
    """The rest of a broken batch, ending late, neither closes the breaker nor keeps the replica out for longer."""
    breaker = opened(100.0)
    assert not any(feed(breaker, endings, 101.0))
    assert breaker.state is BreakerState.OPEN
    assert breaker.tick(105.0)
    assert not any(feed(breaker, endings, 105.1))
    assert (breaker.state, breaker.admits) == (BreakerState.HALF_OPEN, True)
    assert breaker.trial_began()
    assert not any(feed(breaker, endings, 106.0))
    assert (breaker.state, breaker.admits) == (BreakerState.HALF_OPEN, False)
    breaker.failed(107.0, is_trial=True)
    assert [breaker.tick(116.9), breaker.tick(117.0)] == [False, True]


@pytest.mark.parametrize("endings", ["-", "----", "+--+--"])
def test_a_replica_that_passed_its_trial_is_judged_anew(endings: str) -> None:
    """The failures that opened the breaker do not open it a second time."""
    breaker = Breaker()
    feed(breaker, "+-" * 5, 95.0)
    assert breaker.tick(100.1)
    assert breaker.trial_began()
    assert breaker.succeeded(100.2, is_trial=True)
    feed(breaker, endings, 100.3)
    assert breaker.state is BreakerState.CLOSED


def test_successes_from_before_the_trial_do_not_excuse_failures_after_it() -> None:
    """A replica that came back half broken is out again after ten requests, however well it did before."""
    breaker = Breaker()
    feed(breaker, "+" * 50 + "-----", 100.0, step_s=0.0)
    assert breaker.tick(105.0)
    assert breaker.trial_began()
    assert breaker.succeeded(105.0, is_trial=True)
    assert feed(breaker, "+-" * 5, 105.1) == [False] * 9 + [True]


def test_a_closed_breaker_knows_no_trial() -> None:
    """Placing a request on a healthy replica makes no trial of it."""
    breaker = Breaker()
    assert not breaker.trial_began()
    assert not breaker.trial_abandoned()
    assert not breaker.tick(1e9)
    assert breaker.admits
    assert not opened(1.0).trial_began()


@pytest.mark.parametrize("jumped_to", [-1e9, 0.0, 99.0])
def test_a_clock_that_was_set_back_does_not_keep_a_replica_out(jumped_to: float) -> None:
    """The delay is at most what it was, counted from the jump."""
    breaker = opened(100.0)
    assert not breaker.tick(jumped_to)
    assert breaker.tick(jumped_to + OPEN_AT_FIRST_S)


class BreakerMachine(RuleBasedStateMachine):
    """Requests and ticks in any order. Trials end once, as the caller promises."""

    @initialize()
    def begin(self) -> None:
        self.breaker = Breaker()
        self.now = 0.0
        self.has_trial = False
        self.admitted = self.breaker.admits

    def check(self, changed: bool) -> None:
        assert changed is (self.breaker.admits is not self.admitted)
        self.admitted = self.breaker.admits

    @rule(passed=st.sampled_from([0.0, 0.1, 1.0, 5.0, 60.0]))
    def time_passes(self, passed: float) -> None:
        self.now += passed

    @rule(endings=st.lists(st.booleans(), min_size=1, max_size=12))
    def ordinary_requests_end(self, endings: Iterable[bool]) -> None:
        for is_success in endings:
            before = self.breaker.state
            end = self.breaker.succeeded if is_success else self.breaker.failed
            self.check(end(self.now, is_trial=False))
            if before is not BreakerState.CLOSED:
                assert self.breaker.state is before

    @rule()
    def a_request_begins(self) -> None:
        is_trial = self.breaker.trial_began()
        assert is_trial is (self.breaker.state is BreakerState.HALF_OPEN and not self.has_trial)
        self.has_trial |= is_trial
        self.check(is_trial)

    @precondition(lambda self: self.has_trial)
    @rule(verdict=st.sampled_from([True, False, None]))
    def the_trial_ends(self, verdict: bool | None) -> None:
        self.has_trial = False
        if verdict is None:
            self.check(self.breaker.trial_abandoned())
            assert self.breaker.state is BreakerState.HALF_OPEN
        elif verdict:
            self.check(self.breaker.succeeded(self.now, is_trial=True))
            assert self.breaker.state is BreakerState.CLOSED
        else:
            self.check(self.breaker.failed(self.now, is_trial=True))
            assert self.breaker.state is BreakerState.OPEN

    @rule()
    def tick(self) -> None:
        self.check(self.breaker.tick(self.now))

    @invariant()
    def a_replica_always_has_a_way_back(self) -> None:
        """Out for longer than the longest delay only while its trial runs."""
        if self.has_trial:
            assert (self.breaker.state, self.breaker.admits) == (BreakerState.HALF_OPEN, False)
        elif not self.breaker.admits:
            self.now += OPEN_AT_MOST_S
            self.check(self.breaker.tick(self.now))
            assert self.breaker.admits


TestAnyOrder = BreakerMachine.TestCase
