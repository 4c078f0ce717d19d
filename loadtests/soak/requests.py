"""What the clients ask: one kind of request after the other, made from a seed. Pure."""

import gzip
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocol.openai import Surface

MODEL = "simulated"
EMBEDDING_MODEL = "simulated-embedding"
_CONTROL_PATH = "/v1/models"
_WORDS = ("amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jetty", "knoll", "lagoon", "marsh")
_SHORT_WORDS = 12
_LONG_WORDS = 1500
_PROMPTS_PER_KIND = 4
_TOOL_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
_SCHEMA = {"type": "object", "properties": {"label": {"type": "string"}, "score": {"type": "integer"}}}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. `status` is how a healthy service answers it; above 299 the router itself refuses, or else the engine."""

    kind: str
    path: str
    body: bytes
    is_stream: bool = False
    asks_usage: bool = False
    is_gzipped: bool = False
    method: str = "POST"
    status: int = 200
    is_routers_refusal: bool = False
    is_faultless: bool = False  # no fault of this soak can meet it
    is_counted: bool = True  # in intellect_router_requests_total

    @property
    def is_valid(self) -> bool:
        return self.status == 200


def encode(asked: Asked, request_id: str, host: str, *, is_http10: bool = False) -> bytes:
    """The request as it goes over the wire."""
    body = gzip.compress(asked.body, mtime=0) if asked.is_gzipped and asked.body else asked.body
    lines = [
        f"{asked.method} {asked.path} HTTP/1.{0 if is_http10 else 1}",
        f"host: {host}",
        f"x-request-id: {request_id}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *(["content-encoding: gzip"] if asked.is_gzipped else []),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def catalogue(rng: random.Random) -> list[Asked]:
    """Every kind of request, with several prompts each."""
    asked: list[Asked] = []
    for _ in range(_PROMPTS_PER_KIND):
        for make in (_chats, _completions, _messages, _responses, _others, _refused):
            asked += make(rng)
    return asked


def _prompt(rng: random.Random, words: int = _SHORT_WORDS) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(words // 2, words)))


def _request(kind: str, path: str, body: Mapping[str, Any], **how: Any) -> Asked:
    options = body.get("stream_options") or {}
    asks_usage = bool(options.get("include_usage")) or path in (Surface.MESSAGES, Surface.RESPONSES)
    return Asked(kind, path, json.dumps(body).encode(), is_stream=bool(body.get("stream")), asks_usage=asks_usage, **how)


def _chats(rng: random.Random) -> list[Asked]:
    def chat(kind: str, words: int = _SHORT_WORDS, *, gzips: bool = False, **fields: Any) -> Asked:
        messages = [{"role": "user", "content": _prompt(rng, words)}]
        body = {"model": MODEL, "messages": messages, "max_tokens": rng.randint(5, 60), "reasoning_effort": "none", **fields}
        return _request(f"chat {kind}", Surface.CHAT, body, is_gzipped=gzips)

    usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    tool = {"type": "function", "function": {"name": "forecast", "parameters": _TOOL_PARAMETERS}}
    schema = {"type": "json_schema", "json_schema": {"name": "judgement", "schema": _SCHEMA}}
    return [
        chat("json"),
        chat("stream", stream=True),
        chat("stream usage", **usage),
        chat("stream greedy", temperature=0, **usage),
        chat("stream long", _LONG_WORDS, max_tokens=rng.randint(100, 250), ignore_eos=True, **usage),
        chat("json long", _LONG_WORDS, max_tokens=rng.randint(60, 120)),
        chat("stream to its end", max_tokens=2000, stream=True),
        chat("stream reasoning", reasoning_effort="high", **usage),
        chat("stream stop", stop=["ba", "zo."], max_tokens=100, **usage),
        chat("stream tools", tools=[tool], tool_choice="required", **usage),
        chat("json tools", tools=[tool]),
        chat("stream schema", response_format=schema, **usage),
        chat("json schema", response_format=schema),
        chat("stream n=2", n=2, **usage),
        chat("json n=2", n=2),
        chat("stream logprobs", logprobs=True, top_logprobs=20, max_tokens=rng.randint(100, 200), ignore_eos=True, **usage),
        chat("stream seed", seed=rng.randint(1, 99), stream=True),
        chat("stream gzip", _LONG_WORDS, gzips=True, stream=True),
        chat("json gzip", gzips=True),
    ]


def _completions(rng: random.Random) -> list[Asked]:
    def completion(kind: str, words: int = _SHORT_WORDS, **fields: Any) -> Asked:
        body = {"model": MODEL, "prompt": _prompt(rng, words), "max_tokens": rng.randint(5, 60), **fields}
        return _request(f"completions {kind}", Surface.COMPLETIONS, body)

    usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    return [
        completion("json"),
        completion("json two prompts", prompt=[_prompt(rng), _prompt(rng)]),
        completion("stream", stream=True),
        completion("stream usage", **usage),
        completion("stream long", _LONG_WORDS, max_tokens=rng.randint(100, 250), ignore_eos=True, **usage),
        completion("stream ids", return_token_ids=True, **usage),
        completion("stream echo", echo=True, stream=True),
    ]


def _messages(rng: random.Random) -> list[Asked]:
    def message(kind: str, **fields: Any) -> Asked:
        messages = [{"role": "user", "content": _prompt(rng)}]
        body = {"model": MODEL, "messages": messages, "max_tokens": rng.randint(5, 60), **fields}
        return _request(f"messages {kind}", Surface.MESSAGES, body)

    return [message("json"), message("stream", stream=True)]


def _responses(rng: random.Random) -> list[Asked]:
    def response(kind: str, **fields: Any) -> Asked:
        body = {"model": MODEL, "input": _prompt(rng), "max_output_tokens": rng.randint(5, 60), **fields}
        return _request(f"responses {kind}", Surface.RESPONSES, body)

    return [response("json"), response("stream", stream=True)]


def _others(rng: random.Random) -> list[Asked]:
    question = [{"role": "user", "content": _prompt(rng)}]
    vector = {"model": EMBEDDING_MODEL, "input": [_prompt(rng), _prompt(rng)]}
    return [
        _request("embeddings", Surface.EMBEDDINGS, vector, is_faultless=True),
        _request("tokenize", Surface.TOKENIZE, {"model": MODEL, "prompt": _prompt(rng)}),
        _request("tokenize messages", Surface.TOKENIZE, {"model": MODEL, "messages": question}),
        _request("detokenize", Surface.DETOKENIZE, {"model": MODEL, "tokens": [0x0161, 0x0162]}),
        _request("count tokens", Surface.COUNT_TOKENS, {"model": MODEL, "messages": question}),
        Asked("models", _CONTROL_PATH, b"", method="GET", is_faultless=True, is_counted=False),
    ]


def _refused(rng: random.Random) -> list[Asked]:
    question = [{"role": "user", "content": _prompt(rng)}]
    chat = {"model": MODEL, "messages": question}

    def ours(kind: str, path: str, body: Mapping[str, Any], status: int) -> Asked:
        return _request(f"refused {kind}", path, body, status=status, is_routers_refusal=True)

    return [
        ours("model", Surface.CHAT, {**chat, "model": "nothing-of-the-kind"}, 404),
        ours("model stream", Surface.MESSAGES, {**chat, "model": "none", "max_tokens": 5, "stream": True}, 404),
        ours("no model", Surface.COMPLETIONS, {"prompt": "x"}, 400),
        ours("n", Surface.CHAT, {**chat, "n": 1000}, 400),
        ours("functions", Surface.CHAT, {**chat, "functions": [{"name": "f"}]}, 400),
        ours("path", "/v1/engines", {}, 404),
        Asked("refused not JSON", Surface.CHAT, b'{"model": "simulated", ', status=400, is_routers_refusal=True),
        Asked("refused not gzip", Surface.CHAT, b"", is_gzipped=True, status=400, is_routers_refusal=True),
        Asked("refused method", Surface.CHAT, b"", method="DELETE", status=405, is_routers_refusal=True),
        _request("refused by the engine", Surface.CHAT, {**chat, "temperature": 3}, status=400),
        _request("refused stream by the engine", Surface.CHAT, {**chat, "top_p": 0, "stream": True}, status=400),
        _request("refused prompt", Surface.COMPLETIONS, {"model": MODEL, "prompt": ""}, status=400),
    ]
