"""LangChain's standard integration tests for chat models, unmodified, with langchain-openai's ChatOpenAI."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.clients.service import KEY, MODEL, Service


@pytest.fixture
def benchmark() -> None:
    """For the one standard test that asks for it, and skips itself where no recordings are made."""


@pytest.fixture
def vcr() -> None:
    """As `benchmark`."""


# Two warnings of LangChain and pydantic about each other.
@pytest.mark.filterwarnings(
    "ignore:Received a Pydantic BaseModel V1 schema:UserWarning", "ignore:Pydantic serializer warnings:UserWarning"
)
class TestChatOpenAI(ChatModelIntegrationTests):
    """A text model with tools, structured output and usage."""

    @pytest.fixture(autouse=True)
    def _service(self, service: Service) -> Iterator[None]:
        # LangChain's default clients are kept for the whole process, and so would outlive a test's event loop.
        with openai.DefaultHttpxClient() as http:
            self._params: dict[str, Any] = {"model": MODEL, "base_url": service.router.v1, "api_key": KEY, "http_client": http}
            yield

    @pytest.fixture(autouse=True)
    async def _async_client(self, _service: None) -> AsyncIterator[None]:
        async with openai.DefaultAsyncHttpxClient() as http:
            self._params["http_async_client"] = http
            yield

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**self._params, "stream_usage": True}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return MODEL
