"""T01-T08 and T10 on raw sockets: everything that HTTP lets a client do."""

import gzip
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conformance import raw, strict
from tests.conformance.replies import CHAT, COMPLETIONS, PLAIN, whole_and_streamed
from tests.conformance.service import AUTHORIZED, JSON_HEADERS, MODEL, Service

HEALTH = raw.request("GET", "/health")


def chat(*, stream: bool = False, headers: dict[str, str] | None = None, version: str = "1.1", **changes: Any) -> bytes:
    body = json.dumps({**PLAIN, "stream": stream, **changes}).encode()
    return raw.request("POST", CHAT, {**JSON_HEADERS, **(headers or {})}, body, version=version)


def text_of(answer: raw.Answer) -> str:
    assert answer.status == 200, answer
    if answer.body.startswith(b"data:"):
        chunks = [strict.load(payload) for payload in strict.read_chunks(answer.body)]
        return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    return str(strict.load(answer.body)["choices"][0]["message"]["content"])


@pytest.fixture
def text(service: Service) -> str:
    """What the model answers to PLAIN."""
    return text_of(raw.exchange(service.router.url, chat()))


@whole_and_streamed
def test_t01_a_client_of_http_1_0_gets_an_answer_it_understands(service: Service, text: str, stream: bool) -> None:
    """No chunks, and the end of the connection is the end of the answer; without a Host header too."""
    for request in (chat(stream=stream, version="1.0"), chat(stream=stream, version="1.0").replace(b"host: router\r\n", b"")):
        with raw.Wire(service.router.url) as wire:
            wire.send(request)
            answer = wire.read_answer()
            assert not answer.is_chunked
            assert answer.header("transfer-encoding") is None
            assert (text_of(answer), wire.is_ended()) == (text, True)


@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize("extension", [b"", b";name=value"])
def test_t02_a_chunked_upload_is_taken(service: Service, text: str, size: int, extension: bytes) -> None:
    """However small the chunks, with extensions and trailers."""
    body = json.dumps(PLAIN).encode()
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    with raw.Wire(service.router.url) as wire:
        wire.send(raw.request("POST", CHAT, {**JSON_HEADERS, "transfer-encoding": "chunked"}))
        wire.send(b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts) + b"0\r\nx-trailer: 1\r\n\r\n")
        assert text_of(wire.read_answer()) == text
        wire.send(chat())
        assert text_of(wire.read_answer()) == text, "the connection goes on"


@whole_and_streamed
@pytest.mark.parametrize("coding", ["gzip", "GZIP"])
def test_t03_a_compressed_body_is_taken(service: Service, text: str, stream: bool, coding: str) -> None:
    """Clients that save bandwidth on long prompts are served."""
    body = gzip.compress(json.dumps({**PLAIN, "stream": stream}).encode())
    answer = raw.exchange(service.router.url, raw.request("POST", CHAT, {**JSON_HEADERS, "content-encoding": coding}, body))
    assert text_of(answer) == text


GOOD = gzip.compress(json.dumps(PLAIN).encode())
BOMB = gzip.compress(b'{"model": "' + b"a" * (64 * 1024 * 1024))  # 64 kB
BAD_GZIP = {
    "bomb": (BOMB, 413),
    "bomb in several members": (gzip.compress(b" " * (16 * 1024 * 1024)) * 4, 413),
    "not gzip": (b'{"model": "org/sim"}', 400),
    "cut short": (GOOD[:-9], 400),
    "wrong checksum": (GOOD[:-8] + b"\0\0\0\0" + GOOD[-4:], 400),
    "something behind it": (GOOD + b"tail", 400),
    "empty": (b"", 400),
}


