"""Which answers another replica may continue. Everything whose meaning depends on where an answer began (penalties, seeds,
grammars, ...) would change silently at the seam, so it is refused. Bodies are those that the first engine got, and valid.
"""

import enum
from collections.abc import Mapping
from typing import Any

import msgspec

from protocol.openai import Surface
from router.request.raw_fields import RawFields, read_fields, spelling, value
from router.stream.memory import Sent

_THINK_TAGS = ("<think>", "</think>")


class Reason(enum.StrEnum):
    """Why an answer cannot be continued; the label of a metric."""

    SEVERAL_CHOICES = "several_choices"  # n > 1, or several prompts
    LOGPROBS = "logprobs"
    SEED = "seed"
    PENALTIES = "penalties"  # also bad words and repetition detection: all look back over the answer's own tokens
    LOGIT_BIAS = "logit_bias"
    TOOLS = "tools"
    GRAMMAR = "grammar"
    ECHO = "echo"
    MIN_TOKENS = "min_tokens"
    REASONING = "reasoning"
    HALF_STOP = "half_stop"  # the text ends with the beginning of a stop string
    TOKEN_IDS = "token_ids"  # ids are needed and not all are known, or they say more than the text
    TRAILING_SPACE = "trailing_space"  # chat templates may strip it, and the model would write it again
    PROMPT_FORM = "prompt_form"  # nothing can be appended to a prompt of this form
    UNREADABLE = "unreadable"  # what was sent could not be understood


