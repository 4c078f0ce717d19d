"""Answers of the Responses API as vLLM 0.32 words them, as one body and as server-sent events."""

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from server.sim_answers import AnswerHead, ChoiceText, text_logprob, typed_event
from server.sim_errors import ApiError
from server.sim_generation import Emission, FinishReason
from server.sim_responses_request import ResponsesRequest
from server.sim_scheduler import SequenceState

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponsesAnswer:
    opens_at_once = True

    def __init__(self, request: ResponsesRequest, head: AnswerHead, sequences: Sequence[SequenceState]) -> None:
        self._request = request
        self._head = head
        (self._sequence,) = sequences
        self._choice = ChoiceText()
        self._items: list[dict[str, Any]] = []  # complete output items
        self._kind: str | None = None  # of the open item
        self._item_id = ""
        self._item_text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._number = 0
        self._call_id = f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"

    def opening(self) -> list[bytes]:
        response = self.as_dict("in_progress")
        return [self._event("response.created", response=response), self._event("response.in_progress", response=response)]

    def add(self, emission: Emission) -> list[bytes]:
        self._choice.add(emission)
        if not self._request.generate.stream:
            return []
        chat = self._request.chat
        if emission.is_reasoning:
            kind = "reasoning"
            if not chat.shows_reasoning:
                return []
        else:
            kind = "message" if chat.tool is None else "function_call"
        if not emission.text and (kind == "message" or emission.finish_reason is not None):
            return []
        events = [] if self._kind == kind else [*self._close(), *self._open(kind)]
        self._item_text.append(emission.text)
        part = {"item_id": self._item_id, "output_index": len(self._items), "delta": emission.text}
        match kind:
            case "reasoning":
                events.append(self._event("response.reasoning_text.delta", content_index=0, **part))
            case "message":
                logprobs = self._token_logprobs([emission])
                self._logprobs += logprobs
                events.append(
                    self._event("response.output_text.delta", content_index=0, logprobs=_without_bytes(logprobs), **part)
                )
            case _ if emission.text:
                events.append(self._event("response.function_call_arguments.delta", **part))
        return events

    def closing(self) -> list[bytes]:
        """vLLM calls the last event `completed` whatever the status inside is."""
        events = self._close()
        return [*events, self._event("response.completed", response=self.as_dict(self._status(), self._items))]

    def failed(self, error: ApiError) -> None:
        """vLLM cannot word the error as an event of this API: the connection breaks."""

    def whole(self) -> bytes:
        return msgspec.json.encode(self.result())

    def result(self) -> dict[str, Any]:
        """The finished response as an object, streamed or not."""
        if not self._items and not self._request.generate.stream:
            self._items = self._whole_items()
        return self.as_dict(self._status(), self._items)

    def as_dict(self, status: str, output: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """The response with its usage where it has ended; the order of the keys is vLLM's."""
        is_over = status not in ("queued", "in_progress")
        echoed = self._request.echoed
        return {
            "id": self._head.id,
            "created_at": self._head.created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": echoed["instructions"],
            "metadata": echoed["metadata"],
            "model": self._head.model,
            "object": "response",
            "output": list(output),
            **{name: echoed[name] for name in ("parallel_tool_calls", "temperature", "tool_choice", "tools", "top_p")},
            **{name: echoed[name] for name in ("background", "max_output_tokens", "max_tool_calls")},
            "previous_response_id": echoed["previous_response_id"],
            "prompt": None,
            "reasoning": echoed["reasoning"],
            "service_tier": echoed["service_tier"],
            "status": status,
            **{name: echoed[name] for name in ("text", "top_logprobs", "truncation")},
            "usage": self._usage() if is_over else None,
            **{name: echoed[name] for name in ("user", "presence_penalty", "frequency_penalty")},
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def _open(self, kind: str) -> list[bytes]:
        self._kind, self._item_id = kind, f"{_PREFIXES[kind]}_{uuid.uuid4().hex[:16]}"
        self._item_text, self._logprobs = [], []
        index = len(self._items)
        item = self._item(kind, self._item_id, None, status="in_progress")
        if kind == "function_call":
            item["created_by"] = None
        events = [self._event("response.output_item.added", item=item, output_index=index)]
        if kind != "function_call":
            part = _text_part("", []) if kind == "message" else {"text": "", "type": "reasoning_text"}
            where = {"content_index": 0, "item_id": self._item_id, "output_index": index}
            events.append(self._event("response.content_part.added", part=part, **where))
        return events

    def _close(self) -> list[bytes]:
        if self._kind is None:
            return []
        kind, text, index = self._kind, "".join(self._item_text), len(self._items)
        where = {"item_id": self._item_id, "output_index": index}
        if kind == "function_call":
            assert self._request.chat.tool is not None
            name = self._request.chat.tool.name
            events = [self._event("response.function_call_arguments.done", arguments=text, name=name, **where)]
        elif kind == "message":
            part = _text_part(text, self._logprobs or None)
            events = [
                self._event("response.output_text.done", content_index=0, logprobs=[], text=text, **where),
                self._event("response.content_part.done", content_index=0, part=part, **where),
            ]
        else:
            part = {"text": text, "type": "reasoning_text"}
            events = [
                self._event("response.reasoning_text.done", content_index=0, text=text, **where),
                self._event("response.content_part.done", content_index=0, part=part, **where),
            ]
        item = self._item(kind, self._item_id, text, status="completed", logprobs=self._logprobs or None)
        self._items.append(item)
        self._kind = None
        return [*events, self._event("response.output_item.done", item=item, output_index=index)]

    def _whole_items(self) -> list[dict[str, Any]]:
        reasoning, text = "".join(self._choice.reasoning), "".join(self._choice.text)
        chat = self._request.chat
        items = []
        if reasoning and chat.shows_reasoning:
            items.append(self._item("reasoning", _new_id("reasoning"), reasoning, status=None))
        if chat.tool is not None:
            items.append(self._item("function_call", _new_id("function_call"), text, status="completed"))
        elif text or not self._head.reasoning_details:
            logprobs = self._token_logprobs(self._choice.logprobs) if self._choice.logprobs else None
            items.append(self._item("message", _new_id("message"), text, status="completed", logprobs=logprobs))
        return items

    def _item(
        self, kind: str, item_id: str, text: str | None, *, status: str | None, logprobs: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """An output item; `text` is None while it is empty."""
        match kind:
            case "message":
                content = [_text_part(text, logprobs)] if text else []
                item = {"id": item_id, "content": content, "role": "assistant", "status": status}
                return item | {"type": "message", "phase": None}
            case "reasoning":
                thoughts = None if text is None else [{"text": text, "type": "reasoning_text"}]
                item = {"id": item_id, "summary": [], "type": "reasoning", "content": thoughts}
                return item | {"encrypted_content": None, "status": status}
            case _:
                assert self._request.chat.tool is not None
                call: dict[str, Any] = {"arguments": text or "", "call_id": self._call_id, "name": self._request.chat.tool.name}
                call |= {"type": "function_call", "id": item_id, "async": None, "caller": None, "namespace": None}
                return call | {"status": status}

    def _status(self) -> str:
        """An aborted answer counts as completed, as in vLLM."""
        return "incomplete" if self._choice.finish_reason is FinishReason.LENGTH else "completed"

    def _usage(self) -> dict[str, Any]:
        sequence, output = self._sequence, len(self._choice.tokens)
        return {
            "input_tokens": sequence.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": sequence.cached_tokens or 0,
                "cache_write_tokens": sequence.created_cache_tokens,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": output,
            "output_tokens_details": {
                "reasoning_tokens": len(self._choice.reasoning),
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": sequence.prompt_tokens + output,
        }

    def _token_logprobs(self, emissions: Sequence[Emission]) -> list[dict[str, Any]]:
        count = self._request.generate.top_logprobs or 0
        found = []
        for emission in emissions:
            if emission.logprob is not None and emission.token is not None and not emission.is_reasoning:
                top = [_with_order(text_logprob(*pair)) for pair in emission.logprob.top[:count]]
                sampled = _with_order(text_logprob(emission.token, emission.logprob.logprob))
                found.append(sampled | {"top_logprobs": top})
        return found

    def _event(self, kind: str, **fields: Any) -> bytes:
        """The keys come in alphabetical order, as in the models of the openai package, but for `name`."""
        last = {"name": fields.pop("name")} if "name" in fields else {}
        payload = dict(sorted({**fields, "sequence_number": self._number, "type": kind}.items()))
        self._number += 1
        return typed_event(payload | last)


def _new_id(kind: str) -> str:
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex[:16]}"


def _text_part(text: str, logprobs: list[dict[str, Any]] | None) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


def _with_order(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in ("token", "bytes", "logprob")}


def _without_bytes(logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As in the events of deltas."""

    def bare(entry: dict[str, Any]) -> dict[str, Any]:
        return {"token": entry["token"], "logprob": entry["logprob"]}

    return [bare(entry) | {"top_logprobs": [bare(top) for top in entry["top_logprobs"]]} for entry in logprobs]
