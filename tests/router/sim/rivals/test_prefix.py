"""The rivals' indexes say how much of a prompt a replica holds."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.sim.rivals.prefix import PredictedPrefixes, ReportedBlocks, RoutedPrefixes, prompt_tokens
from tests.router.sim.rivals.shapes import TARGETS, A, B, C, chain, request

PROMPTS = st.tuples(st.integers(1, 3), st.integers(1, 8)).map(lambda shape: chain(*shape))


def leading(blocks: Sequence[int], held: set[int]) -> int:
    count = 0
    for block in blocks:
        if block not in held:
            break
        count += 1
    return count


@given(st.lists(st.tuples(st.sampled_from([A, B]), PROMPTS), max_size=20), st.integers(1, 12), PROMPTS)
def test_routed_prefixes_never_exceed_their_bound_and_keep_beginnings(
    routed: list[tuple[str, list[int]]], capacity: int, prompt: list[int]
) -> None:
    """The last prompt is remembered as far as there is room, and nothing is found that was never routed."""
    index = RoutedPrefixes()
    seen: dict[str, set[int]] = {A: set(), B: set()}
    for replica, blocks in routed:
        target = (A, 0) if replica == A else (B, 0)
        index.insert(target, blocks, 0.0)
        seen[replica] |= set(blocks)
        assert index.matched(target, blocks) == len(blocks)
        index.shrink(target, capacity)
        assert index.size(target) <= capacity
        assert index.matched(target, blocks) == min(len(blocks), capacity)
    for replica, rank in TARGETS[:2]:
        assert index.matched((replica, rank), prompt) <= leading(prompt, seen[replica])
    index.forget(A)
    assert index.matched((A, 0), prompt) == 0


EVENTS = st.lists(
    st.tuples(st.sampled_from(["stored", "stored", "evicted", "forget"]), st.sampled_from(TARGETS), PROMPTS), max_size=30
)


@given(EVENTS, PROMPTS)
def test_reported_blocks_are_those_of_each_replica(
    events: list[tuple[str, tuple[object, int], list[int]]], prompt: list[int]
) -> None:
    """The walk over all replicas at once finds what a set for each would."""
    index = ReportedBlocks()
    held: dict[object, set[int]] = {target: set() for target in TARGETS}
    for event, where, blocks in events:
        (target,) = [known for known in TARGETS if known == where]
        if event == "stored":
            index.stored(target, blocks)
            held[target] |= set(blocks)
        elif event == "evicted":
            index.evicted(target, blocks[-2:])
            held[target] -= set(blocks[-2:])
        else:
            index.forget(target[0])
            held[target].clear()
    assert index.matched(prompt, TARGETS) == [leading(prompt, held[target]) for target in TARGETS]


def test_a_prediction_is_the_longest_of_what_was_just_routed() -> None:
    """Each placement counts for its own time."""
    index = PredictedPrefixes(2.0)
    index.insert((A, 0), chain(1, 4), 0.0)
    index.insert((A, 0), chain(1, 2) + chain(8, 6), 1.0)
    index.insert((B, 0), chain(2, 4), 1.0)
    index.insert((C, 0), [], 1.0)
    assert index.matched(chain(1, 8), 1.5) == {(A, 0): 4}
    assert index.matched(chain(1, 8), 2.0) == {(A, 0): 2}
    assert index.matched(chain(2, 3), 2.0) == {(B, 0): 3}
    assert index.matched([], 2.0) == {}
    index.forget(A)
    assert index.matched(chain(1, 8), 2.0) == {}
    assert index.matched(chain(2, 8), 3.0) == {}


@pytest.mark.parametrize(
    ("blocks", "tokens", "expected"),
    [(2, 32, 32), (2, 40, 40), (2, 300, 47), (2, 5, 32), (0, 700, 700), (0, 0, 1)],
)
def test_a_prompt_is_as_long_as_its_blocks_and_bytes_agree(blocks: int, tokens: int, expected: int) -> None:
    """Whole blocks are certain; bytes tell the rest."""
    assert prompt_tokens(request(chain(1, blocks), tokens=tokens), 16) == expected
