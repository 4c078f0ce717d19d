"""A checkpoint's manifest: what a published version holds, so that a reader can verify it before loading it.

Pure: encoding, names, and the comparison of two tensor layouts. Folders are protocol.store's and protocol.publisher's.
"""

import enum
import hashlib
import re

import msgspec

from protocol.safetensors_header import TensorSpec
from protocol.status import BASE_VERSION

MANIFEST_FILE = "manifest.json"
STABLE_FILE = "STABLE"
FORMAT = 1

_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")


class Fault(enum.StrEnum):
    """Everything that can be wrong with a checkpoint, as a word for programs. Messages are for people."""

    BAD_NAME = "bad_name"  # the model's or version's name is not one a store can hold
    NOT_FOUND = "not_found"
    NOT_STABLE = "not_stable"  # no STABLE: still being written, or its writer died
    MANIFEST_CHANGED = "manifest_changed"  # the manifest is not the one that STABLE seals
    MANIFEST_INVALID = "manifest_invalid"
    FILE_MISSING = "file_missing"
    FILE_CHANGED = "file_changed"  # size or sha256 differs from the manifest
    FILE_UNEXPECTED = "file_unexpected"  # in the folder but not in the manifest
    UNSAFE_FILE = "unsafe_file"  # a pickle or code
    UNSAFE_CONFIG = "unsafe_config"  # auto_map: asks the loader to run code
    OUTSIDE_STORE = "outside_store"  # a link or path that leaves the version's folder
    TENSOR_MISSING = "tensor_missing"
    TENSOR_UNKNOWN = "tensor_unknown"  # the base has no such tensor
    TENSOR_SHAPE = "tensor_shape"
    TENSOR_DTYPE = "tensor_dtype"
    MALFORMED = "malformed"  # a safetensors file that contradicts itself or the manifest
    ALREADY_PUBLISHED = "already_published"
    UNREADABLE = "unreadable"  # the operating system's word is in the message


class CheckpointError(Exception):
    """A checkpoint that must not be loaded, or could not be published. `fault` says why in one word."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class FileSpec(msgspec.Struct, frozen=True):
    sha256: str  # hex
    size: int  # bytes


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt with the log-probabilities that the trainer computed for its tokens under these weights."""

    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # one for each prompt token but the first


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    model: str
    version: str
    parent: str | None = None  # the version it was trained from
    step: int | None = None
    created_unix: float
    base_fingerprint: str  # see layout_fingerprint; equal for all checkpoints that can replace each other
    files: dict[str, FileSpec]
    tensors: dict[str, TensorSpec]
    tokenizer_sha256: str | None = None  # of the tokenizer's files present, null if there are none
    chat_template_sha256: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    canaries: tuple[Canary, ...] = ()
    metrics: dict[str, float] = {}


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1)


def decode_manifest(data: bytes) -> Manifest:
    """Raises CheckpointError(MANIFEST_INVALID) naming the field."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(Fault.MANIFEST_INVALID, f"{MANIFEST_FILE} is not valid: {error}") from error
    except RecursionError as error:
        raise CheckpointError(Fault.MANIFEST_INVALID, f"{MANIFEST_FILE} is not valid: it is nested too deeply") from error
    if manifest.format != FORMAT:
        raise CheckpointError(
            Fault.MANIFEST_INVALID,
            f"{MANIFEST_FILE} has format {manifest.format}, this program reads format {FORMAT}; update it or publish again",
        )
    return manifest


def is_version_name(version: str) -> bool:
    return _VERSION.fullmatch(version) is not None


def is_model_name(model: str) -> bool:
    return _MODEL.fullmatch(model) is not None


def check_version_name(version: str) -> None:
    if not is_version_name(version):
        raise CheckpointError(
            Fault.BAD_NAME,
            f"version {version!r} is not valid: 1 to 128 letters, digits, '.', '_' or '-', starting with a letter or digit",
        )


def check_published_version_name(version: str) -> None:
    """As check_version_name, for a version about to be published: `base` is what was served before any swap."""
    check_version_name(version)
    if version == BASE_VERSION:
        raise CheckpointError(Fault.BAD_NAME, f"version {BASE_VERSION!r} is reserved for the weights a replica starts with")


def check_model_name(model: str) -> None:
    if not is_model_name(model):
        raise CheckpointError(
            Fault.BAD_NAME,
            f"model {model!r} is not valid: NAME or OWNER/NAME, each of letters, digits, '.', '_' or '-', "
            "starting with a letter or digit",
        )


def layout_fingerprint(tensors: dict[str, TensorSpec]) -> str:
    """sha256 over the sorted names, dtypes and shapes: two checkpoints with the same one can be loaded over each other."""
    digest = hashlib.sha256()
    for name, spec in sorted(tensors.items()):
        digest.update(f"{name}\t{spec}\n".encode())
    return digest.hexdigest()


def check_loadable(tensors: dict[str, TensorSpec], base: dict[str, TensorSpec]) -> None:
    """Raises CheckpointError unless `tensors` can replace `base` completely: same names, shapes and dtypes.

    An engine that lacks a tensor in a checkpoint keeps the old one and only logs it, which would be a silent mixture of
    two versions, so the comparison is made before anything is loaded.
    """
    if missing := sorted(base.keys() - tensors.keys()):
        raise CheckpointError(Fault.TENSOR_MISSING, f"{_some(missing)} in the served model but not in the checkpoint")
    if unknown := sorted(tensors.keys() - base.keys()):
        raise CheckpointError(Fault.TENSOR_UNKNOWN, f"{_some(unknown)} in the checkpoint but not in the served model")
    for name, want in sorted(base.items()):
        have = tensors[name]
        if have.shape != want.shape:
            raise CheckpointError(
                Fault.TENSOR_SHAPE,
                f"tensor {name} has shape {list(have.shape)}, the served model needs {list(want.shape)}",
            )
        if have.dtype != want.dtype:
            raise CheckpointError(
                Fault.TENSOR_DTYPE, f"tensor {name} has dtype {have.dtype}, the served model needs {want.dtype}"
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    if len(names) == 1:
        return f"tensor {shown} is"
    return f"{len(names)} tensors ({shown}{', ...' if len(names) > 3 else ''}) are"
