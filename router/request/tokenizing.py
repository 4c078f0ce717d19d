"""What /tokenize is asked for the tokens of a request's prompt."""

from typing import Any

import msgspec

from protocol.openai import Surface
from router.request.raw_fields import UNREADABLE, RawFields, raw, read_fields, value

# What /tokenize takes of a request, beside the prompt of completions and the template's values.
COMPLETION_FIELDS = ("model", "add_special_tokens")
CHAT_FIELDS = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "media_io_kwargs",
    "mm_processor_kwargs",
)


def tokens_of_prompt(surface: Surface, body: bytes) -> list[int] | bytes | None:
    """The tokens, where they stand in `body` (as an engine gets it); else what to post to /tokenize for them.

    None where neither is possible: another surface, several prompts, or what is no request.
    """
    try:
        if surface is Surface.CHAT:
            return _of_chat(read_fields(body))
        if surface is Surface.COMPLETIONS:
            return _of_completion(read_fields(body))
    except UNREADABLE:
        pass
    return None


def _of_chat(fields: RawFields) -> bytes | None:
    if "messages" not in fields:
        return None
    asked = some_of(fields, CHAT_FIELDS)
    if values := template_values(fields):
        asked["chat_template_kwargs"] = raw(values)
    return msgspec.json.encode(asked)


def _of_completion(fields: RawFields) -> list[int] | bytes | None:
    prompt = value(fields, "prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        [prompt] = prompt
    if isinstance(prompt, str):
        return msgspec.json.encode(some_of(fields, COMPLETION_FIELDS) | {"prompt": raw(prompt)})
    return prompt if isinstance(prompt, list) and all(type(token) is int for token in prompt) else None


def some_of(fields: RawFields, names: tuple[str, ...]) -> RawFields:
    """Those of the fields that are there."""
    return {name: fields[name] for name in names if name in fields}


def template_values(fields: RawFields) -> dict[str, Any]:
    """What a chat template gets: /tokenize knows only chat_template_kwargs, into which vLLM's chat puts these as well."""
    values: dict[str, Any] = dict(value(fields, "chat_template_kwargs") or {})
    effort = value(fields, "reasoning_effort")
    if effort is not None:
        values.setdefault("enable_thinking", effort != "none")
        values.setdefault("reasoning_effort", effort)
    if (documents := value(fields, "documents")) is not None:
        values.setdefault("documents", documents)
    return values
