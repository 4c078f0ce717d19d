"""The placement policy hears how far each source of KV events can be trusted, and nothing is concluded from the others."""

from collections.abc import Sequence

import pytest

from router.policy.interface import Coverage, Policy
from router.state.kv_sink import PolicySink
from router.state.kv_source import KvMode
from router.types import ReplicaId

A, B = ReplicaId("a:1"), ReplicaId("b:1")


class Heard(Policy):
    """What it was told, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def stored(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self.calls.append(("stored", replica, rank, *blocks))

    def evicted(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self.calls.append(("evicted", replica, rank, *blocks))

    def cleared(self, replica: ReplicaId, rank: int, now: float) -> None:
        self.calls.append(("cleared", replica, rank))

    def forgotten(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self.calls.append(("forgotten", replica, rank, *blocks))

    def trusted(self, replica: ReplicaId, rank: int, coverage: Coverage) -> None:
        self.calls.append(("trusted", replica, rank, coverage))


@pytest.mark.parametrize(
    ("mode", "coverage"),
    [
        (KvMode.OFF, Coverage.UNSURE),
        (KvMode.JOINING, Coverage.UNSURE),
        (KvMode.LIVE, Coverage.ALL),
        (KvMode.PARTIAL, Coverage.SOME),
        (KvMode.SUSPENDED, Coverage.UNSURE),
    ],
)
def test_only_a_source_that_has_missed_nothing_is_taken_at_its_word(mode: KvMode, coverage: Coverage) -> None:
    """A source that was heard only in part tells of a part, and the others tell nothing."""
    policy = Heard()
    sink = PolicySink(policy)
    sink.mode_changed(A, 1, mode, "why")
    assert policy.calls == [("trusted", A, 1, coverage)]
    assert sink.is_heard is (coverage is not Coverage.UNSURE)


def test_what_a_source_tells_reaches_the_policy_as_it_is() -> None:
    """Unknown is not gone: the policy can tell blocks that were evicted from those of which nothing is known any more."""
    policy = Heard()
    sink = PolicySink(policy)
    sink.stored(A, 0, [1, 2], 0.0)
    sink.evicted(A, 0, [2], 0.0)
    sink.forgotten(A, 1, [3], 0.0)
    sink.cleared(B, 0, 0.0)
    assert policy.calls == [("stored", A, 0, 1, 2), ("evicted", A, 0, 2), ("forgotten", A, 1, 3), ("cleared", B, 0)]


def test_a_source_that_is_not_followed_any_more_is_forgotten() -> None:
    """A fleet whose replicas come and go keeps nothing of those that went."""
    sink = PolicySink(Heard())
    for mode in (KvMode.JOINING, KvMode.LIVE):
        sink.mode_changed(A, 0, mode, "why")
    sink.mode_changed(B, 0, KvMode.JOINING, "why")
    assert dict(sink.modes) == {(A, 0): KvMode.LIVE, (B, 0): KvMode.JOINING}
    sink.mode_changed(A, 0, KvMode.OFF, "gone")
    assert dict(sink.modes) == {(B, 0): KvMode.JOINING}
    assert not sink.is_heard
