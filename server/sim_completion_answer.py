"""Text completions of the simulated engine, as one body and as server-sent events, in vLLM 0.32's shape."""

from collections.abc import Sequence
from typing import Any

import msgspec

from server.sim_answers import DONE, AnswerHead, ChoiceText, event, openai_failure, usage, without_none
from server.sim_errors import ApiError
from server.sim_generation import Emission
from server.sim_requests import CompletionRequest
from server.sim_scheduler import SequenceState
from server.sim_text import token_text


class CompletionAnswer:
    opens_at_once = False

    def __init__(self, request: CompletionRequest, head: AnswerHead, sequences: Sequence[SequenceState]) -> None:
        self._request = request
        self._generate = request.generate
        self._head = head
        self._sequences = sequences
        self._choices = [ChoiceText() for _ in sequences]
        self._index = {sequence.id: index for index, sequence in enumerate(sequences)}
        self._text_offsets = [0] * len(sequences)  # where the next token's text starts, for log probabilities

    def opening(self) -> list[bytes]:
        return []

    def add(self, emission: Emission) -> list[bytes]:
        index = self._index[emission.sequence_id]
        choice = self._choices[index]
        is_first = not choice.tokens
        choice.add(emission)
        if not self._generate.stream:
            return []
        text, tokens, prompt_ids = self._shown(emission), [] if emission.token is None else [emission.token], None
        if is_first and self._generate.return_token_ids:
            prompt_ids = self._prompt_tokens(index)
        if is_first and self._generate.echo:
            text = f"{self._echoed(index)}{text}"
        part = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, [emission]) if emission.logprob else None,
            "finish_reason": emission.finish_reason,
            "stop_reason": emission.stop_reason,
            "prompt_token_ids": prompt_ids,
            "token_ids": tokens if self._generate.return_token_ids else None,
        }
        chunk = self._base() | {"choices": [part]}
        if self._generate.continuous_usage:
            prompt, completion = self._sequences[index].prompt_tokens, len(choice.tokens)
            chunk["usage"] = {
                "prompt_tokens": prompt,
                "total_tokens": prompt + completion,
                "completion_tokens": completion,
            }
        if emission.finish_reason is not None and not self._generate.include_usage:
            chunk["system_fingerprint"] = self._head.fingerprint
        return [event(chunk)]

    def closing(self) -> list[bytes]:
        if not self._generate.include_usage:
            return [DONE]
        chunk = self._base() | {"choices": [], "usage": self._usage(), "system_fingerprint": self._head.fingerprint}
        return [event(without_none(chunk)), DONE]

    def failed(self, error: ApiError) -> list[bytes]:
        return openai_failure(error)

    def whole(self) -> bytes:
        body = self._base() | {
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)],
            "service_tier": None,
            "system_fingerprint": self._head.fingerprint,
            "usage": self._usage(),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
        return msgspec.json.encode(body)

    def _whole_choice(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        request = self._request
        text = "" if request.echoes_only else "".join(choice.text)
        return {
            "index": index,
            "text": f"{self._echoed(index)}{text}" if self._generate.echo else text,
            "logprobs": self._logprobs(index, choice.logprobs) if self._generate.top_logprobs is not None else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.tokens if self._generate.return_token_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": self._prompt_tokens(index) if self._generate.return_token_ids else None,
            "routed_experts": None,
        }

    def _echoed(self, index: int) -> str:
        """vLLM echoes no text where token ids were asked for."""
        return "" if self._generate.return_token_ids else self._generate.sequences[index].prompt.text

    def _shown(self, emission: Emission) -> str:
        return "" if self._request.echoes_only else emission.text

    def _base(self) -> dict[str, Any]:
        head = self._head
        return {"id": head.id, "object": "text_completion", "created": head.created, "model": head.model}

    def _usage(self) -> dict[str, Any]:
        per_prompt = len(self._sequences) // self._generate.prompt_count
        firsts = self._sequences[::per_prompt]
        details = None
        if self._head.prompt_tokens_details and firsts[-1].cached_tokens is not None:
            details = {
                "cached_tokens": firsts[-1].cached_tokens,
                "created_cache_tokens": None,  # vLLM reports it for chat only
                "multimodal_tokens": None,
            }
        completion = sum(len(choice.tokens) for choice in self._choices)
        prompt = sum(sequence.prompt_tokens for sequence in firsts)
        return usage(completion, prompt_tokens=prompt, reasoning_tokens=None, details=details)

    def _prompt_tokens(self, index: int) -> list[int]:
        sequence = self._sequences[index]
        return sequence.tokens[: sequence.prompt_tokens]

    def _logprobs(self, index: int, emissions: Sequence[Emission]) -> dict[str, Any]:
        count = max(self._generate.top_logprobs or 0, 1)  # the sampled token is always among them
        offsets, values, tokens, tops = [], [], [], []
        for emission in emissions:
            assert emission.logprob is not None
            assert emission.token is not None
            text = token_text(emission.token)
            offsets.append(self._text_offsets[index])
            self._text_offsets[index] += len(text)
            values.append(emission.logprob.logprob)
            tokens.append(text)
            tops.append({token_text(token): logprob for token, logprob in emission.logprob.top[:count]})
        return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}
