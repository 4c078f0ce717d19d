"""Waiting for a condition in tests: polled with a deadline, never slept for."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

_POLL_S = 0.02


def wait_until(predicate: Callable[[], object], timeout_s: float, what: str) -> None:
    """Returns as soon as `predicate()` is true.

    Raises:
        AssertionError: it is not within `timeout_s`; the message says what was waited for.
    """
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout_s} s still waiting for {what}")
        time.sleep(_POLL_S)


async def await_until(predicate: Callable[[], object | Awaitable[object]], timeout_s: float, what: str) -> None:
    """`wait_until` for code on the event loop; `predicate` may be a coroutine function.

    Raises:
        AssertionError: it is not true within `timeout_s`; the message says what was waited for.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if await value if inspect.isawaitable(value) else value:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout_s} s still waiting for {what}")
        await asyncio.sleep(_POLL_S)
