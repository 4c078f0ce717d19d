"""A store of checkpoints in a folder: <store>/<model>/<version>/, published whole or not at all.

Writers: copy aside, write the manifest, then STABLE with the manifest's sha256, fsync, and rename the folder into place. So
a version appears sealed and at once, and of two writers of one name the second finds it taken. Readers trust nothing without
STABLE and verify every byte against the manifest. This is the one module of `protocol` that does I/O.

NAME/VERSION and OWNER/NAME look alike as folders, so a folder is either a version, which holds files, or the folder of an
OWNER/NAME model, which holds versions; whoever would make one out of the other is refused.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
    is_model_name,
    is_version_name,
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
# What tells an unsealed version, one that was being copied, from the folder of an OWNER/NAME model.
_VERSION_MARKS = (STABLE_FILE, MANIFEST_FILE, "config.json")
_CONFIG_SUFFIX = "config.json"  # config.json itself, tokenizer_config.json, generation_config.json and their like

# .staging-VERSION-PLACE-PID-RANDOM; see _place.
_STAGING_PREFIX = ".staging-"
_STAGING = re.compile(r"\.staging-.+-(?P<place>[0-9a-f]{8})-(?P<pid>[0-9]+)-[0-9a-f]{8}")
_COPY_BYTES = 8 << 20
_TAKE_TRIES = 10

_SEAL_BYTES_MAX = 1 << 10
_SMALL_FILE_BYTES_MAX = 256 << 20  # manifests and configs, which are read into memory

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
    with _readable(target):
        _check_free(store, model, version)
    with _readable(source):
        names = _wanted_files(source)
        _check_configs(source, names)
        read_layout(source)  # before anything is copied, and with the names that the caller knows
    staging = target.parent / f"{_STAGING_PREFIX}{version}-{_place()}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        _sweep_abandoned(target.parent)
        staging.mkdir(parents=True)
        _check_model_folder(store, model)  # again: from here on nobody can make a version of the folder that holds staging
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
    sealed: list[tuple[int, str]] = []
    with _readable(store / model):
        for seal in (store / model).glob(f"*/{STABLE_FILE}"):
            if is_version_name(seal.parent.name) and seal.is_file():
                with contextlib.suppress(FileNotFoundError):  # it was removed while we looked
                    sealed.append((seal.stat().st_mtime_ns, seal.parent.name))
    return [name for _, name in sorted(sealed)]


def models(store: Path) -> list[str]:
    """Models with at least one sealed version, by name."""
    with _readable(store):
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
    with _readable(folder):
        _check_inside(folder, store)
        is_there = folder.is_dir()
    if not is_there:
        known = ", ".join(versions(store, model)) or "none"
        raise CheckpointError(Fault.NOT_FOUND, f"{model} {version} is not in {store}; published versions: {known}")
    seal = _read_small(
        folder / STABLE_FILE,
        Fault.NOT_STABLE,
        "it is still being written, or its writer died; publish it again",
        bytes_max=_SEAL_BYTES_MAX,
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
    with _readable(folder):
        _check_folder(folder, store, manifest)
    _check_configs(folder, manifest.files)
    tally = _Tally(sum(spec.size for spec in manifest.files.values()), progress)

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
        raise CheckpointError(Fault.FILE_MISSING, f"{source} holds no config.json; give the folder that the model was saved in")
    return names


def _check_configs(folder: Path, names: Iterable[str]) -> None:
    """Refuses auto_map at any depth of any *config.json: every one of them is a place from which loaders take it."""
    for name in sorted({"config.json", *(name for name in names if name.endswith(_CONFIG_SUFFIX))}):
        path = folder / name
        if _has_key(_read_json_object(path), "auto_map"):
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


def _read_json_object(path: Path) -> dict[str, object]:
    """With the parser that loaders use, so that it reads the same as they do (NaN, keys that come twice)."""
    encoded = _read_small(path, Fault.FILE_MISSING, "every checkpoint needs one")
    try:
        value = json.loads(encoded.decode())
    except RecursionError as error:
        raise CheckpointError(Fault.MALFORMED, f"{path.name} is not valid JSON: it is nested too deeply") from error
    except ValueError as error:
        raise CheckpointError(Fault.MALFORMED, f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(Fault.MALFORMED, f"{path.name} is not valid JSON for a config: it must be an object")
    return value


def _read_small(path: Path, fault_if_absent: Fault, remedy: str, *, bytes_max: int = _SMALL_FILE_BYTES_MAX) -> bytes:
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
def _readable(path: Path) -> Iterator[None]:
    """Turns what the operating system says while `path` is examined into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(Fault.UNREADABLE, f"cannot read {error.filename or path}: {error.strerror or error}") from error
    except RuntimeError as error:
        # Path.resolve's word for links that lead to each other.
        raise CheckpointError(Fault.UNREADABLE, f"cannot read {path}: {error}") from error


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


