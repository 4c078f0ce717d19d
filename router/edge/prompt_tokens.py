"""Token ids of prompts, asked of the engines beside the requests and kept for the next one with the same prompt.

Only an engine knows them exactly: its chat template and its tokenizer make them. To ask costs a round trip and the engine's
time, so no request waits for it, few are asked at once, and a prompt is asked for once.
"""

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from protocol.openai import Surface
from router.edge.ask import ask
from router.edge.upstream import UpstreamPool
from router.errors import UpstreamError
from router.request.tokenizing import tokens_of_prompt
from router.state.kv_blocks import block_keys

IN_FLIGHT_MAX = 4
TIMEOUT_S = 5.0
# All prompts together: 8 bytes each, and a few more for the keys of their blocks.
TOKENS_MAX = 4_000_000
ANSWER_BYTES_MAX = 16 * 1024 * 1024


class _Answer(msgspec.Struct, frozen=True):
    tokens: list[int]


_ANSWER = msgspec.json.Decoder(_Answer)


class _Known:
    __slots__ = ("block_size", "keys", "scope", "tokens")

    def __init__(self, tokens: "array[int]") -> None:
        self.tokens = tokens
        self.block_size = self.scope = 0  # of `keys`
        self.keys: Sequence[int] = ()


class PromptTokens:
    """A prompt is named by a digest of whatever its tokens depend on: its bytes, and the model."""

    def __init__(
        self,
        *,
        tasks: asyncio.TaskGroup,
        in_flight_max: int = IN_FLIGHT_MAX,
        timeout_s: float = TIMEOUT_S,
        tokens_max: int = TOKENS_MAX,
    ) -> None:
        self._tasks = tasks
        self._in_flight_max = in_flight_max
        self._timeout_s = timeout_s
        self._tokens_max = tokens_max
        self._tokens_total = 0
        self._known: OrderedDict[int, _Known] = OrderedDict()  # least recently used first
        self._asking: dict[int, asyncio.Task[None]] = {}
        # How often each has happened; they only rise.
        self.asked = 0
        self.skipped = 0  # too many were being asked for
        self.failed = 0

    def __len__(self) -> int:
        return len(self._known)

    @property
    def in_flight(self) -> int:
        return len(self._asking)

    def tokens(self, digest: int) -> Sequence[int] | None:
        known = self._known.get(digest)
        if known is None:
            return None
        self._known.move_to_end(digest)
        return known.tokens

    def keys(self, digest: int, block_size: int, scope: int = 0) -> Sequence[int]:
        """Keys of the prompt's whole KV blocks (`block_keys`); none where its tokens are not known."""
        known = self._known.get(digest)
        if known is None:
            return ()
        self._known.move_to_end(digest)
        if (known.block_size, known.scope) != (block_size, scope):
            known.keys = block_keys(known.tokens, block_size, scope)
            known.block_size, known.scope = block_size, scope
        return known.keys

    def want(self, digest: int, surface: Surface, body: bytes, pool: UpstreamPool, head: Callable[[bytes, int], bytes]) -> None:
        """Sees to it that the tokens of this prompt will be known, if that is possible. Returns at once.

        `body` is what the engine gets; `head` makes a request's head from its target and the length of its body.
        """
        if digest in self._known or digest in self._asking:
            return
        if len(self._asking) >= self._in_flight_max:
            self.skipped += 1
            return
        wanted = tokens_of_prompt(surface, body)
        if isinstance(wanted, list):
            self._keep(digest, wanted)
        elif wanted is not None:
            self.asked += 1
            asking = self._ask(digest, pool, head(b"/tokenize", len(wanted)), wanted)
            self._asking[digest] = self._tasks.create_task(asking, name=f"tokens of prompt {digest:x}")

    def close(self) -> None:
        """Asks no more."""
        for task in self._asking.values():
            task.cancel()

    async def _ask(self, digest: int, pool: UpstreamPool, head: bytes, body: bytes) -> None:
        try:
            status, answer = await ask(pool, head, body, timeout_s=self._timeout_s, bytes_max=ANSWER_BYTES_MAX)
            if status == 200:
                self._keep(digest, _ANSWER.decode(answer).tokens)
            else:
                self.failed += 1
        except (UpstreamError, msgspec.MsgspecError, UnicodeDecodeError):
            self.failed += 1
        finally:
            del self._asking[digest]

    def _keep(self, digest: int, tokens: Sequence[int]) -> None:
        if len(tokens) > self._tokens_max:
            return
        try:
            known = _Known(array("q", tokens))
        except OverflowError:
            self.failed += 1
            return
        self._known[digest] = known
        self._tokens_total += len(tokens)
        while self._tokens_total > self._tokens_max:
            _, oldest = self._known.popitem(last=False)
            self._tokens_total -= len(oldest.tokens)
