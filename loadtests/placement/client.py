"""Clients that play scripts against a server and note when each token came."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import httpx
import msgspec

from loadtests.placement.scripts import Script
from loadtests.placement.spelling import Spelling
from protocol.headers import SESSION_ID

MODEL = "tiny-glm"
_TIMEOUT_S = 120.0
_DATA = "data: "
_DONE = "[DONE]"


class Seen(NamedTuple):
    """One request as its client saw it. Times in seconds from the beginning of the run."""

    script: str
    turn: int
    sent_at: float
    token_times: tuple[float, ...]  # of each part of the answer; usually one token
    ended_at: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    text: str

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.sent_at


class PlayFailed(Exception):
    """A request was not answered as it should be; the message says which and how."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    text: str = ""


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


class Player:
    """Sends text completions. Its clock begins with it."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    @property
    def now(self) -> float:
        return self._loop.time() - self._began

    async def ask(self, prompt: str, output_tokens: int, *, script: str = "", turn: int = 0, session: bool = False) -> Seen:
        """Exactly `output_tokens` are asked for. Raises PlayFailed."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers: Mapping[str, str] = {SESSION_ID.decode(): script} if session else {}
        sent_at = self.now
        times: list[float] = []
        parts: list[str] = []
        usage: _Usage | None = None
        try:
            async with self._client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                if response.status_code != 200:
                    raise PlayFailed(f"{script}, turn {turn}: {response.status_code} {(await response.aread()).decode()[:200]}")
                async for line in response.aiter_lines():
                    if not line.startswith(_DATA) or line.endswith(_DONE):
                        continue
                    event = msgspec.json.decode(line[len(_DATA) :], type=_Event)
                    if event.error is not None:
                        raise PlayFailed(f"{script}, turn {turn}: {event.error}")
                    usage = event.usage or usage
                    if event.choices:
                        times.append(self.now)
                        parts.append(event.choices[0].text)
        except httpx.HTTPError as error:
            raise PlayFailed(f"{script}, turn {turn}: {type(error).__name__} {error}") from error
        if usage is None or not times or usage.completion_tokens != output_tokens:
            raise PlayFailed(f"{script}, turn {turn}: {output_tokens} tokens were asked for; usage says {usage}")
        details = usage.prompt_tokens_details
        cached = (details.cached_tokens or 0) if details is not None else 0
        text = "".join(parts)
        return Seen(script, turn, sent_at, tuple(times), self.now, usage.prompt_tokens, cached, output_tokens, text)

    async def play(self, scripts: Sequence[Script], spelling: Spelling) -> list[Seen]:
        """All scripts, in the order in which requests were sent. Raises PlayFailed for the first request that fails."""
        seen: list[Seen] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                for script in scripts:
                    tasks.create_task(self._play_one(script, spelling, seen))
        except* PlayFailed as failures:
            raise _first(failures) from None
        return sorted(seen, key=lambda one: one.sent_at)

    async def _play_one(self, script: Script, spelling: Spelling, seen: list[Seen]) -> None:
        prompt = ""
        at = script.at
        for number, turn in enumerate(script.turns):
            # Spelt while nothing is due: making text takes time that requests would be late by.
            prompt += "".join([spelling.text(segment) for segment in turn.segments])
            await asyncio.sleep(max(0.0, at - self.now))
            one = await self.ask(prompt, turn.answer.tokens, script=script.id, turn=number, session=script.tells_session)
            seen.append(one)
            prompt += one.text
            if number + 1 < len(script.turns):
                at = one.ended_at + script.turns[number + 1].pause_s


@asynccontextmanager
async def player(base_url: str) -> AsyncIterator[Player]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=base_url, timeout=_TIMEOUT_S, limits=limits) as client:
        yield Player(client)


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    found: BaseException = failures
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
