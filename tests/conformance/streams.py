"""Streams as scripted engines write them, and what a client sees of one that breaks off."""

import json
from typing import Any

import httpx

from tests.conformance import raw, strict
from tests.conformance.replies import CHAT, Reply, read_chat
from tests.conformance.service import JSON_HEADERS

BASE = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "scripted"}
ASKED = {"model": "scripted", "messages": [], "stream": True, "seed": 1, "stream_options": {"include_usage": True}}
DONE = b"data: [DONE]\n\n"
BREAKAGES = {
    "reset": {"kind": "reset", "after_chunks": 5},
    "end of the connection": {"kind": "truncate", "after_chunks": 5},
    "error event": {"kind": "error_frame", "after_chunks": 5},
}


def chunk(delta: dict[str, Any], finish_reason: str | None = None, index: int = 0) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return b"data: %b\n\n" % json.dumps({**BASE, "choices": [choice]}, ensure_ascii=False).encode()


def usage_chunk() -> bytes:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return b"data: %b\n\n" % json.dumps({**BASE, "choices": [], "usage": usage}).encode()


def broken_stream(url: str, body: dict[str, Any], path: str = CHAT) -> bytes:
    """The events of a stream that breaks off. Fails if it ends as a whole one does."""
    with raw.Wire(url) as wire:
        wire.send(raw.request("POST", path, JSON_HEADERS, json.dumps(body).encode()))
        head = wire.read_until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        rest = head.partition(b"\r\n\r\n")[2] + wire.read_to_end()
    data = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        assert int(size, 16) > 0, "a clean end"
        data, rest = data + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return data


def check_error_event(data: bytes) -> tuple[list[bytes], dict[str, str | None]]:
    """The payloads before the error event that ends a broken stream, and that error."""
    *before, last = [event.data for event in strict.read_events(data).events]
    assert b"[DONE]" not in before
    return before, strict.check_error(last)


def read_chat_of_scripted(response: httpx.Response) -> Reply:
    """`read_chat` for an engine that names no checkpoint."""
    response.headers.setdefault("x-intellect-checkpoint", "none")
    return read_chat(response, stream=True)
