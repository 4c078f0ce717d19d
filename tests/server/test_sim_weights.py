"""Weights of the simulated engine."""

import json
from pathlib import Path

import pytest

from server.sim_model import write_sim_model
from server.sim_weights import BUILT_IN_WEIGHTS, WeightsError, check_same_layout, load_weights


def write_tensors(folder: Path, **shapes: list[int]) -> Path:
    """A safetensors file of zeros (float32)."""
    folder.mkdir(exist_ok=True)
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(end))
    return folder


def test_the_fingerprint_is_that_of_the_contents(tmp_path: Path) -> None:
    """Equal files give equal fingerprints, other files others."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_sim_model(tmp_path / name, seed)
    a, b, c = (load_weights(tmp_path / name) for name in "abc")
    assert a.fingerprint == b.fingerprint != c.fingerprint
    assert a.tensors == c.tensors != {}


def test_a_folder_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    """A missing folder, one without weights, and broken files each say what is wrong."""
    with pytest.raises(WeightsError, match="no such folder"):
        load_weights(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match=r"no \*.safetensors"):
        load_weights(tmp_path)
    for content in (b"", b"\xff" * 64, (10).to_bytes(8, "little") + b"{", (8).to_bytes(8, "little") + b"nonsense"):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(WeightsError, match=r"cannot read model.safetensors"):
            load_weights(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    """A file shorter than its header says is not loaded."""
    file = write_tensors(tmp_path / "m", a=[4]) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WeightsError, match="ends inside its tensors"):
        load_weights(tmp_path / "m")


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"a": [2]}, "missing tensors: b"),
        ({"a": [2], "b": [3], "c": [1]}, "unknown tensors: c"),
        ({"a": [2], "b": [4]}, r"tensor b is F32\[4\], the model has F32\[3\]"),
    ],
)
def test_weights_of_another_layout_are_refused(tmp_path: Path, shapes: dict[str, list[int]], reason: str) -> None:
    """Missing, unknown and differently shaped tensors are named."""
    current = load_weights(write_tensors(tmp_path / "current", a=[2], b=[3]))
    with pytest.raises(WeightsError, match=reason):
        check_same_layout(load_weights(write_tensors(tmp_path / "new", **shapes)), current)


def test_built_in_weights_can_be_replaced_by_any(tmp_path: Path) -> None:
    """An engine started without a model takes any folder."""
    check_same_layout(load_weights(write_tensors(tmp_path / "new", a=[2])), BUILT_IN_WEIGHTS)
