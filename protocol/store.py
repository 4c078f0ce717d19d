"""A store of checkpoints in a folder: <store>/<model>/<version>/, published whole or not at all.

Writers: copy aside, write the manifest, then STABLE with the manifest's sha256, fsync, and rename the folder into place. So
a version appears sealed and at once, and of two writers of one name the second finds it taken. Readers trust nothing without
STABLE and verify every byte against the manifest. This is the one module of `protocol` that does I/O.
"""

import errno
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from protocol.manifest import (
    MANIFEST_FILE,
    STABLE_FILE,
    CheckpointError,
    Fault,
    FileSpec,
    Manifest,
    check_model_name,
    check_published_version_name,
    check_version_name,
    decode_manifest,
    encode_manifest,
    layout_fingerprint,
)
from protocol.safetensors_header import MalformedSafetensors, TensorSpec, read_safetensors_header

# What a loader may need. Anything else in a source folder (README, licences) is left behind; what could run code is refused.
_WANTED_SUFFIXES = (".safetensors", ".json", ".jinja")
_WANTED_NAMES = frozenset({"merges.txt", "vocab.txt", "tokenizer.model"})
_UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".py", ".so")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
)
_STAGING_PREFIX = ".staging-"
_COPY_BYTES = 8 << 20

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
        raise CheckpointError(Fault.FILE_MISSING, f"{folder} holds no .safetensors file")
    for shard in shards:
        try:
            specs = read_safetensors_header(shard)
        except MalformedSafetensors as error:
            raise CheckpointError(Fault.MALFORMED, str(error)) from error
        except OSError as error:
            raise CheckpointError(Fault.UNREADABLE, f"cannot read {shard}: {error.strerror}") from error
        if twice := tensors.keys() & specs.keys():
            raise CheckpointError(Fault.MALFORMED, f"{shard.name}: tensor {min(twice)} stands in another file too")
        tensors.update(specs)
    return tensors


