"""What is to happen, in order of time."""

import heapq
from collections.abc import Callable
from typing import Any


class Timeline:
    """Calls wait for their time; those due at the same time come in the order in which they were asked for."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """`call(time, *arguments)` at `time`."""
        self._asked += 1
        heapq.heappush(self._heap, (time, self._asked, call, arguments))

    def next(self) -> tuple[float, Callable[..., None], tuple[Any, ...]]:
        """Takes the earliest off: its time, the call and its arguments behind the time. Raises IndexError if there is none."""
        time, _, call, arguments = heapq.heappop(self._heap)
        return time, call, arguments
