"""The services that every client of this folder talks to."""

from collections.abc import Iterator

import pytest

from tests.clients.service import CONTEXT_TOKENS, EMBEDDING_MODEL, KEY, MAX_BODY_BYTES, MODEL, Service
from tests.router.process import RouterProcess, start_router
from tests.sim import start_sim_engine


@pytest.fixture(scope="package")
def running_service() -> Iterator[Service]:
    flags = ("--time-scale", "0.02", "--served-model-name")
    limits = ("--answer-tokens-mean", "12", "--max-model-len", str(CONTEXT_TOKENS), "--enable-prompt-tokens-details")
    router_flags = ("--api-key", KEY, "--max-body-bytes", str(MAX_BODY_BYTES))
    with (
        start_sim_engine(*flags, MODEL, *limits) as engine,
        start_sim_engine(*flags, EMBEDDING_MODEL, "--runner", "pooling") as embedder,
        start_router([engine.url, embedder.url], *router_flags) as router,
    ):
        yield Service(router, engine)


@pytest.fixture
def service(running_service: Service) -> Iterator[Service]:
    """The service without faults; a test that leaves work behind in it fails."""
    yield running_service
    running_service.engine.clear_faults()
    running_service.await_idle()


@pytest.fixture(scope="package")
def empty_router() -> Iterator[RouterProcess]:
    """A router without replicas."""
    with start_router() as router:
        yield router
