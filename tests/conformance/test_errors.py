"""E01-E14: each kind of failure is an HTTP status with an error of OpenAI's shape, for streams too.

E02 (a key that lacks the model) and the budgets of E10 need tenants, which this router does not have.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from tests.conformance import raw
from tests.conformance.replies import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    PLAIN,
    RESPONSES,
    TOKENIZE,
    check_failure,
    whole_and_streamed,
)
from tests.conformance.service import JSON_HEADERS, MODEL, MODEL_LEN, Service, logged
from tests.router.process import RouterProcess
from tests.scripted_engine import LAST_CHUNK, SSE_HEAD, ScriptedEngine, ScriptedRequest, chunked, json_answer
from tests.waiting import await_until

ALL = (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS, TOKENIZE)
BODIES: Mapping[str, dict[str, Any]] = {
    CHAT: PLAIN,
    COMPLETIONS: {"model": MODEL, "prompt": "a"},
    RESPONSES: {"model": MODEL, "input": "a"},
    EMBEDDINGS: {"model": MODEL, "input": "a"},
    TOKENIZE: {"model": MODEL, "prompt": "a"},
}


@dataclass(frozen=True, slots=True)
class Row:
    """A request that must fail: what it changes, and what must come back. A `content` replaces the body."""

    status: int
    code: str | None = None
    param: str | None = None
    kind: str = "invalid_request_error"
    method: str = "POST"
    path_suffix: str = ""
    headers: Mapping[str, str | None] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    without: str = ""
    content: bytes | None = None
    answer_headers: Mapping[str, str] = field(default_factory=dict)
    routes: tuple[str, ...] = ALL


UNAUTHORIZED: dict[str, Any] = {
    "status": 401,
    "code": "invalid_api_key",
    "kind": "authentication_error",
    "answer_headers": {"www-authenticate": "Bearer"},
}
GENERATING = (CHAT, COMPLETIONS)
ROWS = {
    "e01_no_key": Row(**UNAUTHORIZED, headers={"authorization": None}),
    "e01_bad_key": Row(**UNAUTHORIZED, headers={"authorization": "Bearer sk-wrong"}),
    "e01_key_in_another_scheme": Row(**UNAUTHORIZED, headers={"authorization": "Basic sk-conformance"}),
    "e01_no_key_and_no_json": Row(**UNAUTHORIZED, headers={"authorization": None}, content=b"{"),
    "e03_unknown_model": Row(404, "model_not_found", "model", changes={"model": "gpt-9"}),
    "e03_no_model": Row(400, "missing_required_parameter", "model", without="model"),
    "e03_null_model": Row(400, "missing_required_parameter", "model", changes={"model": None}),
    "e04_unknown_path": Row(404, "unknown_url", path_suffix="/stop/it"),
    "e05_wrong_method": Row(405, "method_not_allowed", method="PUT", answer_headers={"allow": "POST"}),
    "e05_get": Row(405, "method_not_allowed", method="GET", answer_headers={"allow": "POST"}),
    "e06_malformed": Row(400, content=b'{"model": "org/sim", "stream": true,}'),
    "e06_cut_short": Row(400, content=b'{"model": "org/sim", "stream": true'),
    "e06_two_values": Row(400, content=b'{"model": "org/sim"} {}'),
    "e06_empty": Row(400, content=b""),
    "e06_array": Row(400, content=b'[{"model": "org/sim"}]'),
    "e06_string": Row(400, content=b'"stream"'),
    "e06_null": Row(400, content=b"null"),
    "e06_number": Row(400, content=b"1e400"),
    "e06_not_utf_8": Row(400, content=b'{"model": "org/sim", "user": "\xff\xfe"}'),
    "e06_nan": Row(400, content=b'{"model": "org/sim", "temperature": NaN}'),
    "e06_infinity": Row(400, content=b'{"model": "org/sim", "temperature": -Infinity}'),
    "e06_deep": Row(400, content=b'{"model": "org/sim", "user": ' + b"[" * 100_000),
    "e06_model_of_another_type": Row(400, "invalid_type", "model", changes={"model": 7}),
    "e06_temperature_of_another_type": Row(400, None, "temperature", changes={"temperature": "hot"}, routes=GENERATING),
    "e06_stop_of_another_type": Row(400, None, "stop", changes={"stop": 5}, routes=GENERATING),
    "e06_no_messages": Row(400, None, "messages", without="messages", routes=(CHAT,)),
    "e06_no_prompt": Row(400, None, "prompt", without="prompt", routes=(COMPLETIONS,)),
    "e06_temperature_too_high": Row(400, None, "temperature", changes={"temperature": 3}, routes=GENERATING),
    "e06_tools_empty": Row(400, None, "tools", changes={"tools": []}, routes=(CHAT,)),
    "e06_choice_without_tools": Row(400, None, "tool_choice", changes={"tool_choice": "auto"}, routes=(CHAT,)),
    "e07_b37_too_many_tokens_wanted": Row(
        400, "context_length_exceeded", "max_tokens", changes={"max_tokens": MODEL_LEN + 1}, routes=GENERATING
    ),
    "e07_b37_prompt_too_long": Row(
        400,
        "context_length_exceeded",
        "input_tokens",
        changes={"messages": [{"role": "user", "content": "a " * MODEL_LEN}]},
        routes=(CHAT,),
    ),
    "e09_plain_text": Row(415, headers={"content-type": "text/plain"}),
    "e09_form": Row(415, headers={"content-type": "application/x-www-form-urlencoded"}),
    "e09_nearly_json": Row(415, headers={"content-type": "application/json-seq"}),
    "e09_brotli": Row(415, headers={"content-encoding": "br"}, answer_headers={"accept-encoding": "gzip"}),
    "e09_two_codings": Row(415, headers={"content-encoding": "gzip, gzip"}, answer_headers={"accept-encoding": "gzip"}),
}
# Streams differ from whole answers where there are streams; one route for them is enough, since routes share their code.
CASES = [
    (name, route, stream)
    for name, row in ROWS.items()
    for route in row.routes
    for stream in ([False, True] if route == CHAT else [False])
]


@pytest.mark.parametrize(
    ("name", "route", "stream"),
    CASES,
    ids=[f"{name}-{route}-{'stream' if stream else 'json'}" for name, route, stream in CASES],
)
def test_e01_to_e09_a_bad_request_is_refused_by_status_and_name(
    http: httpx.Client, name: str, route: str, stream: bool
) -> None:
    """Client libraries choose their exception by the status, and people find the field by `param`."""
    row = ROWS[name]
    body = {key: value for key, value in (BODIES[route] | dict(row.changes)).items() if key != row.without}
    if stream:
        body["stream"] = True
    request = http.build_request(
        row.method, route + row.path_suffix, content=json.dumps(body).encode() if row.content is None else row.content
    )
    request.headers["content-type"] = "application/json"
    for header, value in row.headers.items():
        if value is None:
            del request.headers[header]
        else:
            request.headers[header] = value
    response = http.send(request)
    error = check_failure(response, row.status)
    assert (error["code"], error["param"], error["type"]) == (row.code, row.param, row.kind), error
    assert {key: response.headers.get(key) for key in row.answer_headers} == row.answer_headers


@pytest.mark.parametrize("media_type", ["application/json; charset=utf-8", "Application/JSON;charset=UTF-8", None])
def test_e09_json_is_taken_however_it_is_announced(service: Service, media_type: str | None) -> None:
    """Parameters and letter case do not matter, and a client that announces nothing means JSON."""
    headers = {key: value for key, value in JSON_HEADERS.items() if key != "content-type"}
    headers |= {"content-type": media_type} if media_type else {}
    body = json.dumps(PLAIN).encode()
    answer = raw.exchange(service.router.url, raw.request("POST", CHAT, headers, body))
    assert answer.status == 200, answer


@whole_and_streamed
@pytest.mark.parametrize("announced", [True, False], ids=["content-length", "chunked"])
def test_e08_b41_a_body_too_large_is_a_json_413(service: Service, stream: bool, announced: bool) -> None:
    """Whether its length is announced or not; what was sent of it is never held."""
    piece = b"x" * 1024 * 1024
    opening = b'{"stream": true, "a": "' if stream else b'{"a": "'
    with raw.Wire(service.router.url) as wire:
        if announced:
            length = len(opening) + 33 * len(piece)
            wire.send(raw.request("POST", CHAT, {**JSON_HEADERS, "content-length": str(length)}) + opening)
            for _ in range(33):
                wire.send(piece)
        else:
            wire.send(raw.request("POST", CHAT, {**JSON_HEADERS, "transfer-encoding": "chunked"}) + chunked(opening))
            for _ in range(33):
                wire.send(chunked(piece))
            wire.send(LAST_CHUNK)
        answer = wire.read_answer()
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")


@whole_and_streamed
@pytest.mark.parametrize(
    ("status", "kind", "waits"),
    [
        (400, "invalid_request_error", False),
        (404, "invalid_request_error", False),
        (422, "invalid_request_error", False),
        (429, "rate_limit_error", True),
        (500, "server_error", False),
        (503, "server_error", True),
    ],
)
def test_e10_e11_b10_an_engines_refusal_keeps_its_status(
    service: Service, http: httpx.Client, stream: bool, status: int, kind: str, waits: bool
) -> None:
    """Also for a stream, which would otherwise begin well; with a time to wait that OpenAI's clients obey."""
    service.fault_everywhere(kind="status", status=status, message="the engine's own words")
    response = http.post(CHAT, json={**PLAIN, "stream": stream})
    error = check_failure(response, status)
    assert (error["type"], error["message"]) == (kind, "the engine's own words")
    assert ("retry-after" in response.headers) is waits
    if waits:
        assert 1 <= int(response.headers["retry-after"]) <= 60


