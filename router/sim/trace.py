"""Recorded traffic as a workload: a file of one JSON object per line, in our shape or in Mooncake's.

Ours: `t` (seconds), `prompt` (text) or `blocks` (chained hashes of its whole KV blocks of 16 tokens), `output_tokens`, and
optionally `prompt_tokens`, `session`, `tenant`, `priority`, `model`, `max_tokens`. Mooncake's: `timestamp` (milliseconds),
`input_length`, `output_length`, `hash_ids` (one for each 512 tokens).

A router's decision log is such a file, too: with `block_bytes` its `blocks` are the hashes of a prompt's chunks (see
router.policy.prompt), and requests whose answer was not counted are left out. A model's prompts all get the same number of
bytes per token, their mean.

A trace does not hold the text of answers, so nothing is found of them when a conversation goes on.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from router.policy.interface import Priority
from router.policy.prompt import FIRST_BYTES, BytesPrompt, Prompt, bytes_of
from router.sim.logged_prompts import LoggedPrompt
from router.sim.prompts import BLOCK_TOKENS, CHAT_BYTES_PER_TOKEN, Segment, SimPrompt, answer_blocks
from router.sim.request import SimRequest
from router.sim.trace_lines import Line, TraceError, lines_of

TEXT_BYTES_PER_TOKEN = 4
MOONCAKE_TOKENS = 512
MODEL_DEFAULT = "sim"

_OURS = {
    *("t", "prompt", "blocks", "output_tokens"),
    *("prompt_tokens", "session", "tenant", "priority", "model", "max_tokens"),
}
# What a decision log says besides, of how it went then.
_DECIDED = {
    *("block_bytes", "prompt_bytes", "prompt_hash"),
    *("request_id", "outcome", "replica", "attempts", "waited_s", "predicted_s", "ttft_s", "cached_tokens"),
}
_MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")


class TraceRow(NamedTuple):
    """One request of a trace; `t` counts from the first one."""

    t: float
    prompt: Prompt
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    answer_blocks: Sequence[int]
    session: str = ""
    tenant: str = ""
    priority: Priority = Priority.DEFAULT
    model: str = MODEL_DEFAULT
    output_max: int | None = None


class TraceWorkload:
    """Plays `rows`, `speed` times as fast as they were recorded, until `horizon_s`. Clients send their session as affinity."""

    def __init__(
        self, name: str, rows: Sequence[TraceRow], *, ttft_target_s: float, speed: float = 1.0, horizon_s: float | None = None
    ) -> None:
        self.name = name
        self._rows = rows
        self._ttft_target_s = ttft_target_s
        self._speed = speed
        # Just behind the last arrival, which is to be played too.
        self.horizon_s = math.nextafter(rows[-1].t / speed, math.inf) if horizon_s is None else horizon_s

    def initial(self, rng: Random) -> Iterable[SimRequest]:
        turns: dict[str, int] = {}
        for number, row in enumerate(self._rows):
            at = row.t / self._speed
            if at >= self.horizon_s:
                return
            turn = turns.get(row.session, 0)
            if row.session:
                turns[row.session] = turn + 1
            yield SimRequest(
                number,
                arrives_at=at,
                model=row.model,
                prompt=row.prompt,
                prompt_tokens=row.prompt_tokens,
                output_tokens=row.output_tokens,
                blocks=row.blocks,
                answer_blocks=row.answer_blocks,
                tenant=row.tenant,
                session=row.session,
                turn=turn,
                affinity=row.session or None,
                priority=row.priority,
                output_max=row.output_max,
                ttft_target_s=self._ttft_target_s,
            )

    def follow_up(self, request: SimRequest, now: float, rng: Random) -> Sequence[SimRequest]:
        return ()


def read_trace(path: Path) -> list[TraceRow]:
    """The requests of a file in the order of their arrival, the first at 0. Raises TraceError."""
    lines = [line for line in lines_of(path) if not _is_uncounted(line)]
    bytes_per_token = _bytes_per_token(lines)
    rows = [_mooncake(line) if "hash_ids" in line.fields else _ours(line, bytes_per_token) for line in lines]
    if not rows:
        raise TraceError(
            f"{path}: has no requests; write one JSON object per line, with t, prompt or blocks, and output_tokens"
        )
    rows.sort(key=lambda row: row.t)
    begin = rows[0].t
    return [row._replace(t=row.t - begin) for row in rows]


def _is_uncounted(line: Line) -> bool:
    """Whether it is a decision log's line of a request that failed: nobody knows how long its answer would have been."""
    return "outcome" in line.fields and not line.fields.get("output_tokens")


