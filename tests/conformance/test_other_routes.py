"""Embeddings, the tokenizer and the router's own probes."""

import base64
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types import CreateEmbeddingResponse
from openai.types.create_embedding_response import Usage
from pydantic import BaseModel

from tests.conformance import strict
from tests.conformance.replies import EMBEDDINGS, check_failure
from tests.conformance.service import ENGINE_FLAGS, MODEL, MODEL_LEN, Service
from tests.router.process import RouterProcess, start_router
from tests.sim import start_sim_engine

EMBEDDER = "org/embedder"
# vLLM names its answers to embeddings, and counts them as it counts text.
EXTRAS: dict[type[BaseModel], frozenset[str]] = {
    CreateEmbeddingResponse: frozenset({"id", "created"}),
    Usage: frozenset({"completion_tokens", "prompt_tokens_details", "completion_tokens_details"}),
}


@pytest.fixture(scope="module")
def embedding_router() -> Iterator[RouterProcess]:
    """One engine that embeds and generates nothing."""
    flags = (*ENGINE_FLAGS, "--served-model-name", EMBEDDER, "--runner", "pooling")
    with start_sim_engine(*flags) as engine, start_router([engine.url]) as router:
        yield router


@pytest.mark.parametrize("given", ["one", ["one", "two"], [5, 6], [[5, 6], [7]]], ids=str)
@pytest.mark.parametrize("form", ["float", "base64", None])
def test_embeddings_come_in_openais_shape(embedding_router: RouterProcess, given: Any, form: str | None) -> None:
    """Texts and token ids, as numbers or packed; as many as were asked for, in order."""
    body = {"model": EMBEDDER, "input": given, **({"encoding_format": form} if form else {})}
    response = httpx.post(f"{embedding_router.url}{EMBEDDINGS}", json=body)
    assert response.status_code == 200, response.text
    value = strict.load(response.content)
    for entry in value["data"]:
        if isinstance(entry["embedding"], str):
            packed = base64.b64decode(entry["embedding"], validate=True)
            entry["embedding"] = list(struct.unpack(f"<{len(packed) // 4}f", packed))
    checked = CreateEmbeddingResponse.model_validate(value)
    wanted = 2 if isinstance(given, list) and not isinstance(given[0], int) else 1
    assert [entry.index for entry in checked.data] == list(range(wanted))
    assert checked.usage.prompt_tokens == checked.usage.total_tokens > 0
    if form == "float":
        strict.check(CreateEmbeddingResponse, response.content, extras=EXTRAS)


def test_openais_client_embeds(embedding_router: RouterProcess) -> None:
    """It asks for base64 by itself and unpacks it."""
    with openai.OpenAI(base_url=embedding_router.v1, api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model=EMBEDDER, input=["a", "b"])
    assert len(answer.data) == 2
    assert len(answer.data[0].embedding) > 1


def test_a_model_that_does_not_embed_is_an_error(http: httpx.Client) -> None:
    """In OpenAI's shape, whatever the engine makes of it."""
    response = http.post(EMBEDDINGS, json={"model": MODEL, "input": "a"})
    check_failure(response, response.status_code)
    assert response.status_code in (400, 404)


def test_tokens_go_there_and_back(http: httpx.Client) -> None:
    """A client can count before it asks, and read what ids mean."""
    text = "na\u00efve \U0001f469\u200d\U0001f680 router"
    tokens = http.post("/tokenize", json={"model": MODEL, "prompt": text})
    body = strict.load(tokens.content)
    assert (tokens.status_code, body["count"], body["max_model_len"]) == (200, len(body["tokens"]), MODEL_LEN)
    back = http.post("/detokenize", json={"model": MODEL, "tokens": body["tokens"]})
    assert (back.status_code, strict.load(back.content)) == (200, {"prompt": text})
    chat = http.post("/tokenize", json={"model": MODEL, "messages": [{"role": "user", "content": text}]})
    assert strict.load(chat.content)["count"] > body["count"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [{"model": MODEL}, {"model": "nope", "prompt": "a", "tokens": [1]}, {"prompt": "a"}], ids=str)
def test_the_tokenizers_errors_have_openais_shape(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """An unknown model is a 404, a missing field a 400."""
    error = check_failure(http.post(path, json=body), 404 if body.get("model") == "nope" else 400)
    assert error["param"] is not None


def test_the_probes_say_how_it_is(service: Service, scripted_router: RouterProcess) -> None:
    """/health while the process runs, /ready while something could answer."""
    assert strict.load(httpx.get(f"{service.router.url}/health").content) == {"status": "ok"}
    assert httpx.get(f"{service.router.url}/ready").status_code == 200
    assert httpx.get(f"{scripted_router.url}/health").status_code == 200
    not_ready = httpx.get(f"{scripted_router.url}/ready")
    assert (not_ready.status_code, not_ready.json()["status"]) == (503, "no replica is ready")
