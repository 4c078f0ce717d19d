from collections.abc import AsyncIterator, Iterator

import httpx
import openai
import pytest

from tests.real.stack import RealStack, start_real_stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealStack]:
    """One engine for all tests of this folder: it takes a minute to start and most of the machine."""
    with start_real_stack(tmp_path_factory.mktemp("real")) as stack:
        yield stack


@pytest.fixture
async def client(stack: RealStack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=stack.router.v1, api_key="none", timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def http(stack: RealStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.router.url, timeout=120) as client:
        yield client
