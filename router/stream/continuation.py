"""The request with which another replica goes on with an answer that broke off.

What was sent becomes part of the prompt: as token ids where the client gets token ids (completions only; vLLM's chat takes
none), else as text. Bodies are those that the first engine got, of requests that `continuation_rules.py` lets pass.
"""

from typing import Any

import msgspec

from protocol.openai import Surface
from router.outcome import ContinuationOutcome
from router.request.raw_fields import RawFields, raw, read_fields, spelling, value
from router.request.tokenizing import CHAT_FIELDS, COMPLETION_FIELDS, some_of, template_values
from router.stream.continuable import NotContinuable, check_sent, needs_ids
from router.stream.memory import Sent

_COMPLETION_MAX_TOKENS = 16  # vLLM's and OpenAI's default for completions; chat has none


def continued_request(surface: Surface, body: bytes, sent: Sent, *, tokens_sent: int) -> bytes:
    """The body for the next replica. Where nothing but a role was sent it is `body` itself.

    Args:
        surface: where `body` was posted.
        body: what the first engine got.
        sent: all that the client has got, over all replicas so far.
        tokens_sent: how many tokens that is, as the engine counts (see `token_count_requests`).

    Raises:
        NotContinuable: going on could change the answer, or the answer's text would not fit together.
        ValueError: the answer is finished; `is_finished` must be asked first.
    """
    if sent.is_empty:
        return body
    fields = read_fields(body)
    check_sent(surface, fields, sent)
    if sent.finish_reason is not None or sent.is_done:
        raise ValueError("the answer is finished: there is nothing to continue")
    if surface is Surface.CHAT:
        _continue_messages(fields, sent.text)
    else:
        fields["prompt"] = _continued_prompt(fields, sent)
    _reduce_limits(surface, fields, tokens_sent)
    return msgspec.json.encode(fields)


def token_count_requests(surface: Surface, body: bytes, sent: Sent) -> tuple[bytes, bytes] | None:
    """Bodies for POST /tokenize: of the prompt, and of the prompt and what was sent.

    The difference of both answers' `count` is `tokens_sent`. None where it need not be asked (it is
    `len(sent.token_ids)`), and where it cannot be told of a finished answer (`sent.token_ids` is None then).

    Raises:
        NotContinuable: as `continued_request`; never for a finished answer.
    """
    if sent.token_ids is not None:
        return None
    fields = read_fields(body)
    if sent.finish_reason is None:
        check_sent(surface, fields, sent)
    elif not _is_countable(surface, fields, sent):
        return None
    if surface is Surface.COMPLETIONS:
        prompt = _only_prompt(fields)
        first = some_of(fields, COMPLETION_FIELDS) | {"prompt": raw(prompt)}
        return msgspec.json.encode(first), msgspec.json.encode(first | {"prompt": raw(prompt + sent.text)})
    first = some_of(fields, CHAT_FIELDS)
    if values := template_values(fields):
        first["chat_template_kwargs"] = raw(values)
    second = dict(first)
    _continue_messages(second, sent.text)
    return msgspec.json.encode(first), msgspec.json.encode(second)


def token_limit(surface: Surface, fields: RawFields) -> int | None:
    """The most tokens that an answer may have; None: only the context limits it."""
    for name in _limit_names(surface):
        if (limit := _limit(fields, name)) is not None:
            return limit
    return _COMPLETION_MAX_TOKENS if surface is Surface.COMPLETIONS else None


def _is_countable(surface: Surface, fields: RawFields, sent: Sent) -> bool:
    """Whether the text is all that was generated, and can be counted behind its prompt."""
    has_more = sent.has_reasoning or sent.has_tool_calls or not sent.is_readable
    return not has_more and (surface is Surface.CHAT or not needs_ids(fields))


def _continue_messages(fields: RawFields, text: str) -> None:
    messages = msgspec.json.decode(fields["messages"], type=list[msgspec.Raw])
    if spelling(fields, "continue_final_message") == b"true":
        messages[-1] = raw(_extended_message(msgspec.json.decode(messages[-1]), text))
    else:
        messages.append(raw({"role": "assistant", "content": text}))
    fields["messages"] = raw(messages)
    fields["add_generation_prompt"] = msgspec.Raw(b"false")
    fields["continue_final_message"] = msgspec.Raw(b"true")


def _extended_message(message: dict[str, Any], text: str) -> dict[str, Any]:
    """A message that the client had continued, with what was added since."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + text}
    *parts, part = content
    return {**message, "content": [*parts, {**part, "text": part["text"] + text}]}


def _is_listed(prompt: Any) -> bool:
    """Whether the one prompt of a completion stands in a list."""
    return isinstance(prompt, list) and not isinstance(prompt[0], int)


def _only_prompt(fields: RawFields) -> Any:
    """Text, or where the answer shows token ids, text or token ids."""
    prompt = value(fields, "prompt")
    return prompt[0] if _is_listed(prompt) else prompt


def _continued_prompt(fields: RawFields, sent: Sent) -> msgspec.Raw:
    prompt = _only_prompt(fields)
    if needs_ids(fields):
        ids = sent.prompt_token_ids if isinstance(prompt, str) else prompt
        if ids is None or sent.token_ids is None:
            raise NotContinuable(ContinuationOutcome.TOKEN_IDS)
        prompt = [*ids, *sent.token_ids]
    else:
        prompt += sent.text
    return raw([prompt] if _is_listed(value(fields, "prompt")) else prompt)


def _limit_names(surface: Surface) -> tuple[str, ...]:
    """The first that is set counts."""
    return ("max_completion_tokens", "max_tokens") if surface is Surface.CHAT else ("max_tokens",)


def _limit(fields: RawFields, name: str) -> int | None:
    limit = value(fields, name)
    return None if limit is None else int(limit)


def _reduce_limits(surface: Surface, fields: RawFields, tokens_sent: int) -> None:
    if surface is Surface.COMPLETIONS and _limit(fields, "max_tokens") is None:
        fields["max_tokens"] = raw(_COMPLETION_MAX_TOKENS)
    is_first = True
    for name in _limit_names(surface):
        limit = _limit(fields, name)
        if limit is None:
            continue
        if is_first and limit <= tokens_sent:
            raise ValueError(f"{tokens_sent} tokens were sent of {name}={limit}: there is nothing to continue")
        fields[name] = raw(max(1, limit - tokens_sent))  # the second spelling has no effect, but must be valid
        is_first = False
