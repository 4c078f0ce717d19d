"""How many events there were of late, counted by whole seconds."""

import math


class WindowedCount:
    """A ring of counts, one for each of the last `window_s` seconds, the running one included.

    So the window covers between `window_s - 1` and `window_s` seconds, and adding costs the same however many events it holds.
    `now` is any clock in seconds. A step back by less than the window counts for the newest second; after a longer one the
    counts keep their age and go on from there, so a clock that was set never leaves them standing for hours.
    """

    __slots__ = ("_from", "_ring", "_second", "_slot", "_total", "_until")

    def __init__(self, window_s: int) -> None:
        """Raises ValueError unless `window_s` is at least 1."""
        if window_s < 1:
            raise ValueError(f"window_s is {window_s}; it must be at least 1 second")
        self._ring = [0] * window_s
        self._total = 0
        self._slot = 0  # of the newest second
        self._second = 0
        # Times in this range need no turning of the ring; at first there are none.
        self._from = self._until = 0

    def add(self, now: float) -> None:
        if not self._from <= now < self._until:
            self._turn(now)
        self._total += 1
        self._ring[self._slot] += 1

    def total(self, now: float) -> int:
        if not self._from <= now < self._until:
            self._turn(now)
        return self._total

    def clear(self) -> None:
        self._ring[:] = [0] * len(self._ring)
        self._total = 0

    def _turn(self, now: float) -> None:
        second, size = math.floor(now), len(self._ring)
        for _ in range(min(second - self._second, size)):
            self._slot = (self._slot + 1) % size
            self._total -= self._ring[self._slot]
            self._ring[self._slot] = 0
        self._second = second
        self._from, self._until = second - size, second + 1
