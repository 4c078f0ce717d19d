"""What is learned while requests run: straight lines through noisy samples, slowly forgotten, and means by kind of request."""

import math
from collections import OrderedDict

# Samples that count in full; older ones fade. Two thirds of a line's weight lies in the last 200.
MEMORY = 200
# A sample this many times above what was expected is taken for this much: one stuck request says little of the next.
OUTLIER = 4.0
# Share of a mean duration that must at least come from what it is proportional to.
LEAST_RISE = 0.1
# Kinds of requests whose answers' lengths are remembered, most recently seen.
KINDS_MAX = 4096
# Answers of a kind after which its own mean is trusted.
KIND_SAMPLES = 3


class Line:
    """`y = intercept + slope * x`, both at least 0, by least squares over samples that fade (each new one ages the others)."""

    __slots__ = ("_fade", "_rises_from", "_weight", "_x", "_xx", "_xy", "_y", "intercept", "samples", "slope")

    def __init__(
        self, intercept: float, slope: float, *, typical_x: float, memory: int = MEMORY, rises_from: float = math.inf
    ) -> None:
        """Begins with two samples on the given line, at 0 and at `typical_x`, which fade like the others.

        `rises_from`: where x is above this on average, y is known to grow with it. Samples that do not show it, since x hardly
        differs among them, are then taken to be half constant and half proportional.
        """
        self.intercept, self.slope = intercept, slope
        self.samples = 0
        self._rises_from = rises_from
        self._fade = 1.0 - 1.0 / memory
        end = intercept + slope * typical_x
        self._weight = 2.0
        self._x, self._y = typical_x, intercept + end
        self._xx, self._xy = typical_x * typical_x, typical_x * end

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x

    def add(self, x: float, y: float) -> None:
        expected = self.at(x)
        if self.samples >= 10 and y > OUTLIER * expected:
            y = OUTLIER * expected
        self.samples += 1
        fade = self._fade if self.samples >= 20 else 1.0 - 1.0 / (self.samples + 1)  # the guess fades fast
        weight = self._weight = self._weight * fade + 1.0
        self._x = self._x * fade + x
        self._y = self._y * fade + y
        self._xx = self._xx * fade + x * x
        self._xy = self._xy * fade + x * y
        mean_x, mean_y = self._x / weight, self._y / weight
        variance = self._xx / weight - mean_x * mean_x
        if variance > 1e-6 * mean_x * mean_x + 1e-12:
            self.slope = max(0.0, (self._xy / weight - mean_x * mean_y) / variance)
        if mean_x > self._rises_from and self.slope * mean_x < LEAST_RISE * mean_y:
            self.slope = 0.5 * mean_y / mean_x
        if self.slope * mean_x > mean_y and mean_x > 0:
            self.slope = mean_y / mean_x  # through zero: neither part of a duration is negative
        self.intercept = max(0.0, mean_y - self.slope * mean_x)


class Mean:
    """Of values that fade. What it begins with counts as `doubt` samples."""

    __slots__ = ("_doubt", "_memory", "samples", "value")

    def __init__(self, value: float, *, memory: int = MEMORY, doubt: int = 0) -> None:
        self.value = value
        self.samples = 0
        self._memory = memory
        self._doubt = doubt

    def add(self, value: float) -> None:
        self.samples += 1
        self.value += (value - self.value) / min(self.samples + self._doubt, self._memory)


class OutputLengths:
    """Expected tokens of an answer: of its kind where enough were seen, else of its model."""

    def __init__(self, guess: float) -> None:
        self._guess = guess
        self._all = Mean(guess)
        self._models: dict[str, Mean] = {}
        self._kinds: OrderedDict[int, Mean] = OrderedDict()

    @property
    def mean(self) -> float:
        """Over all models and kinds."""
        return self._all.value

    @property
    def kinds(self) -> int:
        """How many kinds are remembered."""
        return len(self._kinds)

    def expected(self, model: str, kind: int, output_max: int | None) -> float:
        mean = self._kinds.get(kind)
        if mean is None or mean.samples < KIND_SAMPLES:
            mean = self._models.get(model)
        length = self._guess if mean is None else mean.value
        return length if output_max is None or output_max > length else float(output_max)

    def add(self, model: str, kind: int, tokens: int) -> None:
        self._all.add(tokens)
        self._models.setdefault(model, Mean(self._guess)).add(tokens)
        mean = self._kinds.get(kind)
        if mean is None:
            mean = self._kinds[kind] = Mean(self._guess, memory=50)
            if len(self._kinds) > KINDS_MAX:
                self._kinds.popitem(last=False)
        else:
            self._kinds.move_to_end(kind)
        mean.add(tokens)
