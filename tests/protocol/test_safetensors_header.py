import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.safetensors_header import DTYPE_BITS, MalformedSafetensors, TensorSpec, read_safetensors_header
from tests.protocol.folders import float32, write_raw, write_safetensors


def test_the_layout_of_a_file_is_read_without_its_data(tmp_path: Path) -> None:
    """A checkpoint's names, dtypes and shapes are known before a byte of weights is loaded."""
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {"a": float32([2, 3]), "b": ("BF16", [5], b"\0" * 10), "scalar": ("I64", [], b"\0" * 8)})
    assert read_safetensors_header(file) == {
        "a": TensorSpec(dtype="F32", shape=(2, 3)),
        "b": TensorSpec(dtype="BF16", shape=(5,)),
        "scalar": TensorSpec(dtype="I64", shape=()),
    }


def test_metadata_is_no_tensor(tmp_path: Path) -> None:
    """What transformers writes beside the tensors is passed over."""
    file = tmp_path / "model.safetensors"
    write_raw(file, b'{"__metadata__":{"format":"pt"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x")
    assert list(read_safetensors_header(file)) == ["a"]


def test_tensors_without_elements_take_no_room(tmp_path: Path) -> None:
    """An empty tensor may stand between others."""
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {"a": float32([2]), "empty": float32([0, 9]), "b": float32([1])})
    assert read_safetensors_header(file)["empty"].shape == (0, 9)


def test_an_empty_tensor_written_after_its_neighbour_is_read(tmp_path: Path) -> None:
    """The order of the header's entries carries no meaning, so equal starts must not be taken for a gap."""
    file = tmp_path / "model.safetensors"
    header = {
        "full": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "empty": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},
    }
    write_raw(file, json.dumps(header).encode(), b"\0" * 8)
    assert set(read_safetensors_header(file)) == {"full", "empty"}


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "complaint"),
    [
        ({"a": ENTRY}, b"\0" * 7, "holds 7 bytes of data, its header describes 8"),
        ({"a": ENTRY}, b"\0" * 9, "holds 9 bytes of data, its header describes 8"),
        ({"a": {**ENTRY, "shape": [3]}}, b"\0" * 8, "does not fit its data offsets"),
        ({"a": {**ENTRY, "data_offsets": [4, 12]}}, b"\0" * 12, "does not fit its data offsets"),
        ({"a": {**ENTRY, "data_offsets": [8, 0]}}, b"\0" * 8, "does not fit its data offsets"),
        ({"a": ENTRY, "b": ENTRY}, b"\0" * 8, "does not fit its data offsets"),
        ({"a": {**ENTRY, "shape": [-2]}}, b"\0" * 8, "negative extent"),
        ({"a": {**ENTRY, "shape": [-2, -1]}}, b"\0" * 8, "negative extent"),
        ({"a": {**ENTRY, "dtype": "F31"}}, b"\0" * 8, "unknown dtype 'F31'"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8, "header is not valid"),
        ({"a": {**ENTRY, "surprise": 1}}, b"\0" * 8, "header is not valid"),
        ({"a": {**ENTRY, "shape": [2.5]}}, b"\0" * 8, "header is not valid"),
        ([1, 2], b"", "header is not valid"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path, header: object, data: bytes, complaint: str) -> None:
    """A truncated, overlapping or invented file never reaches a loader, and the reason names the file."""
    file = tmp_path / "bad.safetensors"
    write_raw(file, json.dumps(header).encode(), data)
    with pytest.raises(MalformedSafetensors, match=complaint) as caught:
        read_safetensors_header(file)
    assert str(caught.value).startswith("bad.safetensors:")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is not a safetensors file: it is only 0 bytes long"),
        (b"\x08\0\0", "is only 3 bytes long"),
        ((100).to_bytes(8, "little") + b"{}", "truncated inside the header"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "is not a safetensors file: it would begin with a header of"),
        ((3).to_bytes(8, "little") + b"{\xff}", "header is not valid"),
        ((4).to_bytes(8, "little") + b"oops", "header is not valid"),
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    """No length in a file makes us allocate what the file does not hold."""
    file = tmp_path / "bad.safetensors"
    file.write_bytes(content)
    with pytest.raises(MalformedSafetensors, match=complaint):
        read_safetensors_header(file)


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    """A missing file is told from a bad one."""
    with pytest.raises(FileNotFoundError):
        read_safetensors_header(tmp_path / "absent.safetensors")


@given(content=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Whatever stands in a file, the reader ends with a layout or with its one error."""
    file = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    file.write_bytes(len(content).to_bytes(8, "little") + content)
    with contextlib.suppress(MalformedSafetensors):
        read_safetensors_header(file)


@given(shapes=st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BITS)), st.lists(st.integers(0, 4), max_size=3)), max_size=5))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[str, list[int]]]) -> None:
    """Every dtype of the format and every shape comes back as it was written."""
    tensors = {}
    for number, (dtype, shape) in enumerate(shapes):
        count = 1
        for extent in shape:
            count *= extent
        if DTYPE_BITS[dtype] * count % 8:
            continue  # half bytes cannot end a tensor
        tensors[f"t{number}"] = (dtype, shape, b"\0" * (DTYPE_BITS[dtype] * count // 8))
    file = tmp_path_factory.getbasetemp() / "roundtrip.safetensors"
    write_safetensors(file, tensors)
    expected = {name: TensorSpec(dtype=dtype, shape=tuple(shape)) for name, (dtype, shape, _) in tensors.items()}
    assert read_safetensors_header(file) == expected
