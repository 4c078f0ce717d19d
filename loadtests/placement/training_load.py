"""The load that the fit learns from: lone prompts, lone batches of decoding, and prompts that arrive where others decode."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import pairwise
from random import Random
from statistics import median

from loadtests.placement.client import Player, Seen
from loadtests.placement.fit import Observation
from loadtests.placement.scripts import Range, segment
from loadtests.placement.spelling import Spelling

# Each length once: a real engine does its first prompt of a length more slowly, and traffic seldom repeats a length.
_WARMING = 8
_PROMPTS = 60
_PROMPT_TOKENS = Range(16, 1900)
_BATCHES = (1, 2, 4, 8, 16, 24)
_CONTEXTS = (64, 600, 1200)
_DECODED = 48
_MIXED_BATCHES = (2, 8, 16)
_MIXED_PROMPTS = (100, 400, 700, 1000, 1300, 1600)
_SETTLE_S = 0.05


async def observe(player: Player, spelling: Spelling, rng: Random) -> list[Observation]:
    """About half a minute on a fast engine. Raises PlayFailed."""
    for _ in range(_WARMING):
        await _lone_prompt(player, spelling, rng)
    kinds: list[Callable[[], Awaitable[Observation]]] = [
        *[partial(_lone_prompt, player, spelling, rng)] * _PROMPTS,
        *[partial(_decode_step, player, spelling, rng, batch, context) for batch in _BATCHES for context in _CONTEXTS],
        *[partial(_mixed_step, player, spelling, rng, batch, tokens) for batch in _MIXED_BATCHES for tokens in _MIXED_PROMPTS],
    ]
    rng.shuffle(kinds)  # what disturbs the machine for a while shall not disturb one kind alone
    return [await observe_one() for observe_one in kinds]


async def _lone_prompt(player: Player, spelling: Spelling, rng: Random) -> Observation:
    """Time to the first token of a prompt that has the engine to itself: one step, and the way there and back."""
    tokens = _PROMPT_TOKENS.draw(rng)
    seen = await player.ask(spelling.text(segment(rng, tokens)), 1)
    await asyncio.sleep(_SETTLE_S)
    return Observation(seen.ttft_s, prefill_tokens=tokens, attended_pairs=float(tokens * tokens), requests=1.0)


async def _batch(player: Player, spelling: Spelling, rng: Random, batch: int, context: int, output: int) -> list[Seen]:
    prompts = [spelling.text(segment(rng, context)) for _ in range(batch)]
    return list(await asyncio.gather(*[player.ask(prompt, output) for prompt in prompts]))


async def _decode_step(player: Player, spelling: Spelling, rng: Random, batch: int, context: int) -> Observation:
    """The median step while the whole batch decodes and nothing else is done."""
    return decode_observation(await _batch(player, spelling, rng, batch, context, _DECODED), context)


def decode_observation(seen: Sequence[Seen], context: int) -> Observation:
    """Of answers that decoded together for a while, behind prompts of `context` tokens. Raises ValueError if they did not."""
    begin = max(one.token_times[0] for one in seen)
    end = min(one.token_times[-1] for one in seen)
    times = [time for time in seen[-1].token_times if begin <= time <= end]
    if len(times) < 3:
        raise ValueError(f"{len(seen)} answers had {len(times)} steps in common; the batch is too large or answers too short")
    before = sum(time < begin for time in seen[-1].token_times)
    reads = len(seen) * (context + before + len(times) / 2)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return Observation(median(gaps), sequences=len(seen), context_tokens=reads)


async def _mixed_step(player: Player, spelling: Spelling, rng: Random, batch: int, tokens: int) -> Observation:
    """The step in which a prompt is computed beside a decoding batch: the longest gap between two tokens of the batch."""
    context = _CONTEXTS[0]
    decoding = asyncio.create_task(_batch(player, spelling, rng, batch, context, 4 * _DECODED))
    prompt = spelling.text(segment(rng, tokens))
    await asyncio.sleep(0.25)
    alone = await player.ask(prompt, 1)
    return mixed_observation(await decoding, alone, context, tokens)


def mixed_observation(seen: Sequence[Seen], alone: Seen, context: int, tokens: int) -> Observation:
    """`alone`, of `tokens`, came while `seen` decoded. Raises ValueError where they had ended."""
    gaps = [
        later - earlier
        for earlier, later in pairwise(seen[0].token_times)
        if later > alone.sent_at and earlier < alone.ended_at
    ]
    if not gaps:
        raise ValueError("the batch had ended before the prompt came: its answers are too short for this engine")
    reads = len(seen) * (context + sum(time < alone.sent_at for time in seen[0].token_times))
    return Observation(
        max(gaps),
        prefill_tokens=tokens,
        sequences=len(seen),
        context_tokens=reads,
        attended_pairs=tokens * tokens,
    )
