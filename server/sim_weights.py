"""Weights of the simulated engine: a fingerprint of the safetensors files of a folder, and the tensors they declare.

Only the headers are parsed; the bytes are hashed. No tensor library is needed.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_READ_BYTES = 1 << 20
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_BUILT_IN_FINGERPRINT = hashlib.sha256(b"built-in weights of the simulated engine").digest()


class WeightsError(Exception):
    """A folder whose weights cannot be loaded; the message names the folder or tensor and the reason."""


@dataclass(frozen=True, slots=True)
class Weights:
    """`fingerprint` is the sha256 over all files' contents in name order; `tensors` maps names to (dtype, shape)."""

    fingerprint: bytes
    tensors: dict[str, tuple[str, tuple[int, ...]]]


BUILT_IN_WEIGHTS = Weights(_BUILT_IN_FINGERPRINT, {})


def load_weights(folder: Path) -> Weights:
    """Reads a folder. Blocking: call it in a thread.

    Raises:
        WeightsError: no such folder, no *.safetensors in it, or a file that is not in that format.
    """
    if not folder.is_dir():
        raise WeightsError(f"no such folder: {folder}")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"Cannot find any model weights with {folder}: it holds no *.safetensors file")
    digest = hashlib.sha256()
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in files:
        try:
            with path.open("rb") as file:
                tensors.update(_read_header(file, digest_into=digest))
                while chunk := file.read(_READ_BYTES):
                    digest.update(chunk)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightsError(f"cannot read {path.name} as safetensors: {error}") from error
    return Weights(digest.digest(), tensors)


def check_same_layout(new: Weights, current: Weights) -> None:
    """Raises WeightsError unless `new` has exactly the tensors, shapes and types of `current`.

    Weights without tensors (the built-in ones) take any layout.
    """
    if not current.tensors:
        return
    if missing := sorted(current.tensors.keys() - new.tensors.keys()):
        raise WeightsError(f"missing tensors: {', '.join(missing[:5])}{_more(missing)}")
    if unknown := sorted(new.tensors.keys() - current.tensors.keys()):
        raise WeightsError(f"unknown tensors: {', '.join(unknown[:5])}{_more(unknown)}")
    for name, (dtype, shape) in current.tensors.items():
        if new.tensors[name] != (dtype, shape):
            new_dtype, new_shape = new.tensors[name]
            raise WeightsError(f"tensor {name} is {new_dtype}{list(new_shape)}, the model has {dtype}{list(shape)}")


def _more(names: list[str]) -> str:
    return f" and {len(names) - 5} more" if len(names) > 5 else ""


def _read_header(file: BinaryIO, *, digest_into: "hashlib._Hash") -> dict[str, tuple[str, tuple[int, ...]]]:
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > _MAX_HEADER_BYTES:
        raise ValueError("the header length is not plausible")
    raw = file.read(length)
    if len(raw) < length:
        raise ValueError("the file ends inside its header")
    digest_into.update(prefix)
    digest_into.update(raw)
    header = json.loads(raw)
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    position = file.tell()
    if file.seek(0, 2) - position < end:
        raise ValueError("the file ends inside its tensors")
    file.seek(position)
    return {
        name: (str(entry["dtype"]), tuple(int(size) for size in entry["shape"]))
        for name, entry in header.items()
        if name != "__metadata__"
    }
