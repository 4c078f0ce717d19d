"""Tells the placement policy what the sources of KV events say, and how far each can be trusted."""

from collections.abc import Mapping, Sequence

from router.policy.interface import Coverage, Policy
from router.state.kv_source import KvMode
from router.types import ReplicaId

_COVERAGE = {KvMode.LIVE: Coverage.ALL, KvMode.PARTIAL: Coverage.SOME}


class PolicySink:
    """A KvSink. `now` is the clock of the policy's other calls."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._modes: dict[tuple[ReplicaId, int], KvMode] = {}
        self.is_heard = False  # whether any source can be relied on at present, if only in part

    @property
    def modes(self) -> Mapping[tuple[ReplicaId, int], KvMode]:
        """Of every source that is followed."""
        return self._modes

    def stored(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self._policy.stored(replica, rank, blocks, now)

    def evicted(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self._policy.evicted(replica, rank, blocks, now)

    def cleared(self, replica: ReplicaId, rank: int, now: float) -> None:
        self._policy.cleared(replica, rank, now)

    def forgotten(self, replica: ReplicaId, rank: int, blocks: Sequence[int], now: float) -> None:
        self._policy.forgotten(replica, rank, blocks, now)

    def mode_changed(self, replica: ReplicaId, rank: int, mode: KvMode, reason: str) -> None:
        if mode is KvMode.OFF:
            self._modes.pop((replica, rank), None)
        else:
            self._modes[replica, rank] = mode
        self.is_heard = any(one in _COVERAGE for one in self._modes.values())
        self._policy.trusted(replica, rank, _COVERAGE.get(mode, Coverage.UNSURE))