def _bytes_per_token(lines: Iterable[Line]) -> Mapping[str, float]:
    """Of each model's prompts that are given by their chunks."""
    sums: dict[str, tuple[int, int]] = {}
    for line in lines:
        if "block_bytes" in line.fields and (tokens := line.optional_tokens("prompt_tokens")) is not None:
            model = line.text("model", MODEL_DEFAULT)
            all_bytes, all_tokens = sums.get(model, (0, 0))
            sums[model] = (all_bytes + line.size("prompt_bytes"), all_tokens + tokens)
    return {model: max(1.0, all_bytes / all_tokens) for model, (all_bytes, all_tokens) in sums.items()}


def _ours(line: Line, bytes_per_token: Mapping[str, float]) -> TraceRow:
    for field in line.fields:
        if field not in _OURS and field not in _DECIDED:
            raise line.error(field, f"there is no such field; fields are {', '.join(sorted(_OURS))}")
    if ("prompt" in line.fields) is ("blocks" in line.fields):
        raise line.error("prompt", "give either prompt (text) or blocks (hashes)")
    t, output_tokens = line.seconds("t"), line.tokens("output_tokens")
    model = line.text("model", MODEL_DEFAULT)
    tenant = line.text("tenant", "")
    scope = xxh3_64_intdigest(model.encode())
    answer = Segment(xxh3_64_intdigest(f"{line.number} {t}".encode(), scope), output_tokens)
    if "prompt" in line.fields:
        prompt, blocks, prompt_tokens, generated = _from_text(line, scope, answer)
    elif "block_bytes" in line.fields:
        per_token = bytes_per_token.get(model, TEXT_BYTES_PER_TOKEN)
        prompt, blocks, prompt_tokens, generated = _from_chunks(line, scope, answer, per_token)
    else:
        prompt, blocks, prompt_tokens, generated = _from_blocks(line, scope, answer)
    return TraceRow(
        t=t,
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        blocks=blocks,
        answer_blocks=generated,
        session=line.text("session", ""),
        tenant=tenant,
        priority=_priority(line),
        model=model,
        output_max=line.optional_tokens("max_tokens"),
    )


def _priority(line: Line) -> Priority:
    try:
        return Priority(line.text("priority", Priority.DEFAULT))
    except ValueError:
        raise line.error("priority", f"give one of {', '.join(Priority)}") from None


_Prompt = tuple[Prompt, Sequence[int], int, Sequence[int]]  # with blocks, tokens, and the blocks of the answer


