from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intellect.places import Places
from intellect.stack.plan import Engine, ProcessPlan, Secrets, StackOptions, StackPlan, plan_stack, share_cores

SECRETS = Secrets(agent_token="agent-secret", upstream_key="upstream-secret")
OPTIONS = StackOptions(
    engine=Engine.VLLM,
    model="/models/tiny",
    served_name="tiny",
    preset="cpu",
    replicas=2,
    host="127.0.0.1",
    port=8000,
    admin_port=8001,
    places=Places(Path("/state")),
    router_flags=("--policy", "least_loaded"),
    api_keys=("client-secret",),
)


def plan(
    options: StackOptions = OPTIONS,
    *,
    cores: tuple[int, ...] = (0, 1),
    gpus: int = 0,
    busy: tuple[int, ...] = (),
    environ: dict[str, str] | None = None,
) -> StackPlan:
    return plan_stack(options, SECRETS, cores=cores, gpus=gpus, is_free=lambda port: port not in busy, environ=environ or {})


def flag(process: ProcessPlan, name: str) -> list[str]:
    return [value for given, value in zip(process.command, process.command[1:], strict=False) if given == name]


def test_the_router_is_joined_to_every_replica() -> None:
    """The router finds the agents where they listen, and nothing but the public port leaves this machine."""
    made = plan(replace(OPTIONS, host="0.0.0.0"))
    assert flag(made.router, "--replica") == ["http://127.0.0.1:8100", "http://127.0.0.1:8101"]
    assert flag(made.router, "--host") == ["0.0.0.0"]
    assert flag(made.router, "--admin-host") == ["127.0.0.1"]
    assert [flag(replica, "--admin-port") for replica in made.replicas] == [["8100"], ["8101"]]
    assert [flag(replica, "--port") for replica in made.replicas] == [["8200"], ["8201"]]
    assert [flag(replica, "--host") for replica in made.replicas] == [["127.0.0.1"]] * 2
    assert [replica.url for replica in made.replicas] == ["http://127.0.0.1:8100", "http://127.0.0.1:8101"]
    assert made.notes[:-1] == ()


def test_secrets_are_no_arguments() -> None:
    """Every user of a machine can read arguments; keys and tokens travel in variables."""
    made = plan()
    for process in (made.router, *made.replicas):
        assert not [argument for argument in process.command if "secret" in argument]
    assert made.router.variables["INTELLECT_API_KEY"] == "client-secret"
    assert made.router.variables["INTELLECT_UPSTREAM_KEY"] == made.replicas[0].variables["VLLM_API_KEY"] == "upstream-secret"
    assert made.router.variables["INTELLECT_AGENT_TOKEN"] == made.replicas[1].variables["INTELLECT_AGENT_TOKEN"]


def test_private_ports_that_are_taken_are_passed_over() -> None:
    """A second stack, or a stranger on 8100, is no reason to fail; what is taken instead is said."""
    made = plan(replace(OPTIONS, port=8103, engine=Engine.SIM), busy=(8100, 8102, 8201))
    assert [flag(replica, "--admin-port") for replica in made.replicas] == [["8101"], ["8104"]]
    assert [flag(replica, "--port") for replica in made.replicas] == [["8200"], ["8202"]]
    assert made.notes == (
        "some agent ports from 8100 up are in use; taking 8101, 8104",
        "some engine ports from 8200 up are in use; taking 8200, 8202",
    )


@given(replicas=st.integers(1, 60), busy=st.sets(st.integers(8100, 8300)), port=st.integers(8000, 8300))
def test_no_port_is_given_twice(replicas: int, busy: set[int], port: int) -> None:
    """However many replicas there are, even when agents reach into the engines' range."""
    made = plan(replace(OPTIONS, replicas=replicas, port=port, admin_port=7999), busy=tuple(busy))
    ports = [int(value) for replica in made.replicas for name in ("--port", "--admin-port") for value in flag(replica, name)]
    assert len({*ports, port, 7999}) == 2 * replicas + 2
    assert not busy & set(ports)


