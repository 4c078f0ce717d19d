"""How fast work leaves a queue while there is any."""

import math

LEARNED_COUNT = 8  # dispatches before the rate is believed
LEARNED_S = 1.0  # and seconds of waiting


class ServiceRate:
    """Tokens per second dispatched while something waited, exponentially smoothed over the time that something did.

    Quiet time counts for nothing: what an idle fleet serves says little about what a full one can. While nothing waits the
    rate is kept. `now` is seconds of a monotonic clock.
    """

    __slots__ = ("_at_served", "_count", "_seconds", "_since", "_time_constant_s", "_tokens", "_waits")

    def __init__(self, time_constant_s: float = 30.0) -> None:
        """Raises ValueError unless `time_constant_s` is above 0."""
        if not time_constant_s > 0.0:
            raise ValueError(f"time_constant_s is {time_constant_s}; it must be above 0 seconds, e.g. 30")
        self._time_constant_s = time_constant_s
        self._tokens = 0.0
        self._seconds = 0.0
        self._count = 0
        self._waits = False
        self._since = 0.0
        self._at_served = (0.0, 0.0)  # tokens and seconds as of the last dispatch

    def began(self, now: float) -> None:
        """Something waits from now on."""
        if not self._waits:
            self._waits, self._since = True, now

    def ceased(self, now: float) -> None:
        """Nothing waits any more."""
        self._advance(now)
        self._waits = False

    def discounted(self) -> None:
        """What has waited since the last dispatch could not be served at all: that time counts for nothing."""
        if self._waits:
            self._tokens, self._seconds = self._at_served
            self._waits = False

    def served(self, tokens: float, now: float) -> None:
        """`tokens` were dispatched; ignored while nothing waits."""
        if self._waits:
            self._advance(now)
            self._tokens += tokens
            self._count += 1
            self._at_served = (self._tokens, self._seconds)

    def per_second(self, now: float) -> float | None:
        """Tokens per second; None before enough was seen. Falls while nothing is dispatched although something waits."""
        self._advance(now)
        if self._count < LEARNED_COUNT or self._seconds < LEARNED_S:
            return None
        return self._tokens / self._seconds

    def _advance(self, now: float) -> None:
        passed = now - self._since
        if self._waits and passed > 0.0:
            kept = math.exp(-passed / self._time_constant_s)
            self._tokens *= kept
            # The weight of the time that has just passed, smoothed like the tokens dispatched in it.
            self._seconds = self._seconds * kept + self._time_constant_s * (1.0 - kept)
            self._since = now