def publish(
    source: Path,
    *,
    store: Path,
    model: str,
    version: str,
    parent: str | None = None,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Copies the model folder `source` into the store as a new version and seals it.

    Raises CheckpointError: BAD_NAME, ALREADY_PUBLISHED, UNSAFE_FILE, UNSAFE_CONFIG, FILE_MISSING, MALFORMED, UNREADABLE.
    A version whose writer died (no STABLE) is written again.
    """
    check_published_version_name(version)
    if parent is not None:
        check_version_name(parent)
    target = version_folder(store, model, version)
    if (target / STABLE_FILE).exists():
        raise _already_published(store, model, version)
    names = _wanted_files(source)
    _check_config(source)
    staging = target.parent / f"{_STAGING_PREFIX}{version}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        staging.mkdir(parents=True)
        files = _copy_all(source, staging, names, progress)
        tensors = read_layout(staging)
        manifest = Manifest(
            model=model,
            version=version,
            parent=parent,
            step=step,
            created_unix=time.time(),
            base_fingerprint=layout_fingerprint(tensors),
            files=files,
            tensors=tensors,
            tokenizer_sha256=_combined_sha256(files, _TOKENIZER_FILES),
            chat_template_sha256=_chat_template_sha256(staging),
            stop_token_ids=_stop_token_ids(staging),
            metrics=dict(metrics or {}),
        )
        encoded = encode_manifest(manifest)
        _write_synced(staging / MANIFEST_FILE, encoded)
        _write_synced(staging / STABLE_FILE, hashlib.sha256(encoded).hexdigest().encode() + b"\n")
        _sync_folder(staging)
        if not _take_place(staging, target):
            raise _already_published(store, model, version)
    except OSError as error:
        raise CheckpointError(Fault.UNREADABLE, f"cannot write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return manifest


def versions(store: Path, model: str) -> list[str]:
    """Sealed versions of a model, oldest first."""
    check_model_name(model)
    sealed = [(seal.stat().st_mtime_ns, seal.parent.name) for seal in (store / model).glob(f"*/{STABLE_FILE}")]
    return [name for _, name in sorted(sealed) if not name.startswith(_STAGING_PREFIX)]


def models(store: Path) -> list[str]:
    """Models with at least one sealed version, by name."""
    seals = [*store.glob(f"*/*/{STABLE_FILE}"), *store.glob(f"*/*/*/{STABLE_FILE}")]
    return sorted({str(seal.parent.parent.relative_to(store)) for seal in seals})


def read_manifest(store: Path, model: str, version: str) -> Manifest:
    """The manifest of a sealed version, checked against its seal but not against the files. Raises CheckpointError."""
    folder = version_folder(store, model, version)
    _check_inside(folder, store)
    if not folder.is_dir():
        known = ", ".join(versions(store, model)) or "none"
        raise CheckpointError(Fault.NOT_FOUND, f"{model} {version} is not in {store}; published versions: {known}")
    seal = _read_small(
        folder / STABLE_FILE, Fault.NOT_STABLE, "it is still being written, or its writer died; publish it again"
    )
    encoded = _read_small(folder / MANIFEST_FILE, Fault.FILE_MISSING, "publish it again")
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
    _check_folder(folder, store, manifest)
    _check_config(folder)
    tally = _Tally(sum(spec.size for spec in manifest.files.values()), progress)

    def check(item: tuple[str, FileSpec]) -> None:
        name, spec = item
        try:
            found = _hash_file(folder / name, tally)
        except OSError as error:
            raise CheckpointError(Fault.UNREADABLE, f"cannot read {folder / name}: {error.strerror}") from error
        if found != spec.sha256:
            raise CheckpointError(
                Fault.FILE_CHANGED,
                f"{name} has sha256 {found[:12]}..., the manifest says {spec.sha256[:12]}...: a byte changed",
            )

    with ThreadPoolExecutor(_hash_threads()) as pool:
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
        if name.endswith(_UNSAFE_SUFFIXES):
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


def _wanted_files(source: Path) -> list[str]:
    if not source.is_dir():
        raise CheckpointError(
            Fault.NOT_FOUND, f"{source} is not a folder; give the folder that holds config.json and *.safetensors"
        )
    names = []
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        if not entry.is_file() or entry.name in (MANIFEST_FILE, STABLE_FILE):
            continue
        if entry.name.endswith(_UNSAFE_SUFFIXES):
            raise CheckpointError(
                Fault.UNSAFE_FILE,
                f"{source / entry.name} could run code when loaded; remove it or save the model as safetensors",
            )
        if entry.name.endswith(_WANTED_SUFFIXES) or entry.name in _WANTED_NAMES:
            names.append(entry.name)
    if "config.json" not in names:
        raise CheckpointError(Fault.FILE_MISSING, f"{source} holds no config.json")
    return names


def _check_config(folder: Path) -> None:
    path = folder / "config.json"
    config = _read_json_object(path)
    if "auto_map" in config:
        raise CheckpointError(
            Fault.UNSAFE_CONFIG, f"{path} has auto_map, which makes a loader run code from the folder; remove it"
        )


def _read_json_object(path: Path) -> dict[str, object]:
    encoded = _read_small(path, Fault.FILE_MISSING, "every checkpoint needs one")
    try:
        return msgspec.json.decode(encoded, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(Fault.MALFORMED, f"{path} is not valid JSON: {error}") from error


def _read_small(path: Path, fault_if_absent: Fault, remedy: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(fault_if_absent, f"{path} does not exist: {remedy}") from error
    except OSError as error:
        raise CheckpointError(Fault.UNREADABLE, f"cannot read {path}: {error.strerror}") from error


def _combined_sha256(files: Mapping[str, FileSpec], names: tuple[str, ...]) -> str | None:
    present = [name for name in names if name in files]
    if not present:
        return None
    lines = "".join(f"{name} {files[name].sha256}\n" for name in present)
    return hashlib.sha256(lines.encode()).hexdigest()


def _chat_template_sha256(folder: Path) -> str | None:
    """Of the template's text, wherever it stands: chat_template.jinja wins over tokenizer_config.json, as in transformers."""
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
        return hashlib.sha256(jinja.read_bytes()).hexdigest()
    if not (folder / "tokenizer_config.json").exists():
        return None
    template = _read_json_object(folder / "tokenizer_config.json").get("chat_template")
    return hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else None


def _stop_token_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            match _read_json_object(folder / name).get("eos_token_id"):
                case int(token_id):
                    return (token_id,)
                case [*token_ids]:
                    return tuple(token_id for token_id in token_ids if isinstance(token_id, int))
    return ()


class _Tally:
    """Adds up bytes from several threads for one progress callback."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, count: int) -> None:
        # Threads may interleave here; a progress bar that is off by one block for a moment is harmless.
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


def _copy_all(source: Path, target: Path, names: list[str], progress: Progress | None) -> dict[str, FileSpec]:
    tally = _Tally(sum((source / name).stat().st_size for name in names), progress)

    def copy(name: str) -> FileSpec:
        digest, size = hashlib.sha256(), 0
        with (source / name).open("rb") as reader, (target / name).open("xb") as writer:
            while block := reader.read(_COPY_BYTES):
                digest.update(block)
                writer.write(block)
                size += len(block)
                tally.add(len(block))
            writer.flush()
            os.fsync(writer.fileno())
        return FileSpec(sha256=digest.hexdigest(), size=size)

    with ThreadPoolExecutor(_hash_threads()) as pool:
        return dict(zip(names, pool.map(copy, names), strict=True))


def _hash_file(path: Path, tally: _Tally) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as reader:
        while block := reader.read(_COPY_BYTES):
            digest.update(block)
            tally.add(len(block))
    return digest.hexdigest()


def _hash_threads() -> int:
    # hashlib releases the interpreter's lock, so threads scale; beyond eight the disk is the limit.
    return min(8, os.cpu_count() or 1)


def _already_published(store: Path, model: str, version: str) -> CheckpointError:
    return CheckpointError(
        Fault.ALREADY_PUBLISHED, f"{model} {version} is already published in {store}; publish under a new version"
    )


def _take_place(staging: Path, target: Path) -> bool:
    """Moves the staged folder into place, over an unsealed one that a dead writer left. False if a sealed one is there."""
    if _rename_to_free(staging, target):
        _sync_folder(target.parent)
        return True
    abandoned = staging.with_name(f"{staging.name}-abandoned")
    target.rename(abandoned)
    # Looked at after the move: whoever sealed this name in the meantime gets it back.
    if (abandoned / STABLE_FILE).exists():
        abandoned.rename(target)
        return False
    shutil.rmtree(abandoned, ignore_errors=True)
    taken = _rename_to_free(staging, target)
    _sync_folder(target.parent)
    return taken


def _rename_to_free(folder: Path, target: Path) -> bool:
    """Renames a folder unless something stands at the target; the operating system decides, so only one writer wins."""
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
