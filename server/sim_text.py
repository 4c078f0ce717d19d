"""Tokenizer, chat template and made-up words of the simulated engine. Stateless and deterministic.

A token is an optional space and up to five other bytes, or one whitespace byte; its id is those bytes as a number behind a
leading 0x01, so ids need no vocabulary and decode exactly. About four bytes of English go into one token, as in real
tokenizers, and what the engine generates is tokenized the same way when it comes back in the next turn's prompt, so that
the prefix cache works over answers too.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

EOS_TOKEN = 0x01  # decodes to the empty string
STALE_KV_MARKER = "STALE-KV"  # the first word of an answer that read KV blocks of other weights

_TOKEN = re.compile(rb" ?\S{1,5}|\s")
_REPLACEMENT = "\ufffd".encode()
_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_ASSISTANT_TURN = "<|assistant|>\n"
_WORD = re.compile(rb" [%b][%b][%b][%b]\.?" % ((_CONSONANTS.encode(), _VOWELS.encode()) * 2))
_CUT_WORD = re.compile(rb" (?:[%b](?:[%b](?:[%b][%b]?)?)?)?" % ((_CONSONANTS.encode(), _VOWELS.encode()) * 2))


def encode(text: str) -> list[int]:
    """Token ids of `text`."""
    return [int.from_bytes(b"\x01" + piece) for piece in _TOKEN.findall(text.encode("utf-8", "replace"))]


def token_bytes(token: int) -> bytes:
    """The bytes of one token; ids that the tokenizer does not make give U+FFFD."""
    raw = token.to_bytes((token.bit_length() + 7) // 8)
    return raw[1:] if raw[:1] == b"\x01" else _REPLACEMENT


def token_text(token: int) -> str:
    """One token as text; a token that ends inside a character gives U+FFFD there, as vLLM's does."""
    return token_bytes(token).decode("utf-8", "replace")


def decode(tokens: Iterable[int]) -> str:
    return b"".join(map(token_bytes, tokens)).decode("utf-8", "replace")


def word_token(value: int, *, first: bool) -> int:
    """A pseudo-word of four letters as one token, chosen by the low bits of `value`; `first` leaves out the space."""
    letters = []
    for alphabet in (_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS):
        value, index = divmod(value, len(alphabet))
        letters.append(alphabet[index])
    stop = "." if value % 11 == 0 else ""
    return int.from_bytes(b"\x01" + f"{'' if first else ' '}{''.join(letters)}{stop}".encode())


def word_tail(tokens: Sequence[int]) -> int:
    """How many tokens at the end look like made-up words behind a space; the last one may be cut."""
    count = 0
    while count < len(tokens):
        piece = token_bytes(tokens[-1 - count])
        if not _WORD.fullmatch(piece) and (count or not _CUT_WORD.fullmatch(piece)):
            break
        count += 1
    return count


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> tuple[str, str]:
    """The prompt of a conversation, and the part of the answer it already contains.

    The second is the last message's text when `continue_final_message` is set, else empty. Tokens of both joined are
    the joined tokens of both, since the template ends each turn's head with a newline.
    """
    head = ["[gMASK]<sop>\n"]
    if tools:
        head.append(f"<|system|>\n# Tools\n{_json(list(tools))}\n")
    closed = messages[:-1] if continue_final_message else messages
    head.extend(f"<|{message['role']}|>\n{message_text(message)}\n" for message in closed)
    if continue_final_message and messages:
        head.append(f"<|{messages[-1]['role']}|>\n")
        return "".join(head), message_text(messages[-1])
    if add_generation_prompt:
        head.append(_ASSISTANT_TURN)
    return "".join(head), ""


def message_text(message: Mapping[str, Any]) -> str:
    """What a message says: its text, its text parts, or its tool calls as JSON."""
    content = message.get("content")
    if isinstance(content, str):
        text = content
    elif isinstance(content, list):
        text = "\n".join(part.get("text", "") for part in content)
    else:
        text = ""
    calls = message.get("tool_calls")
    return f"{text}{_json(calls)}" if calls else text


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
