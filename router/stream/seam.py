"""Makes one stream of the events of several replicas, and ends one that lacks only its end."""

import re
from typing import Any

import msgspec

from protocol.openai import Surface
from protocol.sse import DONE, data_of, event, split
from router.outcome import ContinuationOutcome
from router.request.raw_fields import UNREADABLE, RawFields, raw, read_fields, value
from router.stream.continuable import NotContinuable
from router.stream.continuation import token_limit
from router.stream.memory import Sent

# Inside a JSON string a quote is escaped, so none of these can be part of what a model wrote.
_REASONING = re.compile(rb'"reasoning(?:_content)?":"[^"]')
_PROMPT_IDS = b'"prompt_token_ids":['
_ROLE = b'"role":"'


class SeamRewriter:
    """Turns the events of the next replica into those of the stream that its client knows. One per replica."""

    __slots__ = ("_is_marked", "_seams", "_sent", "_tokens_sent")

    def __init__(self, sent: Sent, *, tokens_sent: int, seams: int) -> None:
        """`sent` is what the client got before, in all, and `tokens_sent` how many tokens that is.

        `seams` is how often this answer has been continued, this time included; 0 leaves the mark out.
        """
        self._sent = sent
        self._tokens_sent = tokens_sent
        self._seams = seams
        self._is_marked = seams == 0

    def rewrite(self, block: bytes) -> bytes:
        """`block` is whole events. What is no chunk (comments, errors, [DONE]) passes unchanged.

        Raises:
            NotContinuable: the replica reasons anew, after text was sent.
        """
        return b"".join([self._rewrite(one) for one in split(block)])

    def _rewrite(self, one: bytes) -> bytes:
        payload = data_of(one)
        if payload is None or (fields := _chunk_fields(payload)) is None:
            return one
        if self._sent.text and _REASONING.search(payload):
            raise NotContinuable(ContinuationOutcome.REASONING)
        if (self._sent.has_role and _ROLE in payload) or (self._sent.prompt_token_ids is not None and _PROMPT_IDS in payload):
            if _is_role_only(fields):
                return b""
            _drop_repeated(fields)
        if self._sent.id:
            fields["id"] = raw(self._sent.id)
            fields["created"] = raw(self._sent.created)
            fields["model"] = raw(self._sent.model)
        if (usage := value(fields, "usage")) is not None:
            fields["usage"] = raw(_moved_usage(usage, self._tokens_sent))
        if not self._is_marked:
            self._is_marked = True
            fields["intellect"] = raw({"continuations": self._seams})
        return event(msgspec.json.encode(fields))


def is_finished(body: bytes, sent: Sent, tokens_sent: int | None, *, prompt_tokens: int | None = None) -> bytes | None:
    """The events that end an answer of which nothing but its end is missing; None if there is more to generate.

    `tokens_sent` and `prompt_tokens` are the lengths of what was sent and of the prompt in tokens, where they are known.
    Without them, and without token ids or usage in the stream, the usage that was asked for is left out.
    """
    if sent.is_done:
        return b""
    if not sent.is_readable:
        return None
    fields = read_fields(body)
    surface = Surface.CHAT if "messages" in fields else Surface.COMPLETIONS
    events = []
    if sent.finish_reason is None:
        limit = token_limit(surface, fields)
        if sent.is_empty or limit is None or tokens_sent is None or tokens_sent < limit:
            return None
        events.append(_finish_chunk(surface, sent))
    if not sent.has_usage_chunk and _asks_usage(fields) and (usage := _usage(sent, tokens_sent, prompt_tokens)) is not None:
        events.append(event(msgspec.json.encode({**_head(surface, sent), "choices": [], "usage": usage})))
    return b"".join([*events, DONE])


def _chunk_fields(payload: bytes) -> RawFields | None:
    try:
        fields = read_fields(payload)
    except UNREADABLE:
        return None
    return fields if "choices" in fields else None


def _is_role_only(fields: RawFields) -> bool:
    choices = value(fields, "choices")
    return bool(choices) and not any(_says_more_than_role(choice) for choice in choices)


def _says_more_than_role(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None or choice.get("finish_reason") is not None or choice.get("token_ids"):
        return True
    return any(said for name, said in delta.items() if name != "role")


def _drop_repeated(fields: RawFields) -> None:
    """Takes out of a chunk what belongs to the beginning of a stream only."""
    fields.pop("prompt_text", None)
    fields.pop("prompt_token_ids", None)
    choices = value(fields, "choices")
    for choice in choices:
        choice.get("delta", {}).pop("role", None)
        if "prompt_token_ids" in choice:
            choice["prompt_token_ids"] = None  # as in every later chunk of a text completion
    fields["choices"] = raw(choices)


def _moved_usage(usage: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Counts as completion what this replica got as prompt and the client as completion."""
    prompt_tokens = usage["prompt_tokens"] - tokens
    usage = {**usage, "prompt_tokens": prompt_tokens, "completion_tokens": (usage.get("completion_tokens") or 0) + tokens}
    details = usage.get("prompt_tokens_details")
    if details is not None and details.get("cached_tokens") is not None:
        usage["prompt_tokens_details"] = {**details, "cached_tokens": min(details["cached_tokens"], prompt_tokens)}
    return usage


def _asks_usage(fields: RawFields) -> bool:
    options = value(fields, "stream_options")
    return options is not None and options.get("include_usage") is True


def _usage(sent: Sent, tokens_sent: int | None, prompt_tokens: int | None) -> dict[str, Any] | None:
    if sent.usage is not None:  # in every chunk, so in the last
        return sent.usage
    if prompt_tokens is None and sent.prompt_token_ids is not None:
        prompt_tokens = len(sent.prompt_token_ids)
    if sent.token_ids is not None:
        tokens_sent = len(sent.token_ids)
    if prompt_tokens is None or tokens_sent is None:
        return None
    # An end-of-sequence token is generated and has no text.
    has_hidden_end = sent.token_ids is None and sent.finish_reason == "stop" and sent.stop_reason is None
    completion_tokens = tokens_sent + has_hidden_end
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def _head(surface: Surface, sent: Sent) -> dict[str, Any]:
    kind = "chat.completion.chunk" if surface is Surface.CHAT else "text_completion"
    return {"id": sent.id, "object": kind, "created": sent.created, "model": sent.model}


def _finish_chunk(surface: Surface, sent: Sent) -> bytes:
    said: dict[str, Any] = {"delta": {"content": ""}} if surface is Surface.CHAT else {"text": ""}
    choice = {"index": 0, **said, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    return event(msgspec.json.encode({**_head(surface, sent), "choices": [choice]}))
