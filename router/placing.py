"""Where requests learn which replica they go to, and wait until one could start them: the dispatcher with a clock."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from protocol.usage import Usage
from router.admission.counts import Counts
from router.admission.dispatcher import Dispatcher
from router.admission.waiting import Candidates, Shed, Waiting
from router.exchange import Rejection
from router.outcome import Outcome
from router.policy.interface import PlacementRequest, Policy, Priority, Ticket
from router.types import ReplicaId

# What a client is told that has waited to its bound already: the queue ahead of it is that long.
RETRY_AFTER_EXPIRED_S = 10.0


class Placing:
    """Every ticket that it gives out comes back by `ended`, once."""

    def __init__(self, dispatcher: Dispatcher, policy: Policy, clock: Callable[[], float] = time.monotonic) -> None:
        self._dispatcher = dispatcher
        self._policy = policy
        self._clock = clock
        self._futures: dict[Waiting, asyncio.Future[Ticket | None]] = {}
        self._wake: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, request: PlacementRequest, candidates: Candidates) -> Ticket | Waiting:
        """A replica at once, or what to `wait` for. Raises Rejection where the wait would be too long."""
        result = self._dispatcher.submit(request, candidates, self._clock())
        if isinstance(result, Shed):
            raise overloaded(result.retry_after_s)
        return result

    def at_once(self, request: PlacementRequest, candidates: Sequence[ReplicaId]) -> Ticket:
        """For a request that had its turn: its first replica failed. It does not queue again."""
        now = self._clock()
        return self._policy.place_anyway(request, candidates, now)

    async def wait(
        self, waiting: Waiting, *, silence_s: float, on_silence: Callable[[], None] | None, ends_at: float | None
    ) -> Ticket | None:
        """None: nothing that could take it is left. Raises Rejection when it has waited too long, and what placing it raised.

        `on_silence` is called each `silence_s` meanwhile; `ends_at` is loop time. A request whose task is cancelled here has
        left the queue, and what it may just have been given is given back.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Ticket | None] = loop.create_future()
        self._futures[waiting] = future
        self._schedule()
        try:
            while True:
                patience_s = silence_s if on_silence is not None and silence_s > 0 else None
                if ends_at is not None:
                    left_s = max(0.0, ends_at - loop.time())
                    patience_s = left_s if patience_s is None else min(patience_s, left_s)
                done, _ = await asyncio.wait((future,), timeout=patience_s)
                if done:
                    return future.result()
                if ends_at is not None and loop.time() >= ends_at:
                    message = "No replica could start the request in its time; try again later."
                    raise Rejection(504, message, Outcome.UPSTREAM_TIMEOUT, code="upstream_timeout")
                if on_silence is not None:
                    on_silence()
        except BaseException:
            if future.done() and not future.cancelled() and future.exception() is None:
                given = future.result()
                if given is not None:
                    self.ended(given, None)
            raise
        finally:
            self._futures.pop(waiting, None)
            self._dispatcher.withdraw(waiting, self._clock())

    def first_token(self, ticket: Ticket) -> None:
        self._dispatcher.first_token(ticket, self._clock())
        if self._futures:
            self._schedule()

    def ended(self, ticket: Ticket, usage: Usage | None) -> None:
        self._dispatcher.ended(ticket, usage, self._clock())
        if self._futures:
            self._schedule()

    def changed(self) -> None:
        """A replica came, went or changed: who waits may have a place now, or none at all."""
        if self._futures:
            self._schedule()

    @property
    def counts(self) -> Counts:
        return self._dispatcher.counts

    def waiting_of(self, priority: Priority) -> int:
        """Requests of the class that wait."""
        return self._dispatcher.waiting_of(priority)

    def tokens_of(self, priority: Priority) -> float:
        """Estimated tokens of the class that wait."""
        return self._dispatcher.tokens_of(priority)

    def close(self) -> None:
        for handle in (self._wake, self._timer):
            if handle is not None:
                handle.cancel()

    def _schedule(self) -> None:
        """Looks soon, once for all that happens in this turn of the event loop."""
        if self._wake is None:
            self._wake = asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._wake = None
        now = self._clock()
        try:
            self._hand_out(now)
        finally:  # whatever went wrong with one, the others are looked at again, and wait no longer than they may
            try:
                self._expire(now)
            finally:
                self._set_timer()

    def _hand_out(self, now: float) -> None:
        for waiting, ticket in self._dispatcher.due(now):
            future = self._futures.get(waiting)
            if future is not None and not future.done():
                if waiting.error is not None:
                    future.set_exception(waiting.error)
                else:
                    future.set_result(ticket)
            elif ticket is not None:  # its client left in this very turn
                self._dispatcher.ended(ticket, None, now)

    def _expire(self, now: float) -> None:
        for waiting in self._dispatcher.expired(now):
            future = self._futures.get(waiting)
            if future is not None and not future.done():
                future.set_exception(overloaded(RETRY_AFTER_EXPIRED_S))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._dispatcher.next_deadline()
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - self._clock()), self._schedule)


def overloaded(retry_after_s: float) -> Rejection:
    message = "The service is overloaded: this request would wait too long; try again later."
    retry_after = b"%d" % max(1, math.ceil(retry_after_s))
    return Rejection(503, message, Outcome.REJECTED_OVERLOADED, code="overloaded", retry_after=retry_after)
