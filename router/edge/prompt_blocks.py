"""Which KV blocks a request's prompt consists of, where its tokens are known: they are asked for beside the request."""

from collections.abc import Callable, Sequence

from protocol.openai import Surface
from router.edge.prompt_tokens import PromptTokens
from router.edge.upstream import UpstreamPool
from router.state.kv_sink import PolicySink
from router.state.kv_source import KvMode
from router.state.replicas import Replica, ReplicaTable

# Shorter prompts are cheaper to compute than to ask about, and parsing longer bodies would hold up the others.
BODY_BYTES_MIN, BODY_BYTES_MAX = 1024, 256 * 1024
# Engines count these into a block beside its tokens, so the keys made of tokens alone would not be theirs.
_BESIDE_TOKENS = (
    b'"cache_salt"',
    b'"image_url"',
    b'"image_embeds"',
    b'"image_pil"',
    b'"input_audio"',
    b'"audio_url"',
    b'"audio_embeds"',
    b'"video_url"',
    b'"prompt_embeds"',
)


class PromptBlocks:
    """A prompt is named by a digest of the whole body that its engine gets."""

    def __init__(self, tokens: PromptTokens, sink: PolicySink, table: ReplicaTable) -> None:
        self.tokens = tokens
        self._sink = sink
        self._table = table

    @property
    def is_useful(self) -> bool:
        """Whether any engine's events can be relied on at present; else nobody would look at the blocks."""
        return self._sink.is_heard

    def of(self, digest: int, model: str) -> Sequence[int]:
        """Keys of the prompt's blocks; none where they are not known."""
        if self.tokens.tokens(digest) is None:
            return ()
        block_tokens = self._block_tokens(model)
        return () if block_tokens is None else self.tokens.keys(digest, block_tokens)

    def want(
        self,
        digest: int,
        surface: Surface,
        body: bytes,
        replica: Replica,
        pool: UpstreamPool,
        head: Callable[[bytes, int], bytes],
    ) -> None:
        """Sees to it that they will be known, if its replica's events can be relied on. Returns at once."""
        if not BODY_BYTES_MIN <= len(body) <= BODY_BYTES_MAX or any(name in body for name in _BESIDE_TOKENS):
            return
        modes = self._sink.modes
        if any(modes.get((replica.id, rank)) in (KvMode.LIVE, KvMode.PARTIAL) for rank in range(replica.facts.ranks)):
            self.tokens.want(digest, surface, body, pool, head)

    def close(self) -> None:
        self.tokens.close()

    def _block_tokens(self, model: str) -> int | None:
        """Tokens of a block, if they are the same on all replicas. None also where adapters may decide over KV."""
        replicas = self._table.served.get(model, ())
        sizes = {replica.facts.kv_block_tokens for replica in replicas if len(replica.models) == 1}
        return sizes.pop() if len(sizes) == 1 and all(len(replica.models) == 1 for replica in replicas) else None
