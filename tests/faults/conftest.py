"""Processes that the fault tests share: two simulated engines, and a router of each kind. Replicas are added by each test."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.faults.stage import LOAD_FLAG, Stage, staged
from tests.router.process import RouterProcess, start_router
from tests.sim import SimEngine, await_sim_engine, launch_sim_engine


@pytest.fixture(scope="session")
def engines() -> Iterator[tuple[SimEngine, SimEngine]]:
    """One token takes about a third of a millisecond."""
    launched = [launch_sim_engine("--time-scale", "0.03", LOAD_FLAG) for _ in range(2)]
    with await_sim_engine(launched[0]) as one, await_sim_engine(launched[1]) as two:
        yield one, two


@pytest.fixture(scope="session")
def router() -> Iterator[RouterProcess]:
    """With the defaults, so with continuation."""
    with start_router() as running:
        yield running


@pytest.fixture(scope="session")
def router_without_continuation() -> Iterator[RouterProcess]:
    with start_router((), "--continuation", "off") as running:
        yield running


@pytest.fixture
async def one(router: RouterProcess, engines: tuple[SimEngine, SimEngine]) -> AsyncIterator[Stage]:
    """A router with one replica."""
    async with staged(router, engines[:1], 1) as stage:
        yield stage


@pytest.fixture
async def two(router: RouterProcess, engines: tuple[SimEngine, SimEngine]) -> AsyncIterator[Stage]:
    """A router with two replicas."""
    async with staged(router, engines, 2) as stage:
        yield stage
