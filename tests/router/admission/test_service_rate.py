"""How fast a fleet works off what waits."""

import pytest

from router.admission.service_rate import ServiceRate


def test_a_steady_rate_is_learned() -> None:
    """A fleet that starts a request of 50 tokens every 20 ms does 2500 tokens per second."""
    rate = ServiceRate()
    rate.began(0.0)
    for number in range(1, 200):
        rate.served(50.0, 0.02 * number)
    assert rate.per_second(3.98) == pytest.approx(2500.0, rel=0.01)


def test_nothing_is_believed_before_enough_was_seen() -> None:
    """Right after the start no request is refused for a guess."""
    rate = ServiceRate()
    assert rate.per_second(0.0) is None
    rate.began(0.0)
    for number in range(1, 8):
        rate.served(50.0, 0.5 * number)
    assert rate.per_second(3.5) is None
    rate.served(50.0, 4.0)
    assert rate.per_second(4.0) == pytest.approx(100.0, rel=0.05)


def test_quiet_time_does_not_count() -> None:
    """A night without waiting requests leaves what was learned by day."""
    rate = ServiceRate()
    rate.began(0.0)
    for number in range(1, 101):
        rate.served(10.0, 0.1 * number)
    rate.ceased(10.0)
    rate.served(1e9, 20.0)  # placed while nothing waited: says nothing
    rate.began(50_000.0)
    assert rate.per_second(50_000.0) == pytest.approx(100.0, rel=0.01)


def test_a_fleet_that_stops_is_noticed() -> None:
    """While requests wait and none starts, the rate falls towards nothing."""
    rate = ServiceRate(time_constant_s=10.0)
    rate.began(0.0)
    for number in range(1, 101):
        rate.served(10.0, 0.1 * number)
    falling = [rate.per_second(now) for now in (10.0, 15.0, 20.0, 60.0)]
    assert None not in falling
    assert falling == sorted(falling, key=lambda value: -(value or 0.0))
    assert falling[-1] == pytest.approx(0.4, abs=0.4)


def test_a_time_constant_of_nothing_is_refused() -> None:
    """A setting that could learn nothing is named with its remedy."""
    with pytest.raises(ValueError, match=r"time_constant_s is 0; it must be above 0 seconds"):
        ServiceRate(0)


def test_time_in_which_nothing_could_be_served_can_be_discounted() -> None:
    """What fits nowhere does not make the fleet look slow to others."""
    rate = ServiceRate()
    rate.began(0.0)
    for second in range(1, 21):
        rate.served(100.0, float(second))
    before = rate.per_second(20.0)
    assert before is not None
    slow = rate.per_second(120.0)
    assert slow is not None
    assert slow < before / 2
    rate.discounted()
    assert rate.per_second(500.0) == before
    rate.began(500.0)
    assert rate.per_second(501.0) < before  # type: ignore[operator]
