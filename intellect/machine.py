"""What this machine has: processors, memory, accelerators, ports. Reads; decides nothing."""

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

_NVIDIA_SMI_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    cores: tuple[int, ...]  # ids of the processors that this process may use
    memory_bytes: int
    memory_available_bytes: int
    gpus: tuple[str, ...]  # one description each, in the order of their numbers


def read_machine() -> Machine:
    memory = psutil.virtual_memory()
    return Machine(cores=_cores(), memory_bytes=memory.total, memory_available_bytes=memory.available, gpus=_nvidia_gpus())


def is_port_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do it, so that a connection that is still closing does not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def port_holder(port: int) -> str | None:
    """`NAME (pid N)` of the process that listens on this port, as far as we are allowed to see it."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return None
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            if connection.pid is None:
                return None
            try:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
            except psutil.Error:
                return f"pid {connection.pid}"
    return None


def our_command() -> str:
    """How a shell of the user's finds `intellect`: by its name where the search path leads to this installation."""
    script = Path(sys.executable).parent / "intellect"
    found = shutil.which("intellect")
    return "intellect" if found is not None and Path(found).resolve() == script.resolve() else str(script)


def _cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _nvidia_gpus() -> tuple[str, ...]:
    if shutil.which("nvidia-smi") is None:
        return ()
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(line.strip() for line in listing.stdout.splitlines() if line.startswith("GPU "))
