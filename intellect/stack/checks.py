"""What must hold before anything is started. Each failure is one line: the flag, its value, the cause, the remedy."""

import importlib.util
import tempfile
from pathlib import Path

from intellect.machine import Machine, is_port_free, port_holder
from intellect.places import Places
from intellect.problem import Problem, UsageProblem
from intellect.stack.plan import LOOPBACK, Engine

GIB = 1 << 30
# A replica on the CPU: three processes with the engine's libraries, measured 3.1 GB with 0.5 GB of weights.
_ENGINE_BYTES = int(2.6e9)
# What the preset cpu takes for the KV cache.
_KV_BYTES = GIB


def check_replicas(replicas: int | None, *, gpus: int, each: int = 1) -> int:
    """The number of replicas to run; each takes `each` of the accelerators, if there are any."""
    fitting = gpus // each
    if replicas is not None and replicas < 1:
        raise UsageProblem(f"--replicas {replicas}: must be 1 or more")
    if gpus and (replicas or 1) > fitting:
        raise UsageProblem(f"--replicas {replicas or 1}: needs {each} GPU each, this machine has {gpus}; {fitting} at most")
    if replicas is not None:
        return replicas
    return min(2, fitting) if gpus else 2


def check_ports(host: str, port: int, admin_port: int) -> None:
    for flag, address, number in (("--port", host, port), ("--admin-port", LOOPBACK, admin_port)):
        if number == 0:
            raise UsageProblem(f"{flag} 0: give a number from 1 to 65535")
        if not is_port_free(address, number):
            holder = port_holder(number)
            cause = f"in use by {holder}" if holder else f"cannot be listened on at {address} (in use, or not allowed)"
            raise Problem(f"{flag} {number}: {cause}; stop it or give another {flag}")


def check_state_dir(places: Places, port: int) -> None:
    try:
        for folder in (places.state_dir, places.store, places.logs(port)):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise Problem(
            f"--state-dir {places.state_dir}: cannot be written ({error.strerror}); make it writable or give another folder"
        ) from error


def check_engine(engine: Engine) -> None:
    # Found, not imported: importing takes many seconds, and the replicas do it anyway.
    if engine is Engine.VLLM and importlib.util.find_spec("vllm") is None:
        raise Problem("--engine vllm: vLLM is not installed here; run `make setup`, or try the stack with --engine sim")


def memory_needed(replicas: int, weight_bytes: int) -> int:
    """Bytes of memory that this many vLLM replicas on the CPU take; weights are stored in 2 bytes and computed in 4."""
    return replicas * (_ENGINE_BYTES + 2 * weight_bytes + _KV_BYTES)


def check_memory(replicas: int, model: str, machine: Machine) -> None:
    needed = memory_needed(replicas, _weight_bytes(Path(model)))
    if needed <= machine.memory_available_bytes:
        return
    one = memory_needed(1, _weight_bytes(Path(model)))
    fitting = machine.memory_available_bytes // one
    remedy = f"use --replicas {fitting}" if fitting else "free some memory, choose a smaller --model, or try --engine sim"
    raise Problem(
        f"--replicas {replicas}: needs about {needed / 1e9:.1f} GB of memory, "
        f"{machine.memory_available_bytes / 1e9:.1f} GB are available; {remedy}"
    )


def _weight_bytes(folder: Path) -> int:
    """Of a model folder; 0 for a hub id, whose size is not known before it is fetched."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
