"""Whether an engine that answers its health check makes no progress on its requests. Pure, one watch per replica.

An engine's HTTP server goes on answering while the process that computes hangs. Two signals tell: no byte comes for any
request (known to the router, free), and the engine's own step counter stands still while it says that it runs requests
(a scrape of its metrics, made only while no byte comes). Neither alone is enough: a long prefill sends no bytes, and an idle
engine makes no steps.
"""

# Probes come a little early or late, and three of them at intervals of 1 s may measure 2.99 s. This share of the time may lack.
TIMER_SLACK = 0.05


class ProgressWatch:
    """Fed once per health probe: `needs_metrics`, a scrape if it says so, then `observe`.

    Arguments of both:
        in_flight: the router's requests on this replica.
        bytes_received: counter of all bytes that came from the engine for requests; may start again at 0.
        is_paused: whether the engine is frozen for a checkpoint swap, so silent with good reason.
    """

    __slots__ = ("_bytes", "_flat_since", "_is_stalled", "_iterations", "_stall_after_s")

    def __init__(self, stall_after_s: float) -> None:
        """Raises ValueError unless `stall_after_s` is above 0. It must be above an engine's longest step."""
        if not stall_after_s > 0.0:
            raise ValueError(f"stall_after_s is {stall_after_s}; it must be above 0 seconds, e.g. 3")
        self._stall_after_s = stall_after_s * (1.0 - TIMER_SLACK)
        self._bytes = 0  # at the last observation
        self._iterations: float | None = None  # where the step counter stands still; None: nothing is suspected
        self._flat_since = 0.0
        self._is_stalled = False

    @property
    def is_stalled(self) -> bool:
        """What the last observation said."""
        return self._is_stalled

    def needs_metrics(self, in_flight: int, bytes_received: int, is_paused: bool) -> bool:
        """Whether the engine's metrics are worth a scrape before the next `observe`."""
        if is_paused:
            return False
        return self._is_stalled or (in_flight > 0 and bytes_received == self._bytes)

    def observe(
        self,
        now: float,
        *,
        in_flight: int,
        bytes_received: int,
        is_paused: bool,
        iterations: float | None,
        running: float | None,
    ) -> bool:
        """Whether the engine is stalled.

        It is when for `stall_after_s` no byte came and the counter stood still, with requests in flight, running by the
        engine's word. It stays so, also after its requests were moved away, until a byte comes, the counter moves (back
        too: the engine was restarted), nothing runs any more, or it is paused.

        Args:
            now: seconds of a monotonic clock.
            iterations: the engine's step counter; None if it was not asked or could not say, which proves nothing either way.
            running: how many requests the engine says it runs; None as above.
        """
        has_bytes = bytes_received != self._bytes
        self._bytes = bytes_received
        has_stepped = iterations is not None and self._iterations is not None and iterations != self._iterations
        is_idle = running == 0 or (in_flight == 0 and not self._is_stalled)
        if has_bytes or has_stepped or is_idle or is_paused:
            self._is_stalled = False
            self._iterations = None
        if is_paused or is_idle or in_flight == 0 or iterations is None or running is None:
            return self._is_stalled
        if self._iterations is None:
            self._iterations, self._flat_since = iterations, now
        else:
            self._flat_since = min(self._flat_since, now)  # a clock that was set back must not hide a stall
            self._is_stalled = self._is_stalled or now - self._flat_since >= self._stall_after_s
        return self._is_stalled