def _from_text(line: Line, scope: int, answer: Segment) -> _Prompt:
    """Tokens are taken for four bytes each."""
    text = line.text("prompt", "").encode()
    if not text:
        raise line.error("prompt", "give its text, one character at least")
    if "prompt_tokens" in line.fields:
        raise line.error(
            "prompt_tokens", f"a prompt given as text counts a token for {TEXT_BYTES_PER_TOKEN} bytes; leave it out"
        )
    tokens = -(-len(text) // TEXT_BYTES_PER_TOKEN)
    block_bytes = BLOCK_TOKENS * TEXT_BYTES_PER_TOKEN
    blocks: list[int] = []
    digest = scope
    for number in range(tokens // BLOCK_TOKENS):
        digest = xxh3_64_intdigest(text[number * block_bytes : (number + 1) * block_bytes], digest)
        blocks.append(digest)
    # The answer's blocks begin behind the last whole one; nothing else can hold their content, whatever it is.
    rest = Segment(xxh3_64_intdigest(text, scope), tokens % BLOCK_TOKENS)
    behind = SimPrompt.empty(TEXT_BYTES_PER_TOKEN, digest).extended(rest)
    return BytesPrompt(text, scope), blocks, tokens, answer_blocks(behind, answer)


def _from_blocks(line: Line, scope: int, answer: Segment) -> _Prompt:
    hashes = line.hashes("blocks")
    whole = len(hashes) * BLOCK_TOKENS
    tokens = line.optional_tokens("prompt_tokens") or whole
    if not whole <= tokens < whole + BLOCK_TOKENS or tokens == 0:
        name = "prompt_tokens" if "prompt_tokens" in line.fields else "blocks"
        raise line.error(name, f"{len(hashes)} whole blocks of {BLOCK_TOKENS} tokens do not make such a prompt")
    segments = [Segment(number, BLOCK_TOKENS) for number in hashes]
    rest = Segment(answer.id ^ 1, tokens - whole)
    prompt = SimPrompt.empty(CHAT_BYTES_PER_TOKEN, scope).extended(*segments, rest)
    return prompt, prompt.blocks, tokens, answer_blocks(prompt, answer)


def _from_chunks(line: Line, scope: int, answer: Segment, bytes_per_token: float) -> _Prompt:
    if line.fields["block_bytes"] != FIRST_BYTES:
        raise line.error("block_bytes", f"give {FIRST_BYTES}, the only grid there is, or leave it out for blocks of tokens")
    chunks, size = line.hashes("blocks"), line.size("prompt_bytes")
    if not bytes_of(len(chunks)) <= size < bytes_of(len(chunks) + 1):
        raise line.error(
            "prompt_bytes",
            f"a prompt of {len(chunks)} chunks has at least {bytes_of(len(chunks))} bytes, and less than one chunk more",
        )
    told = line.fields.get("prompt_hash")
    whole = xxh3_64_intdigest(str(answer.id if told is None else told).encode(), scope)
    prompt = LoggedPrompt(chunks, size, whole)
    tokens = line.optional_tokens("prompt_tokens") or max(1, round(size / bytes_per_token))
    blocks = prompt.blocks(tokens, bytes_per_token)
    # The answer's blocks begin behind the last whole one; nothing else can hold their content, whatever it is.
    behind = SimPrompt.empty(CHAT_BYTES_PER_TOKEN, answer.id).extended(Segment(whole, tokens % BLOCK_TOKENS))
    return prompt, blocks, tokens, answer_blocks(behind, answer)


def _mooncake(line: Line) -> TraceRow:
    for field in _MOONCAKE:
        if field not in line.fields:
            raise line.error(field, f"lines with hash_ids have {', '.join(_MOONCAKE)}")
    t = line.seconds("timestamp") / 1000
    tokens, output_tokens = line.tokens("input_length"), line.tokens("output_length")
    hashes = line.hashes("hash_ids")
    needed = -(-tokens // MOONCAKE_TOKENS)
    if len(hashes) != needed:
        raise line.error(
            "hash_ids", f"{tokens} tokens need {needed} ids, one for each {MOONCAKE_TOKENS} tokens; it has {len(hashes)}"
        )
    lengths = [MOONCAKE_TOKENS] * (needed - 1) + [tokens - (needed - 1) * MOONCAKE_TOKENS]
    prompt = SimPrompt.empty(CHAT_BYTES_PER_TOKEN).extended(*map(Segment, hashes, lengths))
    answer = Segment(xxh3_64_intdigest(f"{line.number} {t}".encode()), output_tokens)
    return TraceRow(t, prompt, tokens, output_tokens, prompt.blocks, answer_blocks(prompt, answer))
