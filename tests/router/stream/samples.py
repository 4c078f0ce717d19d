"""Streams in the shapes of the simulated engine, from given token texts, and what a client reads from them."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from server.sim_answers import AnswerHead
from server.sim_chat_answer import ChatAnswer
from server.sim_completion_answer import CompletionAnswer
from server.sim_generation import Emission, FinishReason, Generation
from server.sim_requests import GenerateRequest, parse_chat, parse_completion
from server.sim_scheduler import SequenceState
from server.sim_settings import EngineSettings

DONE = b"data: [DONE]\n\n"


def event(payload: object) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def events_of(stream: Iterable[bytes]) -> list[dict[str, Any]]:
    """The JSON of every chunk; comments and [DONE] are left out."""
    lines = b"".join(stream).split(b"\n\n")
    return [msgspec.json.decode(line[6:]) for line in lines if line.startswith(b"data: {")]


def text_of(stream: Iterable[bytes]) -> str:
    choices = [choice for chunk in events_of(stream) for choice in chunk["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def chat_stream(texts: Sequence[str], *, with_ids: bool = False, usage: bool = True) -> list[bytes]:
    """An uninterrupted answer: the role, one event for each of `texts`, the finish chunk, usage, [DONE]."""
    body = {"messages": [{"role": "user", "content": "Hello there"}], **_options(with_ids=with_ids, usage=usage)}
    request = parse_chat(body, EngineSettings())
    sequence = _sequence(request.generate)
    return _run(ChatAnswer(request, _head(), [sequence]), sequence, texts)


def completion_stream(texts: Sequence[str], *, with_ids: bool = False, usage: bool = True) -> list[bytes]:
    """An uninterrupted answer: one event for each of `texts`, the finish chunk, usage, [DONE]."""
    request = parse_completion({"prompt": "Hello there", **_options(with_ids=with_ids, usage=usage)}, EngineSettings())
    sequence = _sequence(request.generate)
    return _run(CompletionAnswer(request, _head(), [sequence]), sequence, texts)


def _options(*, with_ids: bool, usage: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"stream": True, "return_token_ids": with_ids}
    return {**options, "stream_options": {"include_usage": True, "continuous_usage_stats": True}} if usage else options


def _head() -> AnswerHead:
    return AnswerHead(
        id="answer-1",
        created=1_753_800_000,
        model="simulated",
        fingerprint="vllm-0.32.0-00000000",
        prompt_tokens_details=True,
        reasoning_details=False,
    )


def _sequence(request: GenerateRequest) -> SequenceState:
    plan = request.sequences[0]
    generation = Generation("answer-1/0", plan.prompt.tokens, answered=0, sampling=plan.sampling)
    sequence = SequenceState("answer-1/0", plan.prompt.tokens, generation, arrived_at=0.0)
    sequence.cached_tokens = 1
    return sequence


def _run(answer: ChatAnswer | CompletionAnswer, sequence: SequenceState, texts: Sequence[str]) -> list[bytes]:
    events = answer.opening()
    for number, text in enumerate(texts):
        events += answer.add(Emission(sequence.id, 1000 + number, text))
    events += answer.add(Emission(sequence.id, 1, "", finish_reason=FinishReason.STOP))
    return events + answer.closing()
