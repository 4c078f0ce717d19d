import os
from collections.abc import AsyncIterator, Iterator

import httpx
import openai
import pytest

from server.sim_model import write_sim_model
from tests.conformance.service import (
    AUTHORIZED,
    ENGINE_FLAGS,
    KEY,
    MODEL,
    ORIGIN,
    THINKER,
    WITHOUT_TLS,
    Service,
    scripted_behind,
)
from tests.router.process import RouterProcess, start_router
from tests.scripted_engine import ScriptedEngine
from tests.sim import await_sim_engine, launch_sim_engine
from tests.waiting import wait_until

# Of the router for scripted engines: short enough to wait for.
SCRIPTED_SETTINGS = "[router]\nfirst_byte_timeout_s = 1.0\nidle_timeout_s = 1.0\nbody_timeout_s = 1.0\n"


@pytest.fixture(scope="session", autouse=True)
def _no_settings_from_the_shell() -> Iterator[None]:
    """The routers below read INTELLECT_*; a developer's own must not change a test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("INTELLECT_")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def _service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("thinker")
    write_sim_model(folder)
    one, two, thinker = (
        launch_sim_engine(*ENGINE_FLAGS, "--served-model-name", MODEL),
        launch_sim_engine(*ENGINE_FLAGS, "--served-model-name", MODEL),
        launch_sim_engine(
            *ENGINE_FLAGS, "--served-model-name", THINKER, "--model", str(folder), "--reasoning-parser", "deepseek_r1"
        ),
    )
    try:
        for engine in (one, two, thinker):
            await_sim_engine(engine)
        urls = [engine.url for engine in (one, two, thinker)]
        with (
            start_router(urls, "--api-key", KEY, "--cors-origin", ORIGIN) as router,
            httpx.Client(base_url=router.url, headers=AUTHORIZED, timeout=30) as http,
            httpx.Client(base_url=router.admin) as admin,
        ):
            yield Service(router, (one, two), thinker, http, admin)
    finally:
        for engine in (one, two, thinker):
            engine.stop()


@pytest.fixture
def service(_service: Service) -> Iterator[Service]:
    """Shared by all tests. After each its engines have no faults and nothing is in flight."""
    yield _service
    _service.clear_faults()
    wait_until(lambda: _service.in_flight() == 0, 2, "nothing to be in flight after the test")


@pytest.fixture
def http(service: Service) -> httpx.Client:
    return service.http


@pytest.fixture(scope="session")
def _client(_service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=_service.router.v1, api_key=KEY, max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def client(service: Service, _client: openai.OpenAI) -> openai.OpenAI:
    return _client


@pytest.fixture(scope="session")
def scripted_router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    """A router without a key and without replicas, and with short timeouts."""
    config = tmp_path_factory.mktemp("router") / "router.toml"
    config.write_text(SCRIPTED_SETTINGS)
    with start_router((), "--config", str(config)) as router:
        yield router


@pytest.fixture
async def scripted(scripted_router: RouterProcess) -> AsyncIterator[ScriptedEngine]:
    async with scripted_behind(scripted_router) as engine:
        yield engine


@pytest.fixture
async def scripted_http(scripted_router: RouterProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=scripted_router.url, timeout=10, verify=WITHOUT_TLS) as client:
        yield client
