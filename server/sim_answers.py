"""Answers of the simulated engine in vLLM's shapes: usage, log probabilities, and what all answers have in common.

Key order and the presence of null fields follow vLLM 0.32, so that bytes can be compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from server.sim_errors import ApiError
from server.sim_generation import Emission, FinishReason
from server.sim_text import token_text

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What is equal in every part of one answer."""

    id: str
    created: int  # seconds since 1970
    model: str
    fingerprint: str
    prompt_tokens_details: bool  # --enable-prompt-tokens-details
    reasoning_details: bool  # a reasoning parser is on


class Answer(Protocol):
    """Collects the emissions of one request and words them, as server-sent events or as one body."""

    @property
    def opens_at_once(self) -> bool:
        """Whether `opening` is sent before the first token is there."""
        ...

    def opening(self) -> list[bytes]:
        """Events before the first token."""
        ...

    def add(self, emission: Emission) -> list[bytes]:
        """Takes an emission; the events that show it."""
        ...

    def closing(self) -> list[bytes]:
        """Events after the last token, [DONE] included."""
        ...

    def failed(self, error: ApiError) -> list[bytes] | None:
        """Events that end a stream whose generation failed; None: vLLM itself breaks the connection."""
        ...

    def whole(self) -> bytes:
        """The answer as one JSON body.

        Raises:
            ApiError: vLLM cannot word this answer either.
        """
        ...


class ChoiceText:
    """What one choice has said so far."""

    __slots__ = ("finish_reason", "logprobs", "reasoning", "stop_reason", "text", "tokens")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[Emission] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def add(self, emission: Emission) -> None:
        (self.reasoning if emission.is_reasoning else self.text).append(emission.text)
        if emission.token is not None:
            self.tokens.append(emission.token)
        if emission.logprob is not None:
            self.logprobs.append(emission)
        if emission.finish_reason is not None:
            self.finish_reason, self.stop_reason = emission.finish_reason, emission.stop_reason


def event(payload: object) -> bytes:
    """One server-sent event with a JSON payload."""
    return b"data: %b\n\n" % msgspec.json.encode(payload)


def typed_event(payload: Mapping[str, Any]) -> bytes:
    """One server-sent event that is named as its payload's `type`."""
    return b"event: %b\n%b" % (payload["type"].encode(), event(payload))


def openai_failure(error: ApiError) -> list[bytes]:
    """How a stream of chat or completions ends whose generation failed."""
    return [event(error.as_dict()), DONE]


def usage(
    completion_tokens: int, *, prompt_tokens: int, reasoning_tokens: int | None, details: dict[str, Any] | None
) -> dict[str, Any]:
    """A UsageInfo with every field; `reasoning_tokens` is None where no reasoning parser is on."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": details,
        "completion_tokens_details": None if reasoning_tokens is None else {"reasoning_tokens": reasoning_tokens},
    }


def without_none(value: Any) -> Any:
    """`value` without null members, at every depth (pydantic's exclude_none)."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return value


def text_logprob(token: int, logprob: float) -> dict[str, Any]:
    text = token_text(token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
