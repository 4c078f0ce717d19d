"""Whether a replica that keeps failing requests may get more of them: a circuit breaker, one per replica. Pure.

closed -> open on failures; open -> half_open after a delay, on `tick`; half_open admits one request at a time as a trial,
whose success closes the breaker and whose failure opens it again for twice as long.
"""

import enum

from router.admission.windowed_count import WindowedCount

# A dead engine fails every request: it is out after so many, while one bad request among good ones changes nothing.
FAILURES_IN_A_ROW_TO_OPEN = 5
# An engine that fails every other request never fails five in a row, but half of its requests are lost or retried.
FAILURE_SHARE_TO_OPEN = 0.5
# Below so many endings a share says little: two requests of four may fail by chance.
ENDINGS_TO_JUDGE = 10
# Seconds over which the share is taken: long enough for that many endings, short enough to forget a past incident.
SHARE_WINDOW_S = 10
# Seconds out at first: about what a reset connection or a short overload needs to pass.
OPEN_AT_FIRST_S = 5.0
# Seconds out at most: a replica that was repaired is found within a minute.
OPEN_AT_MOST_S = 60.0


class BreakerState(enum.StrEnum):
    CLOSED = "closed"  # gets requests
    OPEN = "open"  # gets none until its delay is over
    HALF_OPEN = "half_open"  # gets one request at a time, the trial


# Looking a member up in its enum costs more than all else that a request asks of a breaker.
_CLOSED = BreakerState.CLOSED


class Breaker:
    """`now` is seconds of a monotonic clock. Every method returns whether it changed what `admits` says.

    Only endings that speak of the replica belong here: a client's fault or a full queue is neither success nor failure.
    """

    __slots__ = ("_failures", "_failures_in_a_row", "_has_trial", "_open_s", "_opened_at", "_state", "_successes")

    def __init__(self) -> None:
        self._state = BreakerState.CLOSED
        self._failures_in_a_row = 0
        self._successes = WindowedCount(SHARE_WINDOW_S)
        self._failures = WindowedCount(SHARE_WINDOW_S)
        self._opened_at = 0.0
        self._open_s = OPEN_AT_FIRST_S
        self._has_trial = False

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def admits(self) -> bool:
        """Whether the next request may go to this replica."""
        return self._state is _CLOSED or (self._state is BreakerState.HALF_OPEN and not self._has_trial)

    def succeeded(self, now: float, *, is_trial: bool) -> bool:
        """A request was answered. `is_trial`: what `trial_began` returned for it."""
        if self._state is _CLOSED:
            self._failures_in_a_row = 0
            self._successes.add(now)
            return False
        if not self._ends_trial(is_trial):
            return False
        self._state = BreakerState.CLOSED
        self._open_s = OPEN_AT_FIRST_S
        # What came before the trial is judged already: the first failure after it must not open the breaker again.
        self._failures_in_a_row = 0
        self._successes.clear()
        self._failures.clear()
        return True

    def failed(self, now: float, *, is_trial: bool) -> bool:
        """A request failed by the replica's fault. `is_trial`: what `trial_began` returned for it."""
        if self._state is _CLOSED:
            self._failures_in_a_row += 1
            self._failures.add(now)
            if not self._has_failed_enough(now):
                return False
            self._open(now)
            return True
        admitted = self.admits
        if self._ends_trial(is_trial):
            self._open_s = min(2 * self._open_s, OPEN_AT_MOST_S)
            self._open(now)
        return admitted is not self.admits

    def tick(self, now: float) -> bool:
        """Call about once a second: lets the next trial in when the delay is over."""
        if self._state is not BreakerState.OPEN:
            return False
        self._opened_at = min(self._opened_at, now)  # a clock that was set back must not prolong the delay
        if now - self._opened_at < self._open_s:
            return False
        self._state = BreakerState.HALF_OPEN
        return True

    def trial_began(self) -> bool:
        """A request goes to this replica. If this returns True it is the trial, and must end in one of `succeeded`, `failed`,
        `trial_abandoned`: until then no other request is admitted."""
        if self._state is not BreakerState.HALF_OPEN or self._has_trial:
            return False
        self._has_trial = True
        return True

    def trial_abandoned(self) -> bool:
        """The trial ended without a verdict, as when its client left or the queue was full: another may be the trial."""
        if not self._has_trial:
            return False
        self._has_trial = False
        return True

    def _ends_trial(self, is_trial: bool) -> bool:
        """Requests that began before the breaker opened say nothing about the replica of now."""
        if not is_trial or self._state is not BreakerState.HALF_OPEN:
            return False
        self._has_trial = False
        return True

    def _open(self, now: float) -> None:
        self._state = BreakerState.OPEN
        self._opened_at = now

    def _has_failed_enough(self, now: float) -> bool:
        """Asked after a failure only, so that no success ever takes a replica out."""
        if self._failures_in_a_row >= FAILURES_IN_A_ROW_TO_OPEN:
            return True
        failures = self._failures.total(now)
        endings = failures + self._successes.total(now)
        return endings >= ENDINGS_TO_JUDGE and failures >= FAILURE_SHARE_TO_OPEN * endings
