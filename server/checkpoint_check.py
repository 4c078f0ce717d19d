"""Whether a version may be loaded over the model that is served. Everything here blocks: call it in a thread."""

from pathlib import Path

from protocol.checkpoint_files import read_layout
from protocol.manifest import CheckpointError, Fault, check_loadable
from protocol.safetensors_header import TensorSpec
from protocol.store import verify


class SwapRefused(Exception):
    """A swap that cannot begin for a reason that is not the checkpoint's. `code` is for programs, the message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def verify_version(store: Path | None, model: str, version: str, base: dict[str, TensorSpec] | None = None) -> None:
    """Reads every byte of a version, and compares its tensors with those of the served model if `base` gives them.

    Raises CheckpointError or SwapRefused.
    """
    if store is None:
        raise SwapRefused("no_store", "this replica has no checkpoint store; start it with --store DIR")
    manifest = verify(store, model, version)
    if base is not None:
        check_loadable(manifest.tensors, base)


def base_layout(model: str | None) -> dict[str, TensorSpec]:
    """The tensors of the folder or hub id that the engine was started with. Raises CheckpointError or SwapRefused."""
    if model is None:
        raise SwapRefused(
            "no_base", "the engine was started without a model, so no checkpoint can be compared with it; give --model DIR"
        )
    folder = Path(model)
    try:
        return read_layout(folder if folder.is_dir() else _hub_snapshot(model))
    except OSError as error:
        raise CheckpointError(Fault.UNREADABLE, f"cannot read {model}: {error.strerror or error}") from error


def _hub_snapshot(model: str) -> Path:
    """Where the hub's client keeps the files that the engine loaded."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise SwapRefused(
            "no_base", f"model {model!r} is no folder here, and without huggingface_hub no hub id can be found; give a folder"
        ) from error
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError) as error:
        raise SwapRefused(
            "no_base", f"model {model!r} is no folder here and not in the hub's cache; download it, or give a folder: {error}"
        ) from error
