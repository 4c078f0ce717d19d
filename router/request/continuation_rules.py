"""Which requests' answers another replica may continue, judged before anything is sent. What was sent is judged when it is
known (`router/stream/continuable.py`).
"""

import re
from typing import Any

import msgspec
from msgspec import Raw

from router.outcome import ContinuationOutcome
from router.request.raw_fields import UNREADABLE
from router.request.schema import ABSENT, ChatFields, CompletionFields, OpenAIFields

_NOTHING = (b"null", b"{}", b"[]")
_QUOTE, _BRACKET = ord('"'), ord("[")
_TOKEN_IDS = re.compile(rb"\[\s*\d")


def never_continues(fields: OpenAIFields) -> ContinuationOutcome | None:
    """Why another replica could not go on where a stream breaks off; None if it could."""
    if (fields.n or 1) > 1 or (fields.best_of or 1) > 1 or fields.use_beam_search:
        return ContinuationOutcome.SEVERAL_CHOICES
    if fields.prompt_logprobs is not None or (fields.logprob_token_ids is not ABSENT and _is_given(fields.logprob_token_ids)):
        return ContinuationOutcome.LOGPROBS
    if fields.seed is not None:
        return ContinuationOutcome.SEED
    if fields.presence_penalty or fields.frequency_penalty or (fields.repetition_penalty or 1.0) != 1.0:
        return ContinuationOutcome.PENALTIES
    if fields.bad_words or (fields.repetition_detection is not ABSENT and _is_given(fields.repetition_detection)):
        return ContinuationOutcome.PENALTIES
    if fields.logit_bias is not ABSENT and _is_given(fields.logit_bias):
        return ContinuationOutcome.LOGIT_BIAS
    if fields.tools is not ABSENT and _is_given(fields.tools):
        return ContinuationOutcome.TOOLS
    if fields.structured_outputs is not ABSENT and _is_given(fields.structured_outputs):
        return ContinuationOutcome.GRAMMAR
    if fields.response_format is not ABSENT and _constrains(fields.response_format):
        return ContinuationOutcome.GRAMMAR
    if fields.echo:
        return ContinuationOutcome.ECHO
    if fields.min_tokens:
        return ContinuationOutcome.MIN_TOKENS
    if fields.truncate_prompt_tokens is not None:
        return ContinuationOutcome.PROMPT_FORM
    if isinstance(fields, ChatFields):
        return _chat_never_continues(fields)
    if isinstance(fields, CompletionFields):
        return _completion_never_continues(fields)
    return ContinuationOutcome.SURFACE


def _is_given(raw: Raw) -> bool:
    """Whether a field that is there says anything. That it is there is asked first, without a call: it hardly ever is."""
    return bytes(memoryview(raw)[:5]) not in _NOTHING


class _ResponseFormat(msgspec.Struct, gc=False):
    type: Any = None


def _constrains(response_format: Raw) -> bool:
    try:
        chosen = msgspec.json.decode(response_format, type=_ResponseFormat | None)
    except UNREADABLE:
        return True
    return chosen is not None and chosen.type != "text"


def _chat_never_continues(fields: ChatFields) -> ContinuationOutcome | None:
    if fields.logprobs:
        return ContinuationOutcome.LOGPROBS
    if fields.include_reasoning is False:  # what is hidden would be missing from the prompt
        return ContinuationOutcome.REASONING
    if fields.continue_final_message:  # what was sent joins the message that the client began
        if fields.add_generation_prompt is not False or not _ends_with_text(fields):
            return ContinuationOutcome.PROMPT_FORM
    elif fields.add_generation_prompt is False:  # the prompt opens no answer
        return ContinuationOutcome.PROMPT_FORM
    return None


class _Part(msgspec.Struct, gc=False):
    text: str | None = None


def _ends_with_text(fields: ChatFields) -> bool:
    """Whether the last message's content is text, or its last part is."""
    content = fields.messages[-1].content if fields.messages else ABSENT
    if memoryview(content)[0] == _QUOTE:
        return True
    try:
        parts = msgspec.json.decode(content, type=list[_Part] | None)
    except UNREADABLE:
        return False
    return parts is not None and len(parts) > 0 and parts[-1].text is not None


def prompts_in(fields: OpenAIFields) -> int:
    """Each of a list of prompts gets its own answers."""
    return len(_prompts(fields)) if isinstance(fields, CompletionFields) else 1


def _prompts(fields: CompletionFields) -> list[Raw]:
    prompt = memoryview(fields.prompt)
    if prompt[0] == _BRACKET and not _TOKEN_IDS.match(prompt):
        return msgspec.json.decode(prompt, type=list[Raw])
    return [fields.prompt]


def _completion_never_continues(fields: CompletionFields) -> ContinuationOutcome | None:
    if fields.logprobs is not None:  # 0 asks for the chosen token's
        return ContinuationOutcome.LOGPROBS
    if fields.suffix is not None:
        return ContinuationOutcome.PROMPT_FORM
    prompts = _prompts(fields)
    if len(prompts) > 1:
        return ContinuationOutcome.SEVERAL_CHOICES
    prompt = memoryview(prompts[0] if prompts else ABSENT)
    if prompt[0] == _QUOTE:
        return None
    if _TOKEN_IDS.match(prompt):
        return None if fields.return_token_ids else ContinuationOutcome.TOKEN_IDS
    return ContinuationOutcome.PROMPT_FORM
