"""T09 and T11-T14 on raw sockets: requests that mean harm, are slow, or whose client leaves."""

import json
import time
from typing import Any

import pytest

from tests.conformance import raw
from tests.conformance.replies import CHAT, PLAIN, whole_and_streamed
from tests.conformance.service import AUTHORIZED, KEY, Service
from tests.conformance.test_transport import chat, text_of
from tests.router.process import RouterProcess
from tests.waiting import wait_until

LONG: dict[str, Any] = {**PLAIN, "max_tokens": 200_000, "ignore_eos": True}
BODY = json.dumps(PLAIN).encode()
AMBIGUOUS = {
    "two lengths": (f"content-length: {len(BODY)}\r\ncontent-length: 0", BODY),
    "two equal lengths": (f"content-length: {len(BODY)}\r\ncontent-length: {len(BODY)}", BODY),
    "list of lengths": (f"content-length: {len(BODY)}, {len(BODY) + 1}", BODY),
    "length and chunks": ("content-length: 4\r\ntransfer-encoding: chunked", b"0\r\n\r\n"),
    "chunks and length": ("transfer-encoding: chunked\r\ncontent-length: 4", b"0\r\n\r\n"),
    "signed length": (f"content-length: +{len(BODY)}", BODY),
    "negative length": ("content-length: -1", BODY),
    "length in hexadecimal": ("content-length: 0x10", BODY),
    "length beyond 64 bits": ("content-length: 99999999999999999999999", BODY),
    "unknown transfer coding": ("transfer-encoding: xchunked", b"0\r\n\r\n"),
    "chunked is not the last coding": ("transfer-encoding: chunked, identity", b"0\r\n\r\n"),
    "space before the colon": ("transfer-encoding : chunked", b"0\r\n\r\n"),
    "chunk size beyond 64 bits": ("transfer-encoding: chunked", b"FFFFFFFFFFFFFFFFF\r\n"),
    "signed chunk size": ("transfer-encoding: chunked", b"+1\r\na\r\n0\r\n\r\n"),
    "chunk size in 0x": ("transfer-encoding: chunked", b"0x1\r\na\r\n0\r\n\r\n"),
    "chunk without its line end": ("transfer-encoding: chunked", b"1\r\naX\r\n0\r\n\r\n"),
    "chunk sizes ended by LF": ("transfer-encoding: chunked", b"1\na\n0\n\n"),
    "folded header": (f"content-length: {len(BODY)}\r\nx-a: b\r\n c", BODY),
    "bare CR in a value": (f"content-length: {len(BODY)}\r\nx-a: b\rx: c", BODY),
    "NUL in a value": (f"content-length: {len(BODY)}\r\nx-a: b\0c", BODY),
    "no colon": (f"content-length: {len(BODY)}\r\njunk", BODY),
    "empty name": (f"content-length: {len(BODY)}\r\n: junk", BODY),
}


@pytest.mark.parametrize(("lines", "body"), AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
def test_t09_a_request_that_two_servers_could_read_differently_is_refused(service: Service, lines: str, body: bytes) -> None:
    """What stands behind it is never taken for a request of its own, which is how requests are smuggled past a proxy."""
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n{lines}\r\n\r\n"
    )
    with raw.Wire(service.router.url) as wire:
        wire.send(head.encode() + body + raw.request("GET", "/v1/models/smuggled", AUTHORIZED))
        answer = wire.read_answer()
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
        wire.half_close()
        assert b"smuggled" not in wire.read_to_end()