@pytest.mark.parametrize(("body", "status"), BAD_GZIP.values(), ids=BAD_GZIP.keys())
def test_t03_a_bomb_or_broken_compression_is_refused(service: Service, body: bytes, status: int) -> None:
    """Sizes count after decompression, and the router stays small: nobody fills its memory with a few kilobytes."""
    headers = {**JSON_HEADERS, "content-encoding": "gzip", "content-length": str(len(body))}
    started = time.monotonic()
    answer = raw.exchange(service.router.url, raw.request("POST", CHAT, headers, body))
    assert (answer.status, answer.error["type"]) == (status, "invalid_request_error")
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", f"/v1/models/{MODEL}", "/openapi.json", "/v1/models/no"])
def test_t04_head_answers_as_get_does_without_a_body(service: Service, path: str) -> None:
    """Load balancers probe with it. The next answer on the connection is whole."""
    with raw.Wire(service.router.url) as wire:
        wire.send(raw.request("GET", path, AUTHORIZED))
        whole = wire.read_answer()
        wire.send(raw.request("HEAD", path, AUTHORIZED) + HEALTH)
        head = wire.read_answer("HEAD")
        assert (head.status, head.header("content-length")) == (whole.status, str(len(whole.body)))
        assert head.header("content-type") == whole.header("content-type")
        assert strict.load(wire.read_answer().body) == {"status": "ok"}


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("HEAD", CHAT, "POST"),
        ("OPTIONS", CHAT, "POST"),
        ("OPTIONS", "/v1/models", "GET, HEAD"),
        ("DELETE", f"/v1/models/{MODEL}", "GET, HEAD"),
        ("PATCH", "/tokenize", "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("TRACE", "/health", "GET, HEAD"),
    ],
)
def test_t04_a_wrong_method_is_told_the_right_one(service: Service, method: str, path: str, allow: str) -> None:
    """405 with Allow, and a body only where the method has one."""
    with raw.Wire(service.router.url) as wire:
        wire.send(raw.request(method, path, AUTHORIZED) + HEALTH)
        answer = wire.read_answer(method)
        assert (answer.status, answer.header("allow")) == (405, allow)
        assert method == "HEAD" or answer.error["code"] == "method_not_allowed"
        assert wire.read_answer().status == 200


@pytest.mark.parametrize("method", ["FOO", "get", "GET\tx", "B" * 40])
def test_b43_a_made_up_method_makes_no_metric(service: Service, method: str) -> None:
    """Labels are finite whatever strangers send; so are the answers."""
    answer = raw.exchange(service.router.url, raw.request(method, "/v1/models", AUTHORIZED))
    assert answer.status in (400, 405, 501)
    assert answer.error["type"] == "invalid_request_error"
    assert f'"{method}"' not in service.admin.get("/metrics").text


@pytest.mark.parametrize("path", ["/v1/models/", f"{CHAT}/", "/health/", "/"])
def test_t05_a_trailing_slash_is_another_path(service: Service, path: str) -> None:
    """A redirect would lose the body of a POST and the key on its way; a clear 404 does not."""
    answer = raw.exchange(service.router.url, raw.request("POST", path, JSON_HEADERS, b"{}"))
    assert (answer.status, answer.header("location")) == (404, None)
    assert answer.error["code"] in ("unknown_url", "model_not_found")


@pytest.mark.parametrize(
    "order",
    ["mch", "h" * 300, "sc" * 20, "chm", "hmc", "sms", "ssh", "ccc", "hhhhhhhhhh", "smchsmch", "xcx", "cxs"],
    ids=lambda order: f"pipelined-{order[:10]}",
)
def test_t07_pipelined_requests_are_answered_in_order(service: Service, text: str, order: str) -> None:
    """Whole answers (c), streams (s), errors (x) and the router's own answers (m, h) may follow each other in one packet."""
    requests = {
        "m": raw.request("GET", "/v1/models", AUTHORIZED),
        "h": HEALTH,
        "c": chat(),
        "s": chat(stream=True),
        "x": raw.request("POST", COMPLETIONS, JSON_HEADERS, b"{}"),
    }
    with raw.Wire(service.router.url) as wire:
        wire.send(b"".join(requests[kind] for kind in order))
        for kind in order:
            answer = wire.read_answer()
            match kind:
                case "m":
                    assert strict.load(answer.body)["object"] == "list"
                case "h":
                    assert strict.load(answer.body) == {"status": "ok"}
                case "x":
                    assert (answer.status, answer.error["param"]) == (400, "model")
                case _:
                    assert (text_of(answer), answer.is_chunked) == (text, kind == "s")