@pytest.mark.parametrize(
    ("cores", "replicas", "shares"),
    [
        ((0, 1), 1, [(0, 1)]),
        ((0, 1), 2, [(0,), (1,)]),
        ((0, 1), 3, [(0, 1)] * 3),  # too few: sharing is all that is left
        ((0, 1, 2, 3, 4), 2, [(0, 1), (2, 3, 4)]),
        ((3, 7), 2, [(3,), (7,)]),
    ],
)
def test_replicas_compute_on_cores_of_their_own(cores: tuple[int, ...], replicas: int, shares: list[tuple[int, ...]]) -> None:
    """Threads of two engines on one core would spin while the other waits."""
    assert share_cores(cores, replicas) == shares


@given(cores=st.sets(st.integers(0, 255), min_size=1), replicas=st.integers(1, 32))
def test_every_core_is_used_and_none_twice(cores: set[int], replicas: int) -> None:
    """Where there are enough of them; shares differ by one core at most."""
    shares = share_cores(sorted(cores), replicas)
    if len(cores) >= replicas:
        assert sorted(core for share in shares for core in share) == sorted(cores)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert len(shares) == replicas
    assert all(shares)


def test_cores_are_bound_for_vllm_on_the_cpu_only() -> None:
    """A user's own setting wins; GPUs and the simulation need none."""
    variable = "VLLM_CPU_OMP_THREADS_BIND"
    assert [replica.variables[variable] for replica in plan().replicas] == ["0", "1"]
    assert "each replica computes on its own cores: 0, 1" in plan().notes
    for made in (plan(environ={variable: "0-1"}), plan(gpus=2), plan(replace(OPTIONS, engine=Engine.SIM))):
        assert all(variable not in replica.variables for replica in made.replicas)


def test_each_replica_has_a_gpu_where_there_are_gpus() -> None:
    """Two engines on one accelerator would each claim all of its memory."""
    assert [flag(replica, "--device") for replica in plan(gpus=4).replicas] == [["0"], ["1"]]
    assert [flag(replica, "--device") for replica in plan().replicas] == [[], []]
    pairs = plan(replace(OPTIONS, preset="intellect3-bf16-tp2"), gpus=4).replicas
    assert [flag(replica, "--device") for replica in pairs] == [["0", "1"], ["2", "3"]]


def test_a_model_of_any_kind_runs_on_gpus_in_its_own_precision() -> None:
    """Without a preset for it, the user's arguments still win; a named preset is left as it is."""
    options = replace(OPTIONS, engine_arguments=("--dtype", "half"))
    assert plan(options, gpus=2).replicas[0].command[-6:] == ("--", "--dtype", "auto", "--no-enforce-eager", "--dtype", "half")
    assert "--no-enforce-eager" not in plan(replace(options, preset="intellect3-fp8-tp1"), gpus=2).replicas[0].command


@pytest.mark.parametrize(
    ("engine", "gpus", "replicas", "at_once"),
    [(Engine.VLLM, 0, 5, 2), (Engine.VLLM, 8, 8, 8), (Engine.SIM, 0, 5, 5)],
)
def test_as_many_replicas_start_at_once_as_there_are_cores(engine: Engine, gpus: int, replicas: int, at_once: int) -> None:
    """Starting an engine keeps a core busy; more of them only wait for each other."""
    assert plan(replace(OPTIONS, engine=engine, replicas=replicas), gpus=gpus).at_once == at_once


def test_engine_arguments_reach_every_engine() -> None:
    """What stands after `--` is passed on behind `--`."""
    made = plan(replace(OPTIONS, engine_arguments=("--max-model-len", "4096")))
    for replica in made.replicas:
        assert replica.command[-3:] == ("--", "--max-model-len", "4096")
    assert "--" not in plan().replicas[0].command