@pytest.mark.parametrize(
    ("status", "wanted"),
    [
        (400, openai.BadRequestError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
    ],
)
@whole_and_streamed
def test_b10_openais_client_raises_the_right_exception(
    service: Service, client: openai.OpenAI, stream: bool, status: int, wanted: type[openai.APIStatusError]
) -> None:
    """With the message and the request's id, before any event."""
    service.fault_everywhere(kind="status", status=status, message="so it is")
    with pytest.raises(wanted) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=stream)
    assert caught.value.request_id
    assert "so it is" in caught.value.message


@whole_and_streamed
def test_e11_no_replica_is_a_503_that_says_so(scripted_router: RouterProcess, stream: bool) -> None:
    """While nothing is up a client is told when to come again."""
    response = httpx.post(f"{scripted_router.url}{CHAT}", json={**PLAIN, "stream": stream})
    error = check_failure(response, 503)
    assert (error["code"], error["type"]) == ("no_replica", "server_error")
    assert 1 <= int(response.headers["retry-after"]) <= 60


RETRY_AFTERS = ["300", "0", "-5", "0.2", "soon", "Wed, 21 Oct 2099 07:28:00 GMT", "", "9" * 500]


@pytest.mark.parametrize("status", [429, 503])
async def test_b13_the_time_to_wait_is_always_one_that_clients_obey(
    scripted: ScriptedEngine, scripted_http: httpx.AsyncClient, status: int
) -> None:
    """OpenAI's clients give up when told to wait for minutes, and storm when told not to wait."""
    given = iter(RETRY_AFTERS)

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({"error": {"message": "full"}}, f"{status} X", extra=f"retry-after: {next(given)}\r\n"))

    scripted.script = script
    for _ in RETRY_AFTERS:
        response = await scripted_http.post(CHAT, json={"model": "scripted", "messages": []})
        check_failure(response, status)
        assert 1 <= int(response.headers["retry-after"]) <= 60


