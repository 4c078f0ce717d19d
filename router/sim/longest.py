"""The longest step since any earlier one, kept in as few entries as the answer can depend on."""

from bisect import bisect_right


class LongestSince:
    """Steps are added in rising order. A step that is followed by a longer one is forgotten: it is never the longest again."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._seconds: list[float] = []  # falling

    def add(self, step: int, seconds: float) -> None:
        while self._seconds and self._seconds[-1] <= seconds:
            self._steps.pop()
            self._seconds.pop()
        self._steps.append(step)
        self._seconds.append(seconds)

    def after(self, step: int) -> float:
        """Duration of the longest step behind `step`; 0 if there is none."""
        index = bisect_right(self._steps, step)
        return self._seconds[index] if index < len(self._seconds) else 0.0

    def clear(self) -> None:
        self._steps.clear()
        self._seconds.clear()
