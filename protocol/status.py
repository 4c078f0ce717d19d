"""What a replica's agent says about itself, and what a checkpoint swap did. The router reads both over HTTP."""

import enum

import msgspec

BASE_VERSION = "base"  # the version served before any swap


class ReplicaState(enum.StrEnum):
    STARTING = "starting"  # the engine is loading, or restarting after a crash
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    SWAPPING = "swapping"  # paused for a checkpoint: alive, and requests sent to it wait
    FAILED = "failed"  # the agent has given up restarting the engine


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the agent's `GET /status`. A measurement that is not known is null, never zero."""

    state: ReplicaState
    engine_url: str
    model: str
    checkpoint: str = BASE_VERSION
    epoch: int = 0  # successful swaps since the engine's first start; never falls while the agent lives
    reason: str | None = None  # why the state is not `ready`, for people
    paused: bool = False  # frozen for a swap: silent with good reason, whatever the state
    max_model_len: int | None = None  # tokens
    kv_capacity_tokens: int | None = None
    kv_block_size: int | None = None  # tokens
    expert_parallel_group: str | None = None  # replicas of one group fail together
    expert_parallel_rank: int | None = None
    kv_events_endpoint: str | None = None
    engine_pid: int | None = None
    engine_restarts: int = 0


class SwapOutcome(enum.StrEnum):
    SWAPPED = "swapped"
    REFUSED = "refused"  # the checkpoint did not verify; the engine was never touched
    RESTORED = "restored"  # loading failed, the former weights answer again
    FAILED = "failed"  # loading failed and so did restoring; the engine is being restarted


class SwapReport(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the agent's `POST /checkpoint`. `version` and `epoch` are what the replica serves afterwards."""

    outcome: SwapOutcome
    version: str
    epoch: int
    requested: str
    seconds: float
    phases: dict[str, float] = {}  # seconds spent in each phase of the swap, in order
    code: str | None = None  # protocol.manifest.Fault or a word of the swap's own, for programs
    reason: str | None = None  # for people


def checkpoint_label(version: str, epoch: int) -> str:
    """The version as the `x-intellect-checkpoint` header shows it: `base`, then `v2+1` after one swap.

    The epoch tells A before a swap from A after A -> B -> A: KV blocks written under B must never serve the latter.
    """
    return version if epoch == 0 else f"{version}+{epoch}"