class NotContinuable(Exception):
    """This answer must not be continued by another replica."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(f"the answer cannot be continued: {reason.replace('_', ' ')}")
        self.reason = reason


# The spellings of a field's value under which an answer can be continued; absent and null always are among them.
_NEUTRAL: Mapping[str, tuple[Reason, frozenset[bytes]]] = {
    name: (reason, frozenset(spellings))
    for reason, names, spellings in (
        (Reason.SEVERAL_CHOICES, ("n", "best_of"), (b"1",)),
        (Reason.SEVERAL_CHOICES, ("use_beam_search",), (b"false",)),
        (Reason.LOGPROBS, ("prompt_logprobs",), ()),
        (Reason.SEED, ("seed",), ()),
        (Reason.PENALTIES, ("frequency_penalty", "presence_penalty"), (b"0", b"0.0")),
        (Reason.PENALTIES, ("repetition_penalty",), (b"1", b"1.0")),
        (Reason.PENALTIES, ("bad_words",), (b"[]",)),
        (Reason.PENALTIES, ("repetition_detection",), ()),
        (Reason.LOGIT_BIAS, ("logit_bias",), (b"{}",)),
        (Reason.TOOLS, ("tools", "functions"), (b"[]",)),
        (Reason.GRAMMAR, ("structured_outputs",), ()),
        (Reason.ECHO, ("echo",), (b"false",)),
        (Reason.MIN_TOKENS, ("min_tokens",), (b"0",)),
        (Reason.REASONING, ("include_reasoning",), (b"true",)),  # hidden reasoning would be missing from the prompt
        (Reason.PROMPT_FORM, ("prompt_embeds", "suffix", "truncate_prompt_tokens"), ()),
    )
    for name in names
}


def check_request(surface: Surface, body: bytes) -> None:
    """Whether an answer to this request could be continued at all.

    Raises:
        NotContinuable: a field of the request forbids it.
    """
    check_fields(surface, read_fields(body))


def has_one_choice(body: bytes) -> bool:
    """Whether the answer is one text, so that the first finish reason ends it."""
    fields = read_fields(body)
    try:
        for name in ("n", "best_of", "use_beam_search"):
            _check_field(fields, name)
        if "prompt" in fields:
            _only_prompt(fields)
    except NotContinuable:
        return False
    return True


def check_fields(surface: Surface, fields: RawFields) -> None:
    """`check_request` for a body that was read."""
    for name in _NEUTRAL:
        _check_field(fields, name)
    # false is chat's word for none; for completions any value is a count, 0 too.
    if spelling(fields, "logprobs") not in ((b"null", b"false") if surface is Surface.CHAT else (b"null",)):
        raise NotContinuable(Reason.LOGPROBS)
    response_format = value(fields, "response_format")
    if response_format is not None and response_format != {"type": "text"}:
        raise NotContinuable(Reason.GRAMMAR)
    check_prompt_form(surface, fields)


def check_prompt_form(surface: Surface, fields: RawFields) -> None:
    """Whether something can be appended to the prompt."""
    if surface is Surface.CHAT:
        continues = continues_message(fields)
        if (spelling(fields, "add_generation_prompt") == b"false") is not continues:
            raise NotContinuable(Reason.PROMPT_FORM)
        if continues:
            extended_message(last_message(fields), "")
    elif needs_ids(fields):
        prompt_ids(fields)
    else:
        prompt_text(fields)


def _check_field(fields: RawFields, name: str) -> None:
    reason, spellings = _NEUTRAL[name]
    written = spelling(fields, name)
    if written != b"null" and written not in spellings:
        raise NotContinuable(reason)


def check_sent(surface: Surface, fields: RawFields, sent: Sent) -> None:
    """Whether what was sent of an answer to `fields` can be gone on with."""
    if sent.has_tool_calls:
        raise NotContinuable(Reason.TOOLS)
    # A template moves thinking that it finds in a message's text; without a reasoning parser it is in there.
    if sent.has_reasoning or (surface is Surface.CHAT and any(tag in sent.text for tag in _THINK_TAGS)):
        raise NotContinuable(Reason.REASONING)
    stops = _stops(fields)
    if any(_ends_with_part(sent.text, stop) for stop in stops):
        raise NotContinuable(Reason.HALF_STOP)
    if surface is Surface.CHAT and sent.text[-1:].isspace():
        raise NotContinuable(Reason.TRAILING_SPACE)
    if needs_ids(fields):
        holds_text_back = any(len(stop) > 1 for stop in stops) and spelling(fields, "include_stop_str_in_output") != b"true"
        if sent.token_ids is None or sent.has_textless_tokens or holds_text_back:
            raise NotContinuable(Reason.TOKEN_IDS)


def _stops(fields: RawFields) -> list[str]:
    stop = value(fields, "stop")
    return [stop] if isinstance(stop, str) else list(stop or ())


def _ends_with_part(text: str, stop: str) -> bool:
    """Whether `text` ends with the beginning of `stop`, but not all of it."""
    begin = max(0, len(text) - len(stop) + 1)
    while stop and (begin := text.find(stop[0], begin)) >= 0:
        if stop.startswith(text[begin:]):
            return True
        begin += 1
    return False


def continues_message(fields: RawFields) -> bool:
    return spelling(fields, "continue_final_message") == b"true"


def needs_ids(fields: RawFields) -> bool:
    """Whether the answer goes on from token ids, or shows them."""
    if spelling(fields, "return_token_ids") not in (b"null", b"false"):
        return True
    prompt = value(fields, "prompt")
    return isinstance(prompt, list) and not all(isinstance(entry, str) for entry in prompt)


def last_message(fields: RawFields) -> dict[str, Any]:
    """The message that `continue_final_message` continues."""
    messages = msgspec.json.decode(fields["messages"], type=list[msgspec.Raw])
    message = msgspec.json.decode(messages[-1]) if messages else None
    if not isinstance(message, dict):
        raise NotContinuable(Reason.PROMPT_FORM)
    return message


def extended_message(message: dict[str, Any], text: str) -> dict[str, Any]:
    """A message that the client had continued, with what was added since."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + text}
    if isinstance(content, list) and content and isinstance(part := content[-1], dict) and isinstance(part.get("text"), str):
        return {**message, "content": [*content[:-1], {**part, "text": part["text"] + text}]}
    raise NotContinuable(Reason.PROMPT_FORM)


def prompt_text(fields: RawFields) -> str:
    """The one prompt of a completion, which must be text."""
    prompt = _only_prompt(fields)
    if not isinstance(prompt, str):
        raise NotContinuable(Reason.PROMPT_FORM)
    return prompt


def prompt_ids(fields: RawFields) -> list[int] | None:
    """The one prompt where it is token ids; None where it is text."""
    prompt = _only_prompt(fields)
    return None if isinstance(prompt, str) else prompt


def _only_prompt(fields: RawFields) -> str | list[int]:
    prompt = value(fields, "prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise NotContinuable(Reason.SEVERAL_CHOICES)
        prompt = prompt[0]
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)):
        return prompt
    raise NotContinuable(Reason.PROMPT_FORM)
