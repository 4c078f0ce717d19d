"""Settings of one replica agent: frozen values, checked once when they are built."""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from protocol.manifest import CheckpointError, check_model_name

RPC_PORT_DEFAULT = 29550  # vLLM's own
ALL2ALL_BACKEND_DEFAULT = "deepep_low_latency"  # made for decoding, which is most of the work


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallelRank:
    """Where one engine stands in a wide expert-parallel group: one rank, one engine, one agent, one port.

    All ranks of a group fail together, and pausing one waits for all of them.
    """

    group: str  # the same for all agents of the group; names the failure domain
    rank: int  # over all nodes
    size: int  # ranks over all nodes
    local_rank: int  # on this node: the accelerator it uses
    address: str  # host of rank 0
    rpc_port: int = RPC_PORT_DEFAULT  # of rank 0, the same on every rank
    all2all_backend: str = ALL2ALL_BACKEND_DEFAULT

    def __post_init__(self) -> None:
        _require(bool(self.group), "expert_parallel.group", self.group, "a name")
        _require(self.size >= 2, "expert_parallel.size", self.size, "2 or more")
        _require(0 <= self.rank < self.size, "expert_parallel.rank", self.rank, f"from 0 to {self.size - 1}")
        _require(0 <= self.local_rank <= self.rank, "expert_parallel.local_rank", self.local_rank, "from 0 to the rank")
        _check_port("expert_parallel.rpc_port", self.rpc_port)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When an engine that died or hangs is started again. Seconds."""

    first_delay_s: float = 1.0
    delay_s_max: float = 60.0
    # A random part of the delay, so that agents whose engines died together do not load together.
    jitter: float = 0.3
    # An engine that answered for this long has earned a fresh count.
    healthy_s: float = 120.0
    failures_max: int = 5  # in a row; the agent then gives up
    # A running engine that has not answered for this long hangs: it is ended, and that counts as a failure. Each question
    # may take a third of it, so a single step of the engine that is shorter than that is never mistaken for a hang.
    hang_s: float = 60.0

    def __post_init__(self) -> None:
        _require(self.first_delay_s > 0, "restart.first_delay_s", self.first_delay_s, "above 0")
        _require(self.delay_s_max >= self.first_delay_s, "restart.delay_s_max", self.delay_s_max, "first_delay_s or more")
        _require(0 <= self.jitter <= 1, "restart.jitter", self.jitter, "from 0 to 1")
        _require(self.failures_max >= 1, "restart.failures_max", self.failures_max, "1 or more")
        _require(self.hang_s > 0, "restart.hang_s", self.hang_s, "above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapDeadlines:
    """Seconds after which a phase of a checkpoint swap has failed."""

    verify_s: float = 3600.0  # reads every byte; 213 GB at 100 MB/s take 36 minutes
    # Only the step in progress ends, but a group pauses when its last rank was asked to.
    pause_s: float = 60.0
    load_s: float = 1800.0
    invalidate_s: float = 60.0
    label_s: float = 10.0
    resume_s: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            _require(value > 0, f"swap.{name}", value, "above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Everything `run_agent` needs.

    `model` is a folder or a hub id, as the engine takes it; only the simulated engine can do without (None). The engine
    serves it as `served_model_name`, and the store holds its checkpoints under that name.
    """

    served_model_name: str
    model: str | None = None
    preset: str = "cpu"  # see server.presets
    host: str = "127.0.0.1"  # for both ports
    port: int = 8200  # the engine's
    admin_port: int = 8100  # the agent's
    token: str | None = field(default=None, repr=False)  # for POST on the admin port; None needs a loopback host
    store: Path | None = None  # None: no swaps
    engine_arguments: tuple[str, ...] = ()  # appended to the preset's, so they win
    devices: tuple[int, ...] = ()  # accelerators, as vLLM's --device-ids; empty: all that are visible
    expert_parallel: ExpertParallelRank | None = None  # only and always with the wide-EP preset
    start_timeout_s: float | None = None  # None: the preset's
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    swap: SwapDeadlines = field(default_factory=SwapDeadlines)

    def __post_init__(self) -> None:
        try:
            check_model_name(self.served_model_name)
        except CheckpointError as error:
            raise ValueError(f"served_model_name: {error}") from error
        _check_port("port", self.port)
        _check_port("admin_port", self.admin_port)
        _require(self.port != self.admin_port, "admin_port", self.admin_port, "another than port")
        _require(self.token is None or len(self.token) >= 8, "token", "(hidden)", "8 characters or longer")
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"host is {self.host}, reachable from other machines, but there is no token; "
                "set a token (--token or INTELLECT_AGENT_TOKEN) or listen on 127.0.0.1"
            )
        if self.start_timeout_s is not None:
            _require(self.start_timeout_s > 0, "start_timeout_s", self.start_timeout_s, "above 0")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _check_port(name: str, port: int) -> None:
    _require(1 <= port <= 65535, name, port, "from 1 to 65535")


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value}, but must be {wanted}")
