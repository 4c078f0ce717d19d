"""How much goes before a request, summed over all tenants without asking each."""

from hypothesis import given
from hypothesis import strategies as st

from router.admission.backlogs import Backlogs


@given(
    st.lists(st.tuples(st.integers(0, 9), st.floats(0.0, 1e6)), max_size=60),
    st.floats(0.0, 2e6),
    st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=10, max_size=10),
)
def test_the_sum_is_right_to_within_the_tenants_near_the_level(
    changes: list[tuple[int, float]], level: float, weights: list[float]
) -> None:
    """It never promises an earlier start than fair service gives, and errs only by backlogs about as long as one's own."""
    backlogs, now = Backlogs(), [0.0] * 10
    for tenant, after in changes:
        backlogs.changed(now[tenant], after, weights[tenant])
        now[tenant] = after
    exact = sum(min(tokens, level * weight) for tokens, weight in zip(now, weights, strict=True))
    near = sum(
        tokens
        for tokens, weight in zip(now, weights, strict=True)
        if level / 2 - 1 <= tokens / weight <= 2 * level + 1 or tokens / weight <= 1.0
    )
    found = backlogs.up_to(level)
    slack = 1e-6 * (1.0 + sum(now))
    assert exact - slack <= found <= exact + near + slack


def test_nothing_is_left_over_when_all_have_gone() -> None:
    """Rounding errors of long days do not add up."""
    backlogs = Backlogs()
    for number in range(1, 1000):
        backlogs.changed(0.0, 0.1 * number, 1.0)
    for number in range(1, 1000):
        backlogs.changed(0.1 * number, 0.0, 1.0)
    assert backlogs.up_to(1e9) == 0.0
