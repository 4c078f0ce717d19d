"""A model folder of a few kilobytes for the simulated engine: real files in real formats, made-up weights.

Publishing, verifying and swapping treat it like any other model, so that they can be tried without one.
"""

import json
import math
import random
import struct
from pathlib import Path

SIM_MODEL_NAME = "simulated"

_HIDDEN = 8
_VOCABULARY = 32
_CONFIG = {
    "architectures": ["SimulatedForCausalLM"],
    "model_type": "simulated",
    "hidden_size": _HIDDEN,
    "vocab_size": _VOCABULARY,
    "num_hidden_layers": 1,
    "max_position_embeddings": 32768,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}
_SHAPES: dict[str, tuple[int, ...]] = {
    "lm_head.weight": (_VOCABULARY, _HIDDEN),
    "model.embed_tokens.weight": (_VOCABULARY, _HIDDEN),
    "model.layers.0.mlp.weight": (_HIDDEN, _HIDDEN),
    "model.norm.weight": (_HIDDEN,),
}


def write_sim_model(folder: Path, seed: int = 0) -> None:
    """Writes config.json and model.safetensors (float32) into `folder`. Equal seeds give equal bytes.

    Models of different seeds have the same layout, so each can replace another.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG, indent=2) + "\n", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(_encode_safetensors(random.Random(seed)))


def _encode_safetensors(rng: random.Random) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, shape in _SHAPES.items():
        start = len(data)
        count = math.prod(shape)
        data += struct.pack(f"<{count}f", *(rng.gauss(0.0, 0.02) for _ in range(count)))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, len(data)]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format aligns the data to 8 bytes
    return len(encoded).to_bytes(8, "little") + encoded + bytes(data)
