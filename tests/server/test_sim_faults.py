"""Scripted faults as data, and which requests they hit."""

import pytest

from server.sim_faults import Fault, FaultBook, FaultKind, RequestPlan, decode_faults


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"kind": "explode"}', "explode"),
        ('{"kind": "delay"}', "seconds is 0.0"),
        ('{"kind": "slow_step"}', "seconds is 0.0"),
        ('{"kind": "refuse", "seconds": -1}', "seconds is -1"),
        ('{"kind": "status", "status": 200}', "status is 200"),
        ('{"kind": "reset", "after_chunks": -1}', "after_chunks is -1"),
        ('{"kind": "reset", "times": 0}', "times is 0"),
        ('{"kind": "reset", "probability": 0}', "probability is 0"),
        ('{"kind": "reset", "chunks": 1}', "chunks"),
        ("{", "cannot read a fault"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused_with_the_reason(text: str, words: str) -> None:
    """The error names the field and the value."""
    with pytest.raises(ValueError, match="fault") as caught:
        decode_faults(text)
    assert words in str(caught.value)


def test_one_fault_or_a_list_of_them_is_read() -> None:
    """Both forms of JSON."""
    assert decode_faults('{"kind": "reset"}') == decode_faults('[{"kind": "reset"}]') == [Fault(kind=FaultKind.RESET)]


def test_a_fault_hits_as_many_requests_as_it_says() -> None:
    """`times` counts hits, and the listing shows what is left."""
    book = FaultBook([Fault(kind=FaultKind.RESET, times=2)])
    assert [plan.breakage is not None for plan in (book.plan_request() for _ in range(4))] == [True, True, False, False]
    assert book.listing()[0]["left"] == 0


def test_chance_is_drawn_from_the_seed() -> None:
    """Equal seeds hit the same requests; about as many as the probability says."""

    def hits(seed: int) -> list[bool]:
        book = FaultBook([Fault(kind=FaultKind.STATUS, probability=0.3, seed=seed)])
        return [book.plan_request().status is not None for _ in range(1000)]

    assert hits(1) == hits(1) != hits(2)
    assert 240 < sum(hits(1)) < 360


def test_one_request_meets_at_most_one_fault_of_a_kind_in_their_order() -> None:
    """A delay and a breakage may meet in one request; a second breakage waits for the next."""
    first, second = Fault(kind=FaultKind.RESET, times=1), Fault(kind=FaultKind.TRUNCATE, times=1)
    book = FaultBook([Fault(kind=FaultKind.DELAY, seconds=2, times=1), first, second])
    assert [book.plan_request() for _ in range(3)] == [
        RequestPlan(2.0, None, first),
        RequestPlan(0.0, None, second),
        RequestPlan(),
    ]


def test_slow_steps_are_drawn_per_step_and_hit_no_request() -> None:
    """slow_step leaves requests alone, and is used up by engine steps."""
    book = FaultBook([Fault(kind=FaultKind.SLOW_STEP, seconds=2, times=2)])
    assert book.plan_request() == RequestPlan()
    assert [book.slow_step_s() for _ in range(3)] == [2, 2, 0]


def test_reload_faults_hit_reloads_only() -> None:
    """fail_reload leaves requests alone, and is used up by reloads."""
    book = FaultBook([Fault(kind=FaultKind.FAIL_RELOAD, times=1)])
    assert book.plan_request() == RequestPlan()
    assert [book.reload_fails(), book.reload_fails()] == [True, False]


def test_cleared_faults_hit_nothing() -> None:
    """`clear` disarms everything, also in requests that have drawn a fault and not met it yet."""
    book = FaultBook()
    book.add([Fault(kind=FaultKind.RESET)])
    drawn = book.plan_request()
    assert book.still_holds(drawn)
    book.clear()
    assert not book.still_holds(drawn)
    assert book.plan_request() == RequestPlan()
