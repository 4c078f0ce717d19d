"""Settings of the simulated engine: frozen values, checked once when they are built.

Units are seconds and tokens. The defaults resemble one H200 that serves a 106 B-parameter mixture of experts (12 B active)
in FP8; the arithmetic stands beside each of them.
"""

from dataclasses import dataclass, field
from pathlib import Path

VLLM_VERSION = "0.32.0"  # whose routes, shapes and metric names are imitated


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingModel:
    """How long one engine step takes: a fixed part, prefill by tokens, decode by sequences and by the KV they read."""

    # 24 GFLOP per token for 12 B active parameters, about 400 TFLOP/s of FP8 in practice.
    prefill_tokens_per_s: float = 16_000.0
    # Reading the always-active weights at 4.8 TB/s (about 3 ms) plus launch and sampling overhead.
    step_base_s: float = 0.008
    # More sequences touch more experts: 22 ms to read all 106 GB, spread over the first 256 sequences.
    decode_per_sequence_s: float = 80e-6
    # 188 kB of KV per token of context (46 layers, 8 KV heads of 128, BF16) at 4.8 TB/s.
    decode_per_context_token_s: float = 40e-9
    # Multiplies every duration; 0 runs as fast as the CPU allows.
    scale: float = 1.0

    def __post_init__(self) -> None:
        _require(self.prefill_tokens_per_s > 0, "prefill_tokens_per_s", self.prefill_tokens_per_s, "above 0")
        for name in ("step_base_s", "decode_per_sequence_s", "decode_per_context_token_s", "scale"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")

    def step_seconds(self, *, prefill_tokens: int, decode_sequences: int, context_tokens: int) -> float:
        """Duration of a step that prefills `prefill_tokens` and decodes `decode_sequences` over `context_tokens` of KV."""
        return self.scale * (
            self.step_base_s
            + prefill_tokens / self.prefill_tokens_per_s
            + decode_sequences * self.decode_per_sequence_s
            + context_tokens * self.decode_per_context_token_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Limits of continuous batching and of the KV cache, under vLLM's names."""

    max_num_seqs: int = 256  # sequences in one batch
    max_num_batched_tokens: int = 8192  # tokens of one step; longer prefills are chunked
    max_model_len: int = 131_072  # prompt and answer together
    block_size: int = 16  # tokens of one KV block
    num_blocks: int = 16_384  # 262,144 tokens: what about 50 GB of KV memory hold at 188 kB a token
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        if self.max_model_len > self.capacity_tokens:
            # One sequence must always fit, or it would wait for ever.
            raise ValueError(
                f"max_model_len {self.max_model_len} does not fit into the KV cache of {self.num_blocks} blocks of "
                f"{self.block_size} tokens: lower --max-model-len or raise --num-gpu-blocks-override"
            )

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventSettings:
    """`--kv-events-config`, as far as it concerns a publisher on ZeroMQ."""

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = 10_000  # batches kept for replay
    hwm: int = 100_000  # ZeroMQ high-water mark of the PUB socket, messages
    max_queue_size: int = 100_000  # accepted as in vLLM; batches are sent at once here, nothing queues


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Everything the process is started with."""

    host: str = "127.0.0.1"  # vLLM listens on all addresses; a simulation has no reason to
    port: int = 8000
    model: Path | None = None  # folder with *.safetensors; None uses built-in weights
    served_model_names: tuple[str, ...] = ("simulated",)
    api_keys: tuple[str, ...] = ()
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    timing: TimingModel = field(default_factory=TimingModel)
    startup_s: float = 0.0  # before the port opens, as vLLM loads before it listens
    weights_load_s: float = 0.15  # of one reload_weights; 0.18 s were measured for 53 MB on a CPU
    answer_tokens_mean: int = 128  # natural answers are half to one and a half times as long
    reasoning_parser: bool = False
    pools: bool = False  # an embedding model: it serves /v1/embeddings and generates nothing
    responses_store: bool = False  # responses are kept and can run in the background
    prompt_tokens_details: bool = False
    request_id_headers: bool = False
    server_load_tracking: bool = False
    shutdown_timeout_s: float = 0.0
    timeout_keep_alive_s: int = 75
    kv_events: KvEventSettings | None = None

    def __post_init__(self) -> None:
        _require(bool(self.served_model_names), "served_model_names", self.served_model_names, "at least one name")
        _require(self.answer_tokens_mean >= 1, "answer_tokens_mean", self.answer_tokens_mean, "1 or more")
        for name in ("startup_s", "weights_load_s", "shutdown_timeout_s", "timeout_keep_alive_s"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value}, but must be {wanted}")
