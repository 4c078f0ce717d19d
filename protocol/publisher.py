"""Publishes a checkpoint into a store: whole, sealed, and once.

Copy aside, write the manifest, then STABLE with the manifest's sha256, fsync, and rename the folder into place. So a version
appears sealed and at once, and of two writers of one name the second finds it taken.

NAME/VERSION and OWNER/NAME look alike as folders, so a folder is either a version, which holds files, or the folder of an
OWNER/NAME model, which holds versions; whoever would make one out of the other is refused.
"""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from protocol.checkpoint_files import (
    BLOCK_BYTES,
    UNSAFE_SUFFIXES,
    Progress,
    Tally,
    check_configs,
    hash_threads,
    read_json_object,
    read_layout,
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
    check_published_version_name,
    check_version_name,
    encode_manifest,
    layout_fingerprint,
)

# What a loader may need. Anything else in a source folder (README, licences) is left behind; what could run code is refused.
_WANTED_SUFFIXES = (".safetensors", ".json", ".jinja")
_WANTED_NAMES = frozenset({"merges.txt", "vocab.txt", "tokenizer.model"})
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

# .staging-VERSION-PLACE-PID-RANDOM; see _place.
_STAGING_PREFIX = ".staging-"
_STAGING = re.compile(r"\.staging-.+-(?P<place>[0-9a-f]{8})-(?P<pid>[0-9]+)-[0-9a-f]{8}")
_TAKE_TRIES = 10


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
    with readable(target):
        _check_free(store, model, version)
    with readable(source):
        names = _wanted_files(source)
        check_configs(source, names)
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


def _wanted_files(source: Path) -> list[str]:
    if not source.is_dir():
        raise CheckpointError(
            Fault.NOT_FOUND, f"{source} is not a folder; give the folder that holds config.json and *.safetensors"
        )
    names = []
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        if not entry.is_file() or entry.name in (MANIFEST_FILE, STABLE_FILE):
            continue
        if entry.name.endswith(UNSAFE_SUFFIXES):
            raise CheckpointError(
                Fault.UNSAFE_FILE,
                f"{source / entry.name} could run code when loaded; remove it or save the model as safetensors",
            )
        if entry.name.endswith(_WANTED_SUFFIXES) or entry.name in _WANTED_NAMES:
            names.append(entry.name)
    if "config.json" not in names:
        raise CheckpointError(Fault.FILE_MISSING, f"{source} holds no config.json; give the folder that the model was saved in")
    return names


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
    template = read_json_object(folder / "tokenizer_config.json").get("chat_template")
    return hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else None


def _stop_token_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            match read_json_object(folder / name).get("eos_token_id"):
                case int(token_id):
                    return (token_id,)
                case [*token_ids]:
                    return tuple(token_id for token_id in token_ids if isinstance(token_id, int))
    return ()


def _copy_all(source: Path, target: Path, names: list[str], progress: Progress | None) -> dict[str, FileSpec]:
    tally = Tally(sum((source / name).stat().st_size for name in names), progress)

    def copy(name: str) -> FileSpec:
        digest, size = hashlib.sha256(), 0
        with (source / name).open("rb") as reader, (target / name).open("xb") as writer:
            while block := reader.read(BLOCK_BYTES):
                digest.update(block)
                writer.write(block)
                size += len(block)
                tally.add(len(block))
            writer.flush()
            os.fsync(writer.fileno())
        return FileSpec(sha256=digest.hexdigest(), size=size)

    with ThreadPoolExecutor(hash_threads()) as pool:
        return dict(zip(names, pool.map(copy, names), strict=True))


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
