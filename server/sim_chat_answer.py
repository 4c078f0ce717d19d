"""Chat completions of the simulated engine, as one body and as server-sent events, in vLLM 0.32's shape."""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from server.sim_answers import DONE, AnswerHead, ChoiceText, event, openai_failure, text_logprob, usage, without_none
from server.sim_errors import ApiError
from server.sim_generation import Emission, FinishReason
from server.sim_requests import ChatRequest
from server.sim_scheduler import SequenceState


class ChatAnswer:
    opens_at_once = False

    def __init__(
        self,
        request: ChatRequest,
        head: AnswerHead,
        sequences: Sequence[SequenceState],
        make_call_id: Callable[[], str] = lambda: f"chatcmpl-tool-{uuid.uuid4().hex}",
    ) -> None:
        self._request = request
        self._generate = request.generate
        self._head = head
        self._sequences = sequences
        self._choices = [ChoiceText() for _ in sequences]
        self._index = {sequence.id: index for index, sequence in enumerate(sequences)}
        self._make_call_id = make_call_id
        self._reasoning_tokens = 0

    def opening(self) -> list[bytes]:
        events = []
        for index, sequence in enumerate(self._sequences):
            choice = {
                "index": index,
                "delta": {"role": self._request.role, "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            chunk = self._chunk(choice, index)
            prompt_ids = sequence.tokens[: sequence.prompt_tokens] if self._generate.return_token_ids else None
            chunk |= {"prompt_token_ids": prompt_ids, "prompt_text": None}
            events.append(event(chunk))
        if self._request.echoed:
            for index in range(len(self._sequences)):
                delta = {"content": self._request.echoed}
                choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                events.append(event(self._chunk(choice, index)))
        return events

    def add(self, emission: Emission) -> list[bytes]:
        index = self._index[emission.sequence_id]
        choice = self._choices[index]
        is_first = not choice.text
        choice.add(emission)
        self._reasoning_tokens += emission.is_reasoning
        if not self._generate.stream:
            return []
        delta = self._delta(emission, is_first=is_first)
        shows_tokens = self._generate.return_token_ids and not self._hides_tokens
        if delta is None:
            # Log probabilities and token ids are shown even where the text is not.
            if emission.finish_reason is None and not (shows_tokens or (emission.logprob and not self._hides_tokens)):
                return []
            delta = {}
        part: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs([emission]) if emission.logprob and self._request.shows_reasoning else None,
            "finish_reason": None,
        }
        if emission.finish_reason is not None:
            part["finish_reason"] = self._finish_reason(emission.finish_reason)
            part["stop_reason"] = emission.stop_reason
        tokens = [] if emission.token is None else [emission.token]
        part["token_ids"] = tokens if shows_tokens else None
        chunk = self._chunk(part, index)
        if emission.finish_reason is not None and not self._generate.include_usage:
            chunk["system_fingerprint"] = self._head.fingerprint
        return [event(chunk)]

    def closing(self) -> list[bytes]:
        if not self._generate.include_usage:
            return [DONE]
        chunk = self._base("chat.completion.chunk") | {
            "choices": [],
            "usage": self._usage(),
            "system_fingerprint": self._head.fingerprint,
        }
        return [event(without_none(chunk)), DONE]

    def failed(self, error: ApiError) -> list[bytes]:
        return openai_failure(error)

    def whole(self) -> bytes:
        body = self._base("chat.completion") | {
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)],
            "service_tier": None,
            "system_fingerprint": self._head.fingerprint,
            "usage": self._usage(),
            "prompt_logprobs": None,
            "prompt_token_ids": self._prompt_tokens() if self._generate.return_token_ids else None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
        return msgspec.json.encode(body)

    def _whole_choice(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        request = self._request
        text = "".join(choice.text)
        reasoning = "".join(choice.reasoning) if choice.reasoning and request.shows_reasoning else None
        message: dict[str, Any] = {
            "role": request.role,
            "content": request.echoed + text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        if request.tool is not None:
            call = {"name": request.tool.name, "arguments": text}
            message["content"] = "" if request.tool.forced else None
            message["tool_calls"] = [{"id": self._make_call_id(), "type": "function", "function": call}]
        message["reasoning"] = reasoning
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs) if self._generate.top_logprobs is not None else None,
            "finish_reason": self._finish_reason(choice.finish_reason or FinishReason.STOP),
            "stop_reason": choice.stop_reason,
            "token_ids": choice.tokens if self._generate.return_token_ids and not self._hides_tokens else None,
            "routed_experts": None,
        }

    @property
    def _hides_tokens(self) -> bool:
        """Token ids would tell the reasoning that the request does not want to see."""
        return self._head.reasoning_details and not self._request.shows_reasoning

    def _delta(self, emission: Emission, *, is_first: bool) -> dict[str, Any] | None:
        """What an event adds to the message; None where there is nothing to show."""
        if emission.is_reasoning:
            return {"reasoning": emission.text} if self._request.shows_reasoning else None
        if self._request.tool is None:
            return {"content": emission.text}
        if is_first:
            function = {"name": self._request.tool.name, "arguments": emission.text}
            return {"tool_calls": [{"id": self._make_call_id(), "type": "function", "index": 0, "function": function}]}
        return {"tool_calls": [{"index": 0, "function": {"arguments": emission.text}}]} if emission.text else None

    def _finish_reason(self, reason: FinishReason) -> str:
        tool = self._request.tool
        is_call = tool is not None and not tool.named and reason is FinishReason.STOP
        return "tool_calls" if is_call else reason.value

    def _chunk(self, choice: dict[str, Any], index: int) -> dict[str, Any]:
        chunk = self._base("chat.completion.chunk") | {"choices": [choice]}
        if self._generate.continuous_usage:
            chunk["usage"] = self._usage_so_far(index)
        return chunk

    def _base(self, kind: str) -> dict[str, Any]:
        return {"id": self._head.id, "object": kind, "created": self._head.created, "model": self._head.model}

    def _usage(self) -> dict[str, Any]:
        first = self._sequences[0]
        details = None
        if self._head.prompt_tokens_details and first.cached_tokens is not None:
            details = {
                "cached_tokens": first.cached_tokens,
                "created_cache_tokens": first.created_cache_tokens,
                "multimodal_tokens": None,
            }
        reasoning = self._reasoning_tokens if self._head.reasoning_details else None
        return usage(
            sum(len(choice.tokens) for choice in self._choices),
            prompt_tokens=first.prompt_tokens,
            reasoning_tokens=reasoning,
            details=details,
        )

    def _usage_so_far(self, index: int) -> dict[str, Any]:
        prompt, completion = self._sequences[index].prompt_tokens, len(self._choices[index].tokens)
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    def _prompt_tokens(self) -> list[int]:
        first = self._sequences[0]
        return first.tokens[: first.prompt_tokens]

    def _logprobs(self, emissions: Sequence[Emission]) -> dict[str, Any]:
        count = self._generate.top_logprobs or 0
        content = []
        for emission in emissions:
            assert emission.logprob is not None
            assert emission.token is not None
            top = [text_logprob(*pair) for pair in emission.logprob.top[:count]]
            content.append(text_logprob(emission.token, emission.logprob.logprob) | {"top_logprobs": top})
        return {"content": content}
