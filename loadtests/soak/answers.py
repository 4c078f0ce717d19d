"""What an answer says, without what differs from one asking to the next: to be compared with another answer. Pure."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol.openai import Surface

_DONE = "[DONE]"
# Ids, times, and what depends on an engine's cache.
_VOLATILE = frozenset(
    {"id", "created", "created_at", "completed_at", "item_id", "call_id", "signature", "system_fingerprint", "metrics"}
    | {"prompt_tokens_details", "input_tokens_details", "input_tokens_per_turn", "output_tokens_per_turn"}
    | {"cache_read_input_tokens", "cache_creation_input_tokens", "context_management", "request_id"}
)
_ENDS = {Surface.MESSAGES: "message_stop", Surface.RESPONSES: "response.completed"}


def normalized(value: object) -> object:
    """A JSON value without its volatile keys."""
    if isinstance(value, dict):
        return {name: normalized(inner) for name, inner in value.items() if name not in _VOLATILE}
    if isinstance(value, list):
        return [normalized(inner) for inner in value]
    return value


def read_json(body: bytes) -> object:
    """A whole answer, normalized. Raises ValueError if it is not JSON."""
    return normalized(json.loads(body))


def read_response(response: Any) -> "Said":
    """The texts of a normalized answer of /v1/responses, in the channels that its stream would have."""
    said = Said(finishes={"0": response["status"]}, usage=response["usage"])
    for index, item in enumerate(response["output"]):
        for part in item.get("content") or ():
            said.texts[f"{index}.response.{part['type']}.delta"] = part["text"]
    return said


@dataclass(slots=True)
class Said:
    """What a stream said: the text of each channel (choice and kind of text), how each choice finished, and the usage."""

    texts: dict[str, str] = field(default_factory=dict)
    finishes: dict[str, object] = field(default_factory=dict)
    usage: object = None

    def is_beginning_of(self, whole: "Said") -> bool:
        return all(whole.texts.get(channel, "").startswith(text) for channel, text in self.texts.items())


def is_given_up_response(path: str, said: object, whole: object) -> bool:
    """Whether this is the beginning of a response that its engine gave up (at its shutdown, or when told to).

    vLLM calls it `completed` like a whole one (vllm/entrypoints/openai/responses/serving.py), so no router can know.
    """
    if path != Surface.RESPONSES:
        return False
    one, other = (value if isinstance(value, Said) else read_response(value) for value in (said, whole))
    return one.finishes == {"0": "completed"} and one != other and one.is_beginning_of(other)


class StreamReading:
    """Reads the events of one stream. `faults` says what no stream may do, whatever happens to its engine."""

    def __init__(self, path: str, *, asks_usage: bool) -> None:
        self._path = path
        self._asks_usage = asks_usage
        self._rest = b""
        self._parts: defaultdict[str, list[str]] = defaultdict(list)
        self._constants: dict[str, object] = {}
        self._roles: set[int] = set()
        self._said = Said()
        self.is_done = False
        self.has_error = False
        self.continuations = 0
        self.faults: list[str] = []

    @property
    def said(self) -> Said:
        self._said.texts = {channel: "".join(parts) for channel, parts in self._parts.items()}
        return self._said

    @property
    def has_half_event(self) -> bool:
        return bool(self._rest)

    def feed(self, data: bytes) -> None:
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            lines = [line for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                self._read(b"\n".join(line[5:].removeprefix(b" ") for line in lines).decode())

    def _read(self, data: str) -> None:
        if self.is_done or self.has_error:
            self.faults.append(f"something follows the end: {data[:80]}")
            return
        if data == _DONE:
            self.is_done = True
            return
        try:
            value = json.loads(data)
        except ValueError:
            self.faults.append(f"an event is not JSON: {data[:80]}")
            return
        if "error" in value or value.get("type") == "error":
            self.has_error = True
        elif self._path in _ENDS:
            self._read_typed(value)
        else:
            self._read_chunk(value)

    def _read_typed(self, value: Mapping[str, Any]) -> None:
        """Messages and responses: every event names its type."""
        kind, delta = value["type"], value.get("delta")
        self.is_done = kind == _ENDS[Surface(self._path)]
        if kind == "content_block_delta":
            assert delta is not None
            if delta["type"] != "signature_delta":
                text = delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
                self._parts[f"{value['index']}.{delta['type']}"].append(text)
        elif kind == "message_delta":
            self._said.finishes["0"] = normalized(delta)
            self._said.usage = normalized(value.get("usage"))
        elif kind.endswith(".delta") and isinstance(delta, str):
            self._parts[f"{value.get('output_index')}.{kind}"].append(delta)
        elif kind == "response.completed":
            self._said.finishes["0"] = value["response"]["status"]
            self._said.usage = normalized(value["response"]["usage"])

    def _read_chunk(self, chunk: Mapping[str, Any]) -> None:
        """Chat and completions."""
        for name in ("id", "created", "model", "object"):
            if self._constants.setdefault(name, chunk.get(name)) != chunk.get(name):
                self.faults.append(f"{name} changes from {self._constants[name]} to {chunk.get(name)}")
        self.continuations = max(self.continuations, chunk.get("intellect", {}).get("continuations", 0))
        if (usage := chunk.get("usage")) is not None:
            if not self._asks_usage:
                self.faults.append("usage that nobody asked for")
            self._said.usage = normalized(usage)
        elif not chunk["choices"]:
            self.faults.append("a chunk without choices or usage")
        for choice in chunk["choices"]:
            self._read_choice(choice)

    def _read_choice(self, choice: Mapping[str, Any]) -> None:
        index = choice["index"]
        if str(index) in self._said.finishes:
            self.faults.append(f"choice {index} goes on after its finish reason")
        delta = choice.get("delta")
        if delta is None:
            self._add(index, "text", choice.get("text"))
        else:
            if delta.get("role") is not None and index in self._roles:
                self.faults.append(f"choice {index} begins twice")
            self._roles.add(index)
            self._add(index, "content", delta.get("content"))
            self._add(index, "reasoning", delta.get("reasoning") or delta.get("reasoning_content"))
            for call in delta.get("tool_calls") or ():
                self._add(index, f"call {call['index']} name", call["function"].get("name"))
                self._add(index, f"call {call['index']} arguments", call["function"].get("arguments"))
        self._add(index, "ids", _spelled(choice.get("token_ids")))
        if choice.get("finish_reason") is not None:
            self._said.finishes[str(index)] = [choice["finish_reason"], choice.get("stop_reason")]

    def _add(self, index: int, channel: str, text: str | None) -> None:
        if text:
            self._parts[f"{index}.{channel}"].append(text)


def _spelled(token_ids: Sequence[int] | None) -> str:
    return "".join(f"{token}," for token in token_ids or ())
