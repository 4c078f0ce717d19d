"""Small model folders for tests, written byte by byte."""

import json
import math
from collections.abc import Mapping
from pathlib import Path


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, list[int], bytes]]) -> None:
    """Tensors are (dtype, shape, data); nothing is checked, so that wrong files can be written too."""
    header: dict[str, object] = {}
    start = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + len(data)]}
        start += len(data)
    write_raw(path, json.dumps(header).encode(), b"".join(data for _, _, data in tensors.values()))


def write_raw(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def float32(shape: list[int], byte: int = 0) -> tuple[str, list[int], bytes]:
    return ("F32", shape, bytes([byte]) * (4 * math.prod(shape)))


def write_model(folder: Path, *, byte: int = 1) -> Path:
    """A model of two tensors in two shards, with a tokenizer and a chat template."""
    folder.mkdir(parents=True)
    write_safetensors(folder / "model-00001-of-00002.safetensors", {"embed": float32([4, 2], byte)})
    write_safetensors(folder / "model-00002-of-00002.safetensors", {"norm": float32([2], byte)})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": [2, 7]}))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (folder / "README.md").write_text("not for the store")
    return folder
