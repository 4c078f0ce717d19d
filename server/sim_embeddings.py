"""POST /v1/embeddings of the simulated engine, in vLLM 0.32's shape: vectors of unit length, made up from text and weights."""

import base64
import hashlib
import math
import random
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from server.sim_answers import AnswerHead, usage
from server.sim_errors import ApiError
from server.sim_fields import Fields
from server.sim_generation import Emission, FinishReason, Sampling
from server.sim_requests import GenerateRequest, Prompt, SequencePlan, chat_messages, chat_prompt
from server.sim_scheduler import SequenceState
from server.sim_settings import EngineSettings
from server.sim_text import decode, encode

EMBEDDING_SIZE = 64
_ENCODINGS = ("float", "base64")


class Embedding:
    """What the scheduler gets of an embedding: no token, but a vector once the prompt is computed."""

    __slots__ = ("_is_stale", "_prompt", "_sequence_id", "vector")

    def __init__(self, sequence_id: str, prompt: Sequence[int]) -> None:
        self._sequence_id = sequence_id
        self._prompt = prompt
        self._is_stale = False
        self.vector: list[float] = []  # EMBEDDING_SIZE numbers

    def mark_stale(self) -> None:
        """The vector then fits neither the old weights nor the new ones."""
        self._is_stale = True

    def advance(self, fingerprint: bytes, *, room: int) -> Emission:
        digest = hashlib.sha256(fingerprint + array("Q", self._prompt).tobytes() + bytes([self._is_stale])).digest()
        draw = random.Random(digest)
        raw = [draw.gauss(0.0, 1.0) for _ in range(EMBEDDING_SIZE)]
        norm = math.hypot(*raw)
        # As float32, so that both encodings hold the same numbers.
        self.vector = array("f", [number / norm for number in raw]).tolist()
        return Emission(self._sequence_id, None, finish_reason=FinishReason.STOP)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingsRequest:
    generate: GenerateRequest
    as_base64: bool


def parse_embeddings(body: Mapping[str, Any], settings: EngineSettings) -> EmbeddingsRequest:
    """A request of POST /v1/embeddings: texts, token ids, or a conversation as `messages`.

    Raises:
        ApiError: with status and message as vLLM words them.
    """
    fields = Fields(body)
    encoding = fields.text("encoding_format") or "float"
    if encoding not in _ENCODINGS:
        raise fields.invalid("encoding_format", "literal_error", "Input should be 'float' or 'base64'")
    prompts = _prompts(fields)
    if (dimensions := fields.integer("dimensions")) is not None:
        message = f"Model {settings.served_model_names[0]!r} does not support Matryoshka embeddings; dimensions must be unset"
        raise ApiError.bad_value(f"{message} (received dimensions={dimensions}).")
    context = settings.scheduler.max_model_len
    for prompt in prompts:
        if len(prompt.tokens) >= context:
            message = (
                f"This model's maximum context length is {context} tokens. However, your prompt contains "
                f"{len(prompt.tokens)} input tokens. Please reduce the length of the input prompt."
            )
            raise ApiError.bad_value(message, param="input_tokens", value=len(prompt.tokens))
    sampling = Sampling(max_tokens=1)
    plans = (SequencePlan(index=index, prompt=prompt, sampling=sampling) for index, prompt in enumerate(prompts))
    generate = GenerateRequest(
        sequences=tuple(plans),
        prompt_count=len(prompts),
        stream=False,
        include_usage=False,
        continuous_usage=False,
        top_logprobs=None,
        salt=None,
        request_id=fields.text("request_id"),
        echo=False,
        return_token_ids=False,
    )
    return EmbeddingsRequest(generate=generate, as_base64=encoding == "base64")


class EmbeddingsAnswer:
    opens_at_once = False

    def __init__(self, request: EmbeddingsRequest, head: AnswerHead, sequences: Sequence[SequenceState]) -> None:
        self._as_base64 = request.as_base64
        self._head = head
        self._sequences = sequences

    def opening(self) -> list[bytes]:
        return []

    def add(self, emission: Emission) -> list[bytes]:
        return []

    def closing(self) -> list[bytes]:
        return []

    def failed(self, error: ApiError) -> None:
        return None

    def whole(self) -> bytes:
        body = {
            "id": self._head.id,
            "object": "list",
            "created": self._head.created,
            "model": self._head.model,
            "data": [self._entry(index, sequence) for index, sequence in enumerate(self._sequences)],
            "usage": usage(
                0,
                prompt_tokens=sum(sequence.prompt_tokens for sequence in self._sequences),
                reasoning_tokens=None,
                details=None,
            ),
        }
        return msgspec.json.encode(body)

    def _entry(self, index: int, sequence: SequenceState) -> dict[str, Any]:
        embedding = sequence.generation
        assert isinstance(embedding, Embedding)
        vector: Any = embedding.vector
        if self._as_base64:
            vector = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        return {"index": index, "object": "embedding", "embedding": vector}


def _prompts(fields: Fields) -> list[Prompt]:
    if fields.raw("messages") is not None:
        conversation = Fields({"add_generation_prompt": False, "messages": fields.raw("messages")})
        return [chat_prompt(conversation, chat_messages(conversation), ())[0]]
    given = fields.raw("input")
    if given is None:
        raise fields.invalid("input", "missing", "Field required")
    entries = [given] if isinstance(given, str) or _is_ids(given) else given
    if not isinstance(entries, list) or not entries:
        raise ApiError.bad_value("You must pass at least one prompt")
    prompts = []
    for entry in entries:
        if isinstance(entry, str):
            prompts.append(Prompt(encode(entry), entry))
        elif _is_ids(entry):
            prompts.append(Prompt(entry, decode(entry)))
        else:
            raise fields.invalid("input", "string_type", "Input should be a valid string")
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and 0 <= item < 2**63 for item in value)
