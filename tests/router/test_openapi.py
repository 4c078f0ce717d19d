"""The OpenAPI document of the public port, and the router held to it."""

import json
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import httpx
import jsonschema_rs
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from msgspec import UnsetType
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from protocol.openai import Surface
from router.openapi import document
from router.request.schema import DECODERS
from tests.router.process import RouterProcess, start_router
from tests.sim import start_sim_engine

MODEL = "org/sim"
EMBEDDING_MODEL = "org/sim-embedding"
KEY = "sk-openapi"
REQUESTS = {
    Surface.CHAT: "ChatCompletionRequest",
    Surface.COMPLETIONS: "CompletionRequest",
    Surface.RESPONSES: "ResponseRequest",
    Surface.EMBEDDINGS: "EmbeddingRequest",
    Surface.MESSAGES: "MessageRequest",
    Surface.TOKENIZE: "TokenizeRequest",
    Surface.DETOKENIZE: "DetokenizeRequest",
}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
EXAMPLES = 15
NEVER_FOUND = {"retrieveResponse", "retrieveResponseHead", "cancelResponse"}  # the ids are made up
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


def described() -> dict[str, Any]:
    """The document, narrowed to what the engine here serves, so that sensible requests get answers."""
    described: dict[str, Any] = json.loads(document("0"))
    schemas, model = described["components"]["schemas"], {"const": MODEL}
    for title in filter(lambda title: title.endswith("Request"), schemas):
        for part in schemas[title].get("allOf", [schemas[title]]):
            if "model" in part.get("properties", ()):
                part["properties"]["model"] = {"const": EMBEDDING_MODEL} if title == "EmbeddingRequest" else model
    schemas["ContentPart"] |= {
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    }
    for operation in described["paths"]["/v1/models/{model}"].values():
        operation["parameters"][0]["schema"] = model
    return described


DESCRIBED = described()
# It would otherwise leave a stream after 20 events.
CONFIG = schemathesis.Config.from_dict({"max-stream-events": 1_000_000})
OPERATIONS: dict[str, Any] = {
    found.ok().definition.raw["operationId"]: found.ok()
    for found in schemathesis.openapi.from_dict(DESCRIBED, config=CONFIG).get_all_operations()
    if isinstance(found, Ok)
}


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    # A short context, since some of the requests ask for many answers that never end.
    flags = ("--time-scale", "0", "--max-model-len", "1024", "--served-model-name")
    with (
        start_sim_engine(*flags, MODEL) as engine,
        start_sim_engine(*flags, EMBEDDING_MODEL, "--runner", "pooling") as embedder,
        start_router([engine.url, embedder.url], "--api-key", KEY) as router,
    ):
        yield router


@pytest.fixture(scope="module")
def client(router: RouterProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=router.url, headers={"authorization": f"Bearer {KEY}"}) as client:
        yield client


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_the_document_is_whole() -> None:
    """Every reference leads somewhere, nothing is described that nothing uses, and ids are unique."""
    whole = json.loads(document("1.2.3"))
    assert (whole["openapi"], whole["info"]["version"]) == ("3.1.0", "1.2.3")
    components = {f"#/components/{kind}/{name}" for kind in ("schemas", "headers") for name in whole["components"][kind]}
    assert set(references(whole)) == components
    for schema in whole["components"]["schemas"].values():
        jsonschema_rs.meta.validate(schema)
    ids = [operation["operationId"] for operations in whole["paths"].values() for operation in operations.values()]
    assert len(ids) == len(set(ids)) == len(OPERATIONS)


@pytest.mark.parametrize(("surface", "title"), REQUESTS.items())
def test_what_is_refused_is_described_as_refused(surface: Surface, title: str) -> None:
    """A field that has no allowed value has the type null in the document, and no other field has."""
    schema = DESCRIBED["components"]["schemas"][title]
    parts = [
        DESCRIBED["components"]["schemas"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        for part in schema.get("allOf", [schema])
    ]
    described = {name for part in parts for name, field in part["properties"].items() if field.get("type") == "null"}
    read: Any = DECODERS[surface].type
    fields = msgspec.structs.fields(read)
    assert described == {field.name for field in fields if field.type in (None, type(None), UnsetType | None)}


def test_the_document_is_served(client: httpx.Client) -> None:
    """Tools find it where they look."""
    answer = client.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.content == document(version("intellect-serve"))


@pytest.mark.parametrize("path", DESCRIBED["paths"])
def test_each_route_takes_the_methods_that_are_described(client: httpx.Client, path: str) -> None:
    """Neither more nor fewer, and `Allow` says the same."""
    wanted = {method.upper() for method in DESCRIBED["paths"][path]}
    url = path.replace("{model}", MODEL).replace("{response_id}", "resp_1")
    for method in METHODS:
        answer = client.request(method, url, content=b"{}" if method == "POST" else None)
        assert (answer.status_code != 405) == (method in wanted), method
        if answer.status_code == 405:
            assert set(answer.headers["allow"].split(", ")) == wanted
        if method != "HEAD":
            assert answer.headers["content-type"] == "application/json"
            assert answer.status_code != 404 or answer.json()["error"].get("code") != "unknown_url"


@pytest.mark.parametrize(
    ("operation_id", "mode"),
    [(operation_id, GenerationMode.POSITIVE) for operation_id in OPERATIONS]
    + [(operation_id, GenerationMode.NEGATIVE) for operation_id in OPERATIONS if OPERATIONS[operation_id].body],
)
def test_answers_are_as_described(router: RouterProcess, operation_id: str, mode: GenerationMode) -> None:
    """No request, sensible or not, gets a status, a header or a body that the document does not describe, or a 5xx."""
    operation = OPERATIONS[operation_id]
    statuses = Counter[int]()

    @given(case=operation.as_strategy(mode))
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def holds(case: Any) -> None:
        answer = case.call(base_url=router.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=20)
        case.validate_response(answer, checks=CHECKS)
        statuses[answer.status_code] += 1
        if answer.headers["content-type"][0].startswith("text/event-stream"):
            check_events(operation.definition.raw["responses"]["200"], answer.content)

    holds()
    assert mode is GenerationMode.NEGATIVE or operation_id in NEVER_FOUND or statuses[200] > 0, statuses


def check_events(answer: dict[str, Any], stream: bytes) -> None:
    """Every event fits the schema beside the stream's, and the stream is whole."""
    schema = answer["content"]["text/event-stream"]["x-event-schema"]
    validator = jsonschema_rs.Draft202012Validator({**schema, "components": DESCRIBED["components"]})
    data = [line.removeprefix(b"data: ") for line in stream.splitlines() if line.startswith(b"data: ")]
    assert data
    if schema["$ref"].endswith("Chunk"):
        assert data.pop() == b"[DONE]"
    for event in data:
        validator.validate(json.loads(event))
