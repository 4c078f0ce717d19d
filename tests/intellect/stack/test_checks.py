import socket
from pathlib import Path

import pytest

from intellect.machine import Machine, is_port_free, port_holder
from intellect.places import Places
from intellect.problem import Problem, UsageProblem
from intellect.stack.checks import check_memory, check_ports, check_replicas, check_state_dir, memory_needed
from tests.ports import free_port


def machine(available: float) -> Machine:
    return Machine(cores=(0, 1), memory_bytes=64_000_000_000, memory_available_bytes=int(available), gpus=())


@pytest.mark.parametrize(("asked", "gpus", "expected"), [(None, 0, 2), (None, 1, 1), (None, 8, 2), (3, 0, 3), (8, 8, 8)])
def test_replicas_default_to_what_the_machine_carries(asked: int | None, gpus: int, expected: int) -> None:
    """Two, so that a swap or a crash shows what a router is for; one where there is one GPU."""
    assert check_replicas(asked, gpus=gpus) == expected


def test_more_replicas_than_gpus_are_refused() -> None:
    """The line says how many there can be."""
    with pytest.raises(UsageProblem, match=r"--replicas 3: needs 1 GPU each, this machine has 2; 2 at most"):
        check_replicas(3, gpus=2)
    with pytest.raises(UsageProblem, match=r"--replicas 3: needs 2 GPU each, this machine has 4; 2 at most"):
        check_replicas(3, gpus=4, each=2)
    assert check_replicas(None, gpus=8, each=2) == 2


def test_memory_is_counted_before_anything_starts(tmp_path: Path) -> None:
    """SmolLM2 (269 MB): 2.6 GB of engine + 0.54 GB of float32 weights + 1.07 GB of KV cache = 4.2 GB a replica."""
    (tmp_path / "model.safetensors").touch()
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(269_000_000)
    assert memory_needed(2, 269_000_000) == pytest.approx(8.4e9, rel=0.01)
    check_memory(2, str(tmp_path), machine(8.6e9))
    with pytest.raises(Problem, match=r"--replicas 2: needs about 8\.4 GB of memory, 8\.0 GB are available; use --replicas 1"):
        check_memory(2, str(tmp_path), machine(8.0e9))
    with pytest.raises(Problem, match="free some memory, choose a smaller --model, or try --engine sim"):
        check_memory(2, str(tmp_path), machine(3e9))


def test_a_port_in_use_names_its_holder() -> None:
    """The operator knows what to stop."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert not is_port_free("127.0.0.1", port)
        assert port_holder(port) is not None
        with pytest.raises(Problem, match=rf"--port {port}: in use by .+ \(pid \d+\); stop it or give another --port"):
            check_ports("127.0.0.1", port, free_port())
        with pytest.raises(Problem, match=rf"--admin-port {port}: in use by"):
            check_ports("127.0.0.1", free_port(), port)


def test_an_address_that_is_not_ours_is_told_from_a_busy_one() -> None:
    """192.0.2.1 is nobody's address."""
    with pytest.raises(Problem, match=r"cannot be listened on at 192\.0\.2\.1"):
        check_ports("192.0.2.1", free_port(), free_port())


def test_a_state_folder_is_made(tmp_path: Path) -> None:
    """The first run needs no preparation."""
    where = Places(tmp_path / "a" / "b")
    check_state_dir(where, 8000)
    assert where.store.is_dir()
    assert where.logs(8000).is_dir()


def test_a_state_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """The line carries the operating system's reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(Problem, match=r"--state-dir .*/file/x: cannot be written \(Not a directory\)"):
        check_state_dir(Places(tmp_path / "file" / "x"), 8000)