@pytest.mark.parametrize(
    "data",
    [
        chat().replace(b"\r\n", b"\n"),
        b"GET /health HTTP/3.0\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1 x\r\nhost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\0" * 100,
    ],
    ids=["bare LF", "HTTP/3", "four words", "TLS", "HTTP/2", "NUL"],
)
def test_t09_what_is_not_http_1_is_refused(service: Service, data: bytes) -> None:
    """With an error that says so, then the connection ends."""
    with raw.Wire(service.router.url) as wire:
        wire.send(data)
        answer = wire.read_answer()
        assert (answer.status // 100, answer.error["type"]) in ((4, "invalid_request_error"), (5, "invalid_request_error"))
        wire.half_close()
        assert wire.is_ended()


@pytest.mark.parametrize("evil", ["a\rset-cookie: x=1", "a\r\n b", "a\tb", "a\x00b", "\u00e9", "a" * 200, "<script>"])
def test_t09_b42_an_id_that_could_break_a_header_or_a_log_is_not_echoed(service: Service, evil: str) -> None:
    """Either the request is refused or it gets another id."""
    answer = raw.exchange(service.router.url, raw.request("GET", "/v1/models", {**AUTHORIZED, "x-request-id": evil}))
    assert answer.status in (200, 400)
    assert answer.header("set-cookie") is None
    if answer.status == 200:
        assert (answer.header("x-request-id") or "").startswith("req_")


def test_t11_slow_clients_hold_nobody_up(service: Service) -> None:
    """A hundred that dribble their header or body; others are served meanwhile, and so are they once they are done."""
    text = text_of(raw.exchange(service.router.url, chat()))
    head, _, body = chat().partition(b"\r\n\r\n")
    wires = [raw.Wire(service.router.url) for _ in range(100)]
    try:
        for number, wire in enumerate(wires):
            wire.send(head[:40] if number % 2 else head + b"\r\n\r\n" + body[:10])
        started = time.monotonic()
        assert text_of(raw.exchange(service.router.url, chat())) == text
        assert time.monotonic() - started < 2
        for byte in head[40:] + b"\r\n\r\n" + body:
            wires[1].send(bytes([byte]))
        for byte in body[10:]:
            wires[2].send(bytes([byte]))
        assert [text_of(wire.read_answer()) for wire in wires[1:3]] == [text, text]
    finally:
        for wire in wires:
            wire.close()


@pytest.mark.parametrize("sent", [b"", b'{"model": "scripted"'], ids=["nothing", "a part"])
def test_t11_a_body_that_never_comes_is_a_408(scripted_router: RouterProcess, sent: bytes) -> None:
    """The time for it is limited, so that nobody holds a connection for ever; the client is told and cut off."""
    with raw.Wire(scripted_router.url) as wire:
        wire.send(raw.request("POST", CHAT, {"content-type": "application/json", "content-length": "100"}) + sent)
        answer = wire.read_answer()
        assert (answer.status, answer.error["type"]) == (408, "invalid_request_error")
        assert answer.header("connection") == "close"
        wire.half_close()
        assert wire.is_ended()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"cookie": "a" * 60 * 1024}, 200),
        ({"cookie": "a" * 65 * 1024}, 431),
        ({f"x-{number}": "a" * 1000 for number in range(66)}, 431),
        ({f"x-{number}": "" for number in range(15_000)}, 431),
    ],
    ids=["60 KiB", "65 KiB in one", "65 KiB in many", "many empty"],
)
def test_t12_headers_beyond_64_kib_are_refused(service: Service, headers: dict[str, str], status: int) -> None:
    """A megabyte of cookies is nobody's request."""
    with raw.Wire(service.router.url) as wire:
        wire.send(raw.request("GET", "/v1/models", {**AUTHORIZED, **headers}))
        answer = wire.read_answer()
        assert answer.status == status
        if status == 431:
            assert (answer.error["type"], answer.header("connection")) == ("invalid_request_error", "close")


@whole_and_streamed
def test_t13_a_client_that_closes_its_sending_half_is_gone(service: Service, stream: bool) -> None:
    """The engine is free within a second, and the connection ends."""
    with raw.Wire(service.router.url) as wire:
        wire.send(chat(**{**LONG, "stream": stream}))
        wait_until(lambda: service.running() == 1, 5, "the engine to work")
        wire.half_close()
        wait_until(lambda: service.running() == 0, 1, "the engine to be free")
        assert b"[DONE]" not in wire.read_to_end()


@pytest.mark.parametrize("way", ["close", "reset"])
@pytest.mark.parametrize("when", ["before the first byte", "mid-stream"])
def test_t14_a_client_that_leaves_frees_the_engine(service: Service, when: str, way: str) -> None:
    """Within a second, however it leaves."""
    stream = when == "mid-stream"
    with raw.Wire(service.router.url) as wire:
        wire.send(chat(**{**LONG, "stream": stream}))
        if stream:
            wire.read_until(b'"content":"')
        wait_until(lambda: service.running() == 1, 5, "the engine to work")
        if way == "reset":
            wire.reset()
        else:
            wire.close()
        wait_until(lambda: service.running() == 0, 1, "the engine to be free")
    wait_until(lambda: service.in_flight() == 0, 1, "the router's count to fall")


@pytest.mark.parametrize("way", ["close", "reset"])
def test_t14_a_client_that_leaves_after_the_answer_has_got_it(service: Service, way: str) -> None:
    """It counts as completed, and the next one is served."""
    headers = {"x-request-id": f"after-{way}"}
    with raw.Wire(service.router.url) as wire:
        wire.send(chat(stream=True, headers=headers))
        wire.read_answer()
        if way == "reset":
            wire.reset()
    assert service.logged(headers["x-request-id"])["outcome"] == "completed"


def test_t14_a_client_that_never_finishes_its_body_reaches_no_engine(service: Service) -> None:
    """An upload that breaks off is not half a request."""
    with raw.Wire(service.router.url) as wire:
        wire.send(chat()[:-5])
        wire.half_close()
        assert b" 200 " not in wire.read_to_end()
    assert service.running() == 0
