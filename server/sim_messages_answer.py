"""Answers of the Anthropic Messages API as vLLM 0.32 words them, as one body and as server-sent events."""

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from server.sim_answers import AnswerHead, ChoiceText, typed_event, without_none
from server.sim_errors import ApiError
from server.sim_generation import Emission, FinishReason
from server.sim_messages_request import MessagesRequest
from server.sim_scheduler import SequenceState

# vLLM feeds the error of its chat stream to its own chunk model and reports what pydantic says of it.
_ERROR_TEXT = """2 validation errors for ChatCompletionStreamResponse
model
  Field required [type=missing, input_value={'error': {'message': 'In...am': None, 'code': 500}}, input_type=dict]
    For further information visit https://errors.pydantic.dev/2.14/v/missing
choices
  Field required [type=missing, input_value={'error': {'message': 'In...am': None, 'code': 500}}, input_type=dict]
    For further information visit https://errors.pydantic.dev/2.14/v/missing"""


class MessagesAnswer:
    opens_at_once = False

    def __init__(self, request: MessagesRequest, head: AnswerHead, sequences: Sequence[SequenceState]) -> None:
        self._request = request.chat
        self._head = head
        (self._sequence,) = sequences
        self._choice = ChoiceText()
        self._block: str | None = None  # the type of the open content block
        self._index = 0
        self._call_id = f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"

    def opening(self) -> list[bytes]:
        message: dict[str, Any] = {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._head.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._sequence.prompt_tokens, "output_tokens": 0},
        }
        return [typed_event({"type": "message_start", "message": message})]

    def add(self, emission: Emission) -> list[bytes]:
        is_first = not self._choice.text
        self._choice.add(emission)
        if not self._request.generate.stream:
            return []
        if emission.is_reasoning:
            shown = emission.text if self._request.shows_reasoning else ""
            return self._delta("thinking", {"type": "thinking_delta", "thinking": shown}) if shown else []
        if self._request.tool is None:
            return self._delta("text", {"type": "text_delta", "text": emission.text}) if emission.text else []
        events = self._open("tool_use") if is_first else []
        if emission.text:
            events += self._delta("tool_use", {"type": "input_json_delta", "partial_json": emission.text})
        return events

    def closing(self) -> list[bytes]:
        reason, sequence = self._stop_reason(is_call=self._request.tool is not None)
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": self._usage(),
        }
        return [*self._close(), typed_event(delta), typed_event({"type": "message_stop"})]

    def failed(self, error: ApiError) -> list[bytes]:
        return [typed_event({"type": "error", "error": {"type": "internal_error", "message": _ERROR_TEXT}})]

    def whole(self) -> bytes:
        text, reasoning = "".join(self._choice.text), "".join(self._choice.reasoning)
        content: list[dict[str, Any]] = []
        if reasoning and self._request.shows_reasoning:
            content.append({"type": "thinking", "thinking": reasoning, "signature": uuid.uuid4().hex})
        tool = self._request.tool
        arguments = None if tool is None else _json_object(text)
        if tool is not None and arguments is not None:
            content.append({"type": "tool_use", "id": self._call_id, "name": tool.name, "input": arguments})
        elif text or not content:  # half of a call is text to vLLM's parsers; an empty answer is one empty block
            content.append({"type": "text", "text": text})
        reason, sequence = self._stop_reason(is_call=arguments is not None)
        body = {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._head.model,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(),
        }
        return msgspec.json.encode(without_none(body))

    def _delta(self, block: str, delta: dict[str, Any]) -> list[bytes]:
        event = {"type": "content_block_delta", "delta": delta}
        return [*self._open(block), typed_event(event | {"index": self._index})]

    def _open(self, block: str) -> list[bytes]:
        """Begins a content block where another one, or none, is open."""
        if self._block == block:
            return []
        events = self._close()
        self._block = block
        content: dict[str, Any] = {"type": block}
        match block:
            case "text":
                content["text"] = ""
            case "thinking":
                content["thinking"] = ""
            case _:
                assert self._request.tool is not None
                content |= {"id": self._call_id, "name": self._request.tool.name, "input": {}}
        start = {"type": "content_block_start", "content_block": content, "index": self._index}
        return [*events, typed_event(start)]

    def _close(self) -> list[bytes]:
        if self._block is None:
            return []
        events = []
        if self._block == "thinking":
            delta = {"type": "signature_delta", "signature": uuid.uuid4().hex}
            events.append(typed_event({"type": "content_block_delta", "delta": delta, "index": self._index}))
        events.append(typed_event({"type": "content_block_stop", "index": self._index}))
        self._block = None
        self._index += 1
        return events

    def _stop_reason(self, *, is_call: bool) -> tuple[str | None, str | None]:
        """Anthropic's stop_reason and stop_sequence; an aborted answer has neither, as from vLLM."""
        match self._choice.finish_reason:
            case FinishReason.LENGTH:
                return "max_tokens", None
            case FinishReason.STOP:
                is_complete = is_call and _json_object("".join(self._choice.text)) is not None
                stop = self._choice.stop_reason
                if isinstance(stop, str) and not is_complete:
                    return "stop_sequence", stop
                return ("tool_use" if is_call else "end_turn"), None
            case _:
                return None, None

    def _usage(self) -> dict[str, int]:
        """Anthropic counts cached tokens apart from the input; without --enable-prompt-tokens-details there are none."""
        sequence = self._sequence
        usage = {"input_tokens": sequence.prompt_tokens, "output_tokens": len(self._choice.tokens)}
        if self._head.prompt_tokens_details and sequence.cached_tokens is not None:
            read, written = sequence.cached_tokens, sequence.created_cache_tokens
            usage["input_tokens"] = max(0, sequence.prompt_tokens - read - written)
            usage |= {"cache_creation_input_tokens": written, "cache_read_input_tokens": read}
        return usage


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, dict) else None
