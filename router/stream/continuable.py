"""Which answers another replica may go on with, judged by what was sent of them. Their requests were judged before
(`router/request/continuation_rules.py`), and are valid: the first engine took them.
"""

from protocol.openai import Surface
from router.outcome import ContinuationOutcome
from router.request.raw_fields import RawFields, spelling, value
from router.stream.memory import Sent

_THINK_TAGS = ("<think>", "</think>")


class NotContinuable(Exception):
    """This answer must not be continued by another replica."""

    def __init__(self, reason: ContinuationOutcome) -> None:
        super().__init__(f"the answer cannot be continued: {reason.replace('_', ' ')}")
        self.reason = reason


def check_sent(surface: Surface, fields: RawFields, sent: Sent) -> None:
    """Whether what was sent of an answer to `fields` can be gone on with. Raises NotContinuable."""
    if not sent.is_readable:
        raise NotContinuable(ContinuationOutcome.UNREADABLE)
    if sent.has_tool_calls:
        raise NotContinuable(ContinuationOutcome.TOOLS)
    # A template moves thinking that it finds in a message's text; without a reasoning parser it is in there.
    if sent.has_reasoning or (surface is Surface.CHAT and any(tag in sent.text for tag in _THINK_TAGS)):
        raise NotContinuable(ContinuationOutcome.REASONING)
    stops = _stops(fields)
    if any(_ends_with_part(sent.text, stop) for stop in stops):
        raise NotContinuable(ContinuationOutcome.HALF_STOP)
    if surface is Surface.CHAT and sent.text[-1:].isspace():
        raise NotContinuable(ContinuationOutcome.TRAILING_SPACE)
    if needs_ids(fields):
        holds_text_back = any(len(stop) > 1 for stop in stops) and spelling(fields, "include_stop_str_in_output") != b"true"
        if sent.token_ids is None or sent.has_textless_tokens or holds_text_back:
            raise NotContinuable(ContinuationOutcome.TOKEN_IDS)


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


def needs_ids(fields: RawFields) -> bool:
    """Whether the answer goes on from token ids, or shows them. Prompts of token ids are only continued where it shows them."""
    return spelling(fields, "return_token_ids") not in (b"null", b"false")