def test_t07_pipelined_requests_may_come_a_byte_at_a_time(service: Service, text: str) -> None:
    """Packets may end anywhere."""
    with raw.Wire(service.router.url) as wire:
        for byte in chat() + HEALTH + chat(stream=True):
            wire.send(bytes([byte]))
        assert text_of(wire.read_answer()) == text
        assert wire.read_answer().status == 200
        assert text_of(wire.read_answer()) == text


def test_t07_a_connection_that_is_to_close_answers_no_more(service: Service, text: str) -> None:
    """What comes behind `Connection: close` is not served."""
    with raw.Wire(service.router.url) as wire:
        wire.send(chat(headers={"connection": "close"}) + HEALTH)
        answer = wire.read_answer()
        assert (text_of(answer), answer.header("connection")) == (text, "close")
        assert wire.is_ended()


@whole_and_streamed
def test_t08_a_client_that_waits_for_100_continue_gets_it(service: Service, text: str, stream: bool) -> None:
    """curl asks so before long bodies, and waits a second otherwise."""
    head, _, body = chat(stream=stream, headers={"expect": "100-continue"}).partition(b"\r\n\r\n")
    with raw.Wire(service.router.url) as wire:
        wire.send(head + b"\r\n\r\n")
        assert wire.read_line() == b"HTTP/1.1 100 Continue\r\n"
        assert wire.read_line() == b"\r\n"
        wire.send(body)
        assert text_of(wire.read_answer()) == text


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"content-length": str(40 * 1024 * 1024)}, 413), ({"content-length": "2", "authorization": "Bearer no"}, 401)],
    ids=["too large", "no key"],
)
def test_t08_a_body_that_will_be_refused_is_not_asked_for(service: Service, headers: dict[str, str], status: int) -> None:
    """The final answer comes at once, in place of 100."""
    with raw.Wire(service.router.url) as wire:
        wire.send(raw.request("POST", CHAT, {**JSON_HEADERS, "expect": "100-continue", **headers}))
        assert wire.read_line().startswith(b"HTTP/1.1 %d " % status)


def test_t10_b11_an_idle_connection_is_used_again_without_an_error(service: Service, text: str) -> None:
    """Between 4.9 and 5.1 s, when the engine's server closes its idle connections and a client's pool still holds its own."""

    def two_requests(idle_s: float) -> list[int]:
        with raw.Wire(service.router.url) as wire:
            wire.send(chat(max_tokens=1))
            first = wire.read_answer()
            time.sleep(idle_s)  # the length of the pause is what is tested
            wire.send(chat(max_tokens=1, stream=True))
            return [first.status, wire.read_answer().status]

    with ThreadPoolExecutor(40) as threads:
        assert list(threads.map(two_requests, [4.9 + 0.005 * number for number in range(40)])) == [[200, 200]] * 40


@pytest.mark.parametrize(
    "following",
    [b"NOT HTTP AT ALL\r\n\r\n", b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n{"],
    ids=["garbage", "too large"],
)
def test_t07_what_is_sent_behind_a_request_does_not_cost_it_its_answer(service: Service, text: str, following: bytes) -> None:
    """A client that sends nonsense ahead still gets the whole answer to what was sense, and then its connection closes."""
    with raw.Wire(service.router.url) as wire:
        wire.send(chat(stream=True) + following)
        assert text_of(wire.read_answer()) == text
        assert wire.is_ended()


@pytest.mark.parametrize("hosts", [b"", b"host: a\r\nhost: b\r\n"], ids=["none", "two"])
def test_t09_a_request_names_its_host_once(service: Service, hosts: bytes) -> None:
    """Nothing on the way can read one host where the router reads another (RFC 9112 section 3.2)."""
    answer = raw.exchange(service.router.url, b"GET /health HTTP/1.1\r\n" + hosts + b"connection: close\r\n\r\n")
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


def test_t11_a_body_announced_too_long_is_refused_before_it_comes(service: Service) -> None:
    """A client need not send 40 MB in order to learn that they are too many; and the connection is not used again."""
    with raw.Wire(service.router.url) as wire:
        wire.send(raw.request("POST", CHAT, {**JSON_HEADERS, "content-length": str(40 * 1024 * 1024)}) + b"{")
        answer = wire.read_answer()
        assert (answer.status, answer.error["code"], answer.header("connection")) == (413, "request_too_large", "close")
        assert wire.is_ended()
