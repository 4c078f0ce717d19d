"""Reads what a safetensors file says it holds, without its data and without trusting it.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the tensors' bytes.
"""

import math
from pathlib import Path
from typing import BinaryIO

import msgspec

# The format's own reference implementation refuses longer headers; so do we, before allocating.
HEADER_BYTES_MAX = 100_000_000

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64,
    "F4": 4,
}  # fmt: skip


class MalformedSafetensors(ValueError):
    """The file is not a well-formed safetensors file; the message says where and why."""


class TensorSpec(msgspec.Struct, frozen=True):
    """What must agree for one tensor to be loaded in place of another."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_safetensors_header(path: Path) -> dict[str, TensorSpec]:
    """Tensor name -> dtype and shape, after checking that the offsets tile the file exactly.

    Raises MalformedSafetensors for a truncated or inconsistent file, OSError if it cannot be read.
    """
    with path.open("rb") as file:
        header = _read_header(file, path.name)
        data_bytes = path.stat().st_size - file.tell()
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(value, type=_Entry) for name, value in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedSafetensors(f"{path.name}: the header is not valid: {error}") from error
    except RecursionError as error:
        raise MalformedSafetensors(f"{path.name}: the header is not valid: it is nested too deeply") from error
    _check_tiling(path.name, entries, data_bytes)
    return {name: TensorSpec(dtype=entry.dtype, shape=entry.shape) for name, entry in entries.items()}


def _read_header(file: BinaryIO, name: str) -> bytes:
    size_field = file.read(8)
    if len(size_field) < 8:
        raise MalformedSafetensors(f"{name}: is not a safetensors file: it is only {len(size_field)} bytes long")
    size = int.from_bytes(size_field, "little")
    if size > HEADER_BYTES_MAX:
        raise MalformedSafetensors(
            f"{name}: is not a safetensors file: it would begin with a header of {size} bytes, more than {HEADER_BYTES_MAX}"
        )
    header = file.read(size)
    if len(header) < size:
        raise MalformedSafetensors(f"{name}: truncated inside the header ({len(header)} of {size} bytes)")
    return header


def _check_tiling(file_name: str, entries: dict[str, _Entry], data_bytes: int) -> None:
    expected_start = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        bits = DTYPE_BITS.get(entry.dtype)
        if bits is None:
            raise MalformedSafetensors(f"{file_name}: tensor {name} has unknown dtype {entry.dtype!r}")
        if any(extent < 0 for extent in entry.shape):
            raise MalformedSafetensors(f"{file_name}: tensor {name} has a negative extent in shape {entry.shape}")
        start, end = entry.data_offsets
        if start != expected_start or (end - start) * 8 != bits * math.prod(entry.shape):
            raise MalformedSafetensors(
                f"{file_name}: tensor {name} {entry.dtype}{list(entry.shape)} does not fit its data offsets [{start}, {end}]"
            )
        expected_start = end
    if expected_start != data_bytes:
        raise MalformedSafetensors(f"{file_name}: holds {data_bytes} bytes of data, its header describes {expected_start}")
