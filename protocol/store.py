"""A store of checkpoints in a folder, <store>/<model>/<version>/, as its readers see it.

A version is published whole or not at all (protocol.publisher). Readers trust nothing without STABLE, which holds the
manifest's sha256, and verify every byte against the manifest.
"""

import contextlib
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from protocol.checkpoint_files import (
    BLOCK_BYTES,
    UNSAFE_SUFFIXES,
    Progress,
    Tally,
    check_configs,
    hash_threads,
    read_layout,
    read_small,
    readable,
    version_folder,
)
from protocol.manifest import (
    MANIFEST_FILE,
    STABLE_FILE,
    CheckpointError,
    Fault,
    FileSpec,
    Manifest,
    check_model_name,
    decode_manifest,
    is_model_name,
    is_version_name,
    layout_fingerprint,
)

_SEAL_BYTES_MAX = 1 << 10


def versions(store: Path, model: str) -> list[str]:
    """Sealed versions of a model, oldest first."""
    check_model_name(model)
    sealed: list[tuple[int, str]] = []
    with readable(store / model):
        for seal in (store / model).glob(f"*/{STABLE_FILE}"):
            if is_version_name(seal.parent.name) and seal.is_file():
                with contextlib.suppress(FileNotFoundError):  # it was removed while we looked
                    sealed.append((seal.stat().st_mtime_ns, seal.parent.name))
    return [name for _, name in sorted(sealed)]


def models(store: Path) -> list[str]:
    """Models with at least one sealed version, by name."""
    with readable(store):
        folders = {seal.parent for depth in ("*/*", "*/*/*") for seal in store.glob(f"{depth}/{STABLE_FILE}") if seal.is_file()}
    found = {
        folder.parent.relative_to(store).as_posix()
        for folder in folders
        # What stands inside a sealed version is no model of its own.
        if folder.parent not in folders and is_version_name(folder.name)
    }
    return sorted(name for name in found if is_model_name(name))


def read_manifest(store: Path, model: str, version: str) -> Manifest:
    """The manifest of a sealed version, checked against its seal but not against the files. Raises CheckpointError."""
    folder = version_folder(store, model, version)
    with readable(folder):
        _check_inside(folder, store)
        is_there = folder.is_dir()
    if not is_there:
        known = ", ".join(versions(store, model)) or "none"
        raise CheckpointError(Fault.NOT_FOUND, f"{model} {version} is not in {store}; published versions: {known}")
    seal = read_small(
        folder / STABLE_FILE,
        Fault.NOT_STABLE,
        "it is still being written, or its writer died; publish it again",
        bytes_max=_SEAL_BYTES_MAX,
    )
    encoded = read_small(folder / MANIFEST_FILE, Fault.FILE_MISSING, "publish it again")
    if hashlib.sha256(encoded).hexdigest().encode() != seal.strip():
        raise CheckpointError(Fault.MANIFEST_CHANGED, f"{MANIFEST_FILE} of {model} {version} is not the one that was sealed")
    manifest = decode_manifest(encoded)
    if (manifest.model, manifest.version) != (model, version):
        raise CheckpointError(
            Fault.MANIFEST_INVALID,
            f"{folder} holds the manifest of {manifest.model} {manifest.version}; folders in a store must not be renamed",
        )
    return manifest


def verify(store: Path, model: str, version: str, *, progress: Progress | None = None) -> Manifest:
    """Reads every byte of a version and compares it with its sealed manifest. Raises CheckpointError at the first fault."""
    manifest = read_manifest(store, model, version)
    folder = version_folder(store, model, version)
    with readable(folder):
        _check_folder(folder, store, manifest)
    check_configs(folder, manifest.files)
    tally = Tally(sum(spec.size for spec in manifest.files.values()), progress)

    def check(item: tuple[str, FileSpec]) -> None:
        name, spec = item
        try:
            found = _hash_file(folder / name, tally)
        except OSError as error:
            raise CheckpointError(Fault.UNREADABLE, f"cannot read {folder / name}: {error.strerror or error}") from error
        if found != spec.sha256:
            raise CheckpointError(
                Fault.FILE_CHANGED,
                f"{name} has sha256 {found[:12]}..., the manifest says {spec.sha256[:12]}...: a byte changed",
            )

    with ThreadPoolExecutor(hash_threads()) as pool:
        for _ in pool.map(check, manifest.files.items()):
            pass
    tensors = read_layout(folder)
    if tensors != manifest.tensors or layout_fingerprint(tensors) != manifest.base_fingerprint:
        raise CheckpointError(Fault.MALFORMED, f"the tensors of {model} {version} are not those that its manifest lists")
    return manifest


def _check_folder(folder: Path, store: Path, manifest: Manifest) -> None:
    present = {entry.name for entry in os.scandir(folder)} - {MANIFEST_FILE, STABLE_FILE}
    if extra := sorted(present - manifest.files.keys()):
        raise CheckpointError(Fault.FILE_UNEXPECTED, f"{folder} holds {extra[0]}, which its manifest does not list")
    for name, spec in manifest.files.items():
        path = folder / name
        if Path(name).name != name:
            raise CheckpointError(Fault.OUTSIDE_STORE, f"the manifest lists {name!r}, which is not a plain file name")
        if name.endswith(UNSAFE_SUFFIXES):
            raise CheckpointError(Fault.UNSAFE_FILE, f"{name} could run code when loaded; only safetensors are accepted")
        if name not in present:
            raise CheckpointError(Fault.FILE_MISSING, f"{name} is in the manifest but not in {folder}")
        _check_inside(path, store)
        if not path.is_file():
            raise CheckpointError(Fault.FILE_MISSING, f"{path} is not a regular file")
        if (size := path.stat().st_size) != spec.size:
            raise CheckpointError(Fault.FILE_CHANGED, f"{name} is {size} bytes long, the manifest says {spec.size}")


def _check_inside(path: Path, store: Path) -> None:
    if not path.resolve().is_relative_to(store.resolve()):
        raise CheckpointError(Fault.OUTSIDE_STORE, f"{path} leads outside the store {store}")


def _hash_file(path: Path, tally: Tally) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as reader:
        while block := reader.read(BLOCK_BYTES):
            digest.update(block)
            tally.add(len(block))
    return digest.hexdigest()
