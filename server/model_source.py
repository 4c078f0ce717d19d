"""Turns what a user calls a model into what an engine can load: a folder, the default model, or a hub id.

The default model is made once, from a package on disk, and kept. It is written aside and renamed, under a lock that the
operating system drops when its holder dies, so there is a whole model or none, and callers at the same time make it once.
"""

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from server.sim_model import SIM_MODEL_NAME, write_sim_model

DEFAULT_MODEL = "smollm2-135m-instruct"

# Called with one line of text for each step of something that takes long.
ProgressLine = Callable[[str], None]

_LEASH = Path(__file__).with_name("leash.py")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_CONVERSION_TIMEOUT_S = 900.0  # it takes 30 to 40 s on two cores
_STAGING_PREFIX = ".making-"


class ModelUnavailable(Exception):
    """The model cannot be had; the message is one line with the cause and the remedy."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """What to give an engine as its model, and the name clients use for it."""

    folder_or_id: str
    served_name: str


def resolve_model(reference: str, cache_dir: Path, progress: ProgressLine) -> ResolvedModel:
    """Finds the model that `reference` means; makes the default model in `cache_dir`/models if it is not there yet.

    An existing folder wins over a hub id of the same spelling. A hub id is not looked up here; the engine does that.
    Raises ModelUnavailable.
    """
    folder = Path(reference).expanduser()
    if folder.is_dir():
        check_model_folder(folder)
        return ResolvedModel(str(folder.resolve()), folder.resolve().name)
    if reference == DEFAULT_MODEL:
        return ResolvedModel(str(_default_model(cache_dir / "models", progress)), DEFAULT_MODEL)
    if folder.is_file():
        raise ModelUnavailable(f"{reference} is a file; give the folder that holds config.json and *.safetensors")
    if not _HUB_ID.fullmatch(reference):
        raise ModelUnavailable(
            f"{reference!r} is no folder here, not the default model {DEFAULT_MODEL}, and no hub id OWNER/NAME; check the path"
        )
    return ResolvedModel(reference, reference)


def resolve_sim_model(cache_dir: Path) -> ResolvedModel:
    """The tiny made-up model for the simulated engine, written anew when it is not there."""
    folder = cache_dir / "models" / SIM_MODEL_NAME
    if not (folder / "config.json").is_file():
        with _making(folder) as staging:
            if staging is not None:
                write_sim_model(staging)
    return ResolvedModel(str(folder), SIM_MODEL_NAME)


def check_model_folder(folder: Path) -> None:
    """Raises ModelUnavailable unless the folder holds what an engine needs to load a model from it."""
    if not (folder / "config.json").is_file():
        raise ModelUnavailable(f"{folder} holds no config.json; give the folder that a model was saved to")
    if not any(folder.glob("*.safetensors")):
        raise ModelUnavailable(f"{folder} holds no *.safetensors; save the model's weights as safetensors")


def is_default_model_ready(cache_dir: Path) -> bool:
    return (cache_dir / "models" / DEFAULT_MODEL / "config.json").is_file()


def _default_model(models: Path, progress: ProgressLine) -> Path:
    target = models / DEFAULT_MODEL
    if target.is_dir():
        return target
    progress(f"making {DEFAULT_MODEL} in {target} (once, about 40 s)")
    with _making(target) as staging:
        if staging is not None:
            _convert(staging, progress)
            check_model_folder(staging)
    return target


@contextlib.contextmanager
def _making(target: Path) -> Iterator[Path | None]:
    """A folder to fill that becomes `target` on success, or None if another process has just made it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / f".{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.is_dir():
                yield None
                return
            # Whoever holds the lock is the only writer, so these were left by one that was killed.
            prefix = f"{_STAGING_PREFIX}{target.name}-"
            for abandoned in target.parent.glob(f"{prefix}*"):
                shutil.rmtree(abandoned, ignore_errors=True)
            staging = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
            try:
                yield staging
                staging.chmod(0o755)  # mkdtemp makes it private
                staging.rename(target)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise ModelUnavailable(
            f"cannot write {target}: {error.strerror or error}; free some space there or choose another folder"
        ) from error


def _convert(staging: Path, progress: ProgressLine) -> None:
    """Runs server.smollm2 in a process of its own, so that its torch and its memory go with it."""
    # -P keeps the caller's working folder off the import path; the leash ends the conversion if we are killed.
    converter = [sys.executable, "-P", "-m", "server.smollm2", str(staging)]
    command = [sys.executable, "-I", "-S", str(_LEASH), "--", *converter]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True
    )
    deadline = threading.Timer(_CONVERSION_TIMEOUT_S, process.terminate)
    lines: deque[str] = deque(maxlen=1)
    with process:
        assert process.stdout is not None
        try:
            deadline.start()
            for line in process.stdout:
                if text := line.strip():
                    lines.append(text)
                    progress(text)
        except BaseException:
            process.terminate()
            raise
        finally:
            deadline.cancel()
    if process.returncode != 0:
        cause = lines[-1].removeprefix("error: ") if lines else f"exit status {process.returncode}"
        raise ModelUnavailable(f"cannot make {DEFAULT_MODEL}: {cause}")
