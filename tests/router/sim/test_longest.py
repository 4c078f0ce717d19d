"""The longest of the steps since any earlier one is known without keeping them all."""

from hypothesis import given
from hypothesis import strategies as st

from router.sim.longest import LongestSince


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 20)), max_size=40))
def test_it_answers_as_a_full_list_would(added: list[tuple[int, int]]) -> None:
    """Also for steps that were never told of one by one."""
    longest, steps, number = LongestSince(), [], 0
    for gap, seconds in added:
        number += gap
        steps.append((number, float(seconds)))
        longest.add(number, float(seconds))
        for since in range(number + 2):
            assert longest.after(since) == max((duration for step, duration in steps if step > since), default=0.0)
    longest.clear()
    assert longest.after(0) == 0.0
