"""What readers and writers of checkpoints share: where a version lies, and how its files are read without trusting them."""

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from protocol.manifest import CheckpointError, Fault, check_model_name, check_version_name
from protocol.safetensors_header import MalformedSafetensors, TensorSpec, read_safetensors_header

UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".py", ".so")  # loading them can run code
_CONFIG_SUFFIX = "config.json"  # config.json itself, tokenizer_config.json, generation_config.json and their like
_SMALL_FILE_BYTES_MAX = 256 << 20  # manifests and configs, which are read into memory
BLOCK_BYTES = 8 << 20  # read, hashed and written at once

# Called with (bytes done, bytes in all) while a checkpoint is copied or hashed, from several threads.
Progress = Callable[[int, int], None]


def version_folder(store: Path, model: str, version: str) -> Path:
    check_model_name(model)
    check_version_name(version)
    return store / model / version


def read_layout(folder: Path) -> dict[str, TensorSpec]:
    """Tensor name -> dtype and shape over all *.safetensors of a model folder. Raises CheckpointError."""
    tensors: dict[str, TensorSpec] = {}
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise CheckpointError(Fault.FILE_MISSING, f"{folder} holds no .safetensors file; save the model as safetensors")
    for shard in shards:
        try:
            if not shard.is_file():
                raise CheckpointError(Fault.UNREADABLE, f"{shard} is not a regular file; remove it")
            specs = read_safetensors_header(shard)
        except MalformedSafetensors as error:
            raise CheckpointError(Fault.MALFORMED, str(error)) from error
        except OSError as error:
            raise CheckpointError(Fault.UNREADABLE, f"cannot read {shard}: {error.strerror or error}") from error
        if twice := tensors.keys() & specs.keys():
            raise CheckpointError(Fault.MALFORMED, f"{shard.name}: tensor {min(twice)} stands in another file too")
        tensors.update(specs)
    return tensors


def check_configs(folder: Path, names: Iterable[str]) -> None:
    """Refuses auto_map at any depth of any *config.json: every one of them is a place from which loaders take it."""
    for name in sorted({"config.json", *(name for name in names if name.endswith(_CONFIG_SUFFIX))}):
        path = folder / name
        if _has_key(read_json_object(path), "auto_map"):
            raise CheckpointError(
                Fault.UNSAFE_CONFIG, f"{path} has auto_map, which makes a loader run code from the folder; remove it"
            )


def _has_key(config: object, key: str) -> bool:
    waiting = [config]
    while waiting:
        match waiting.pop():
            case dict() as fields:
                if key in fields:
                    return True
                waiting += fields.values()
            case list() as items:
                waiting += items
    return False


def read_json_object(path: Path) -> dict[str, object]:
    """With the parser that loaders use, so that it reads the same as they do (NaN, keys that come twice)."""
    encoded = read_small(path, Fault.FILE_MISSING, "every checkpoint needs one")
    try:
        value = json.loads(encoded.decode())
    except RecursionError as error:
        raise CheckpointError(Fault.MALFORMED, f"{path.name} is not valid JSON: it is nested too deeply") from error
    except ValueError as error:
        raise CheckpointError(Fault.MALFORMED, f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(Fault.MALFORMED, f"{path.name} is not valid JSON for a config: it must be an object")
    return value


def read_small(path: Path, fault_if_absent: Fault, remedy: str, *, bytes_max: int = _SMALL_FILE_BYTES_MAX) -> bytes:
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(Fault.UNREADABLE, f"{path} is not a regular file: {remedy}")
            data = file.read(bytes_max + 1)
    except FileNotFoundError as error:
        raise CheckpointError(fault_if_absent, f"{path} does not exist: {remedy}") from error
    except OSError as error:
        raise CheckpointError(Fault.UNREADABLE, f"cannot read {path}: {error.strerror or error}") from error
    if len(data) > bytes_max:
        raise CheckpointError(Fault.MALFORMED, f"{path} is longer than {bytes_max} bytes: {remedy}")
    return data


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns what the operating system says while `path` is examined into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(Fault.UNREADABLE, f"cannot read {error.filename or path}: {error.strerror or error}") from error
    except RuntimeError as error:
        # Path.resolve's word for links that lead to each other.
        raise CheckpointError(Fault.UNREADABLE, f"cannot read {path}: {error}") from error


class Tally:
    """Adds up bytes from several threads for one progress callback."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, count: int) -> None:
        # Threads may interleave here; a progress bar that is off by one block for a moment is harmless.
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


def hash_threads() -> int:
    # hashlib releases the interpreter's lock, so threads scale; beyond eight the disk is the limit.
    return min(8, os.cpu_count() or 1)