def _is_sealed(folder: Path) -> bool:
    return (folder / STABLE_FILE).is_file()


def _check_free(store: Path, model: str, version: str) -> None:
    """Raises CheckpointError unless a version can be published here, as far as can be seen before it is written."""
    folder = version_folder(store, model, version)
    if _is_sealed(folder):
        raise _already_published(store, model, version)
    _check_model_folder(store, model)
    if folder.is_dir():
        with os.scandir(folder) as entries:
            if any(entry.is_dir(follow_symlinks=False) for entry in entries):
                raise _holds_folders(folder)


def _check_model_folder(store: Path, model: str) -> None:
    """Raises CheckpointError if the folder of an OWNER/NAME model is a version of the model OWNER, or a copy of one."""
    owner, _, name = model.partition("/")
    if name and any((store / model / mark).is_file() for mark in _VERSION_MARKS):
        raise CheckpointError(
            Fault.BAD_NAME,
            f"model {model!r} cannot be in this store: its folder is version {name!r} of model {owner!r}; "
            "publish under another model name",
        )


def _holds_folders(target: Path) -> CheckpointError:
    return CheckpointError(
        Fault.BAD_NAME,
        f"{target} cannot become a version: it holds folders, as the folder of an OWNER/NAME model does; "
        "publish under another version",
    )


def _take_place(staging: Path, target: Path) -> bool:
    """Moves the staged folder into place, over an unsealed one that a dead writer left. False if a sealed one is there.

    The rename alone decides who wins: it fails unless the target is absent or empty. A sealed folder is never touched.
    """
    for _ in range(_TAKE_TRIES):
        if _rename_to_free(staging, target):
            _sync_folder(target.parent)
            return True
        if not _empty_unsealed(target):
            return False
    raise CheckpointError(Fault.UNREADABLE, f"something else is writing into {target}; end it, or publish under a new version")


def _empty_unsealed(target: Path) -> bool:
    """Removes the files of an unsealed version; False if it is sealed.

    Through a descriptor: if another writer puts a sealed folder in its place meanwhile, that is another folder, and what
    is removed here is still the old one's.
    """
    descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        modes: dict[str, int] = {}
        for name in os.listdir(descriptor):
            with contextlib.suppress(FileNotFoundError):  # another writer is removing them too
                modes[name] = os.lstat(name, dir_fd=descriptor).st_mode
        if stat.S_ISREG(modes.get(STABLE_FILE, 0)):
            return False
        if any(stat.S_ISDIR(mode) for mode in modes.values()):
            raise _holds_folders(target)
        for name in modes:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    return True


def _sweep_abandoned(folder: Path) -> None:
    """Removes the staging folders of writers that were killed here; those of other machines are theirs to remove."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        staged = _STAGING.fullmatch(path.name)
        if staged and staged["place"] == _place() and not _is_running(int(staged["pid"])):
            shutil.rmtree(path, ignore_errors=True)


def _place() -> str:
    """Where process numbers mean the same: this host and, where there is such a thing, this PID namespace."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:8]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # somebody else's
    return True


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