@whole_and_streamed
async def test_e12_a_replica_that_never_answers_is_a_502(
    scripted: ScriptedEngine, scripted_http: httpx.AsyncClient, stream: bool
) -> None:
    """When every replica that was tried ended the connection, the client learns that it was not its fault."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    scripted.script = script
    response = await scripted_http.post(CHAT, json={"model": "scripted", "messages": [], "stream": stream})
    error = check_failure(response, 502)
    assert (error["code"], error["type"]) == ("upstream_error", "server_error")


@whole_and_streamed
async def test_e13_a_replica_that_stays_silent_is_a_504(
    scripted: ScriptedEngine, scripted_http: httpx.AsyncClient, stream: bool
) -> None:
    """The first-byte timeout ends it, and the engine's work with it."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    scripted.script = script
    response = await scripted_http.post(CHAT, json={"model": "scripted", "messages": [], "stream": stream})
    error = check_failure(response, 504)
    assert (error["code"], error["type"]) == ("upstream_timeout", "server_error")
    await await_until(lambda: scripted.open_requests == 0, 1, "the engine to be told")


@whole_and_streamed
async def test_e14_a_client_that_left_is_logged_as_499(
    scripted: ScriptedEngine, scripted_http: httpx.AsyncClient, scripted_router: RouterProcess, stream: bool
) -> None:
    """Nobody reads an answer then; the operator sees whose doing it was. A status that was sent stays what it was."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        if stream:
            writer.write(SSE_HEAD + chunked(b'data: {"choices":[]}\n\n'))
        await asyncio.Event().wait()

    scripted.script = script
    request_id = f"left-{stream}"
    body = {"model": "scripted", "messages": [], "stream": stream}
    asking = asyncio.create_task(scripted_http.post(CHAT, json=body, headers={"x-request-id": request_id}))
    await await_until(lambda: scripted.open_requests == 1, 5, "the engine to get the request")
    asking.cancel()
    await await_until(lambda: scripted.open_requests == 0, 1, "the engine to be told")
    record = await asyncio.to_thread(logged, scripted_router, request_id)
    assert (record["outcome"], record["status"]) == ("client_gone", 200 if stream else 499)
