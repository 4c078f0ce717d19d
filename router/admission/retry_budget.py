"""How many retries the router may add to its clients' load.

After Finagle's RetryBudget and the chapter "Handling Overload" of Google's book "Site Reliability Engineering": retries are a
share of the recent successes, plus a floor for quiet times. While engines fail there are few successes, so retries end by
themselves instead of multiplying the load on the engines that are left.
"""

from router.admission.windowed_count import WindowedCount


class RetryBudget:
    """One for all replicas of a router; `now` is seconds of a monotonic clock.

    Right after a grant, the window's retries exceed `floor + share * successes` by less than one, clients' own ones included.
    """

    __slots__ = ("_floor", "_retries", "_share", "_successes")

    def __init__(self, share: float = 0.2, floor: int = 10, window_s: int = 10) -> None:
        """`share` is retries per success, `floor` retries per window of `window_s` seconds.

        Raises ValueError for a negative share or floor, or a window below 1 s.
        """
        if not 0.0 <= share < float("inf"):
            raise ValueError(f"share is {share}; it must be a number from 0 upwards, e.g. 0.2")
        if floor < 0:
            raise ValueError(f"floor is {floor}; it must be at least 0")
        self._share = share
        self._floor = floor
        self._successes = WindowedCount(window_s)
        self._retries = WindowedCount(window_s)

    def success(self, now: float) -> None:
        """A request got its answer."""
        self._successes.add(now)

    def client_retry(self, now: float) -> None:
        """A client has sent a request again. That is never refused, but leaves less for the router's own retries."""
        self._retries.add(now)

    def try_spend(self, now: float) -> bool:
        """Whether one more retry may be made; if so it is counted."""
        if self._retries.total(now) >= self._floor + self._share * self._successes.total(now):
            return False
        self._retries.add(now)
        return True
