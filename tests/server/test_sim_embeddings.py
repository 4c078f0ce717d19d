"""Embeddings of the simulated engine, as a client sees them."""

import base64
import math
import struct
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from server.sim_text import encode
from tests.sim import SimEngine, start_sim_engine

FLAGS = ("--runner", "pooling", "--max-model-len", "100", "--num-gpu-blocks-override", "100")


@pytest.fixture(scope="module")
def engine() -> Iterator[SimEngine]:
    with start_sim_engine(*FLAGS) as running:
        yield running


def embed(engine: SimEngine, **body: Any) -> Any:
    answer = engine.client.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_equal_texts_have_equal_vectors_of_length_one(engine: SimEngine) -> None:
    """One vector per input, in order; the usage counts the prompts."""
    answer = embed(engine, input=["one", "two", "one"])
    vectors = [entry["embedding"] for entry in answer["data"]]
    assert vectors[0] == vectors[2] != vectors[1]
    assert all(math.isclose(math.hypot(*vector), 1, rel_tol=1e-5) for vector in vectors)
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
    assert answer["id"].startswith("embd-")
    tokens = len(encode("one")) * 2 + len(encode("two"))
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]) == (tokens, tokens)


@pytest.mark.parametrize("given", ["some text", encode("some text"), [encode("some text")]])
def test_texts_and_token_ids_are_the_same(engine: SimEngine, given: Any) -> None:
    """All forms of `input`."""
    assert embed(engine, input=given)["data"] == embed(engine, input=["some text"])["data"]


def test_a_conversation_has_a_vector(engine: SimEngine) -> None:
    """`messages` instead of `input`, as vLLM takes it."""
    assert len(embed(engine, messages=[{"role": "user", "content": "hi"}])["data"]) == 1


def test_base64_holds_the_same_numbers(engine: SimEngine) -> None:
    """Little-endian float32."""
    (plain,), (encoded,) = (embed(engine, input="hi", encoding_format=name)["data"] for name in ("float", "base64"))
    raw = base64.b64decode(encoded["embedding"])
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == plain["embedding"]


async def test_the_openai_client_gets_vectors(engine: SimEngine) -> None:
    """openai-python asks for base64 and decodes it."""
    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="any", max_retries=0) as sdk:
        answer = await sdk.embeddings.create(model="simulated", input=["a", "b"])
        assert [len(entry.embedding) for entry in answer.data] == [64, 64]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "body.input"),
        ({"input": []}, 400, None),
        ({"input": 5}, 400, None),
        ({"input": [None]}, 400, "body.input"),
        ({"input": "x", "encoding_format": "hex"}, 400, "body.encoding_format"),
        ({"input": "x", "dimensions": 8}, 400, None),
        ({"input": "word " * 200}, 400, "input_tokens"),
        ({"input": "x", "model": "other"}, 404, "model"),
    ],
)
def test_a_bad_body_is_refused(engine: SimEngine, body: dict[str, Any], status: int, param: str | None) -> None:
    """In the shape of vLLM's other errors."""
    answer = engine.client.post("/v1/embeddings", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_metrics_and_faults_apply(engine: SimEngine) -> None:
    """Prompt tokens are counted and none are generated; a scripted status hits embeddings too."""
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total")
    labels: tuple[dict[str, str], ...] = ({}, {}, {"finished_reason": "stop"})
    before = [engine.metric(name, **label) for name, label in zip(names, labels, strict=True)]
    tokens = embed(engine, input=["a b", "c"])["usage"]["prompt_tokens"]
    after = [engine.metric(name, **label) for name, label in zip(names, labels, strict=True)]
    assert [new - old for new, old in zip(after, before, strict=True)] == [tokens, 0, 2]
    engine.add_faults({"kind": "status", "status": 503, "times": 1})
    assert engine.client.post("/v1/embeddings", json={"input": "a"}).status_code == 503


def test_each_kind_of_model_has_its_own_routes(engine: SimEngine) -> None:
    """A generating engine has no embeddings, an embedding one generates nothing: FastAPI's 404."""
    body = {"input": "a", "messages": [], "prompt": "a", "model": "simulated"}
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses")
    answers = [engine.client.post(path, json=body) for path in paths]
    answers.append(engine.client.get("/v1/responses/resp_x"))
    with start_sim_engine() as generating:
        answers.append(generating.client.post("/v1/embeddings", json=body))
    assert [(answer.status_code, answer.json()) for answer in answers] == [(404, {"detail": "Not Found"})] * 7
    assert engine.client.post("/tokenize", json={"prompt": "a b"}).json()["count"] == 2
