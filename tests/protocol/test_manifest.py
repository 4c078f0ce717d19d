import pytest

from protocol.manifest import (
    Canary,
    CheckpointError,
    Fault,
    FileSpec,
    Manifest,
    check_loadable,
    check_model_name,
    check_published_version_name,
    check_version_name,
    decode_manifest,
    encode_manifest,
    layout_fingerprint,
)
from protocol.safetensors_header import TensorSpec

EMBED = TensorSpec(dtype="BF16", shape=(4, 2))
NORM = TensorSpec(dtype="F32", shape=(2,))
BASE = {"embed": EMBED, "norm": NORM}

MANIFEST = Manifest(
    model="org/model",
    version="v2",
    parent="v1",
    step=400,
    created_unix=1.5,
    base_fingerprint=layout_fingerprint(BASE),
    files={"model.safetensors": FileSpec(sha256="ab" * 32, size=24)},
    tensors=BASE,
    tokenizer_sha256="cd" * 32,
    stop_token_ids=(2, 7),
    canaries=(Canary(prompt_token_ids=(1, 5), logprobs=(-0.25,)),),
    metrics={"reward": 0.5},
)


def test_a_manifest_survives_its_file() -> None:
    """What a trainer publishes is what a replica reads."""
    assert decode_manifest(encode_manifest(MANIFEST)) == MANIFEST


def test_equal_manifests_are_equal_bytes() -> None:
    """A seal over the bytes depends on the content, not on the order in which it was collected."""
    reordered = Manifest(**{**_fields(), "tensors": {"norm": NORM, "embed": EMBED}})  # type: ignore[arg-type]
    assert encode_manifest(reordered) == encode_manifest(MANIFEST)


def _fields() -> dict[str, object]:
    return {name: getattr(MANIFEST, name) for name in Manifest.__struct_fields__}


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "not valid"),
        (b"{", "not valid"),
        (b"\xff", "not valid"),
        (b'{"format": 1}', "missing required field"),
        (encode_manifest(MANIFEST).replace(b'"size": 24', b'"size": "24"'), "size|files"),
        (encode_manifest(MANIFEST).replace(b'"format": 1', b'"format": 2'), "has format 2, this program reads format 1"),
    ],
)
def test_a_manifest_that_cannot_be_read_says_why(data: bytes, complaint: str) -> None:
    """The operator learns which field is wrong."""
    with pytest.raises(CheckpointError, match=complaint) as caught:
        decode_manifest(data)
    assert caught.value.fault is Fault.MANIFEST_INVALID


@pytest.mark.parametrize("name", ["v1", "step-400", "2026.11.30_a", "A" * 128])
def test_plain_version_names_are_taken(name: str) -> None:
    """Steps, dates and tags can be versions."""
    check_version_name(name)
    check_published_version_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "-v", "a/b", "../x", "a b", "a\n", "ä", "a\0", "A" * 129, "v+1"])
def test_names_that_could_leave_the_store_or_confuse_a_label_are_refused(name: str) -> None:
    """A version is one plain folder name; `+` divides it from the epoch in the response header."""
    with pytest.raises(CheckpointError, match="is not valid") as caught:
        check_version_name(name)
    assert caught.value.fault is Fault.BAD_NAME


def test_base_cannot_be_published() -> None:
    """`base` always means the weights a replica started with."""
    check_version_name("base")
    with pytest.raises(CheckpointError, match="reserved"):
        check_published_version_name("base")


@pytest.mark.parametrize("name", ["model", "org/model", "GLM-4.5-Air", "a/b.c_d-e"])
def test_hub_style_model_names_are_taken(name: str) -> None:
    """The name clients use is the name in the store."""
    check_model_name(name)


@pytest.mark.parametrize("name", ["", "/m", "m/", "a/b/c", "../m", "a/..", ".m", "a//b", "m\n", "a\\b"])
def test_model_names_that_are_paths_are_refused(name: str) -> None:
    """No model name leads out of the store."""
    with pytest.raises(CheckpointError, match="is not valid") as caught:
        check_model_name(name)
    assert caught.value.fault is Fault.BAD_NAME


def test_the_fingerprint_is_of_the_layout_alone() -> None:
    """Two checkpoints that can replace each other have the same one; any other name, shape or dtype changes it."""
    assert layout_fingerprint({"norm": NORM, "embed": EMBED}) == layout_fingerprint(BASE)
    others = [
        {"embed": EMBED},
        {**BASE, "extra": NORM},
        {"embed2": EMBED, "norm": NORM},
        {**BASE, "embed": TensorSpec(dtype="F16", shape=(4, 2))},
        {**BASE, "embed": TensorSpec(dtype="BF16", shape=(2, 4))},
        {**BASE, "embed": TensorSpec(dtype="BF16", shape=(8,))},
    ]
    assert len({layout_fingerprint(layout) for layout in [BASE, *others]}) == len(others) + 1


def test_a_complete_checkpoint_is_loadable() -> None:
    """Same names, shapes and dtypes: nothing of the old weights can remain."""
    check_loadable(dict(reversed(BASE.items())), BASE)


@pytest.mark.parametrize(
    ("tensors", "fault", "complaint"),
    [
        ({"embed": EMBED}, Fault.TENSOR_MISSING, "tensor norm is in the served model but not in the checkpoint"),
        ({}, Fault.TENSOR_MISSING, r"2 tensors \(embed, norm\) are in the served model"),
        ({**BASE, "extra": NORM}, Fault.TENSOR_UNKNOWN, "tensor extra is in the checkpoint but not in the served model"),
        ({**BASE, "norm": TensorSpec("F32", (3,))}, Fault.TENSOR_SHAPE, r"norm has shape \[3\], the served model needs \[2\]"),
        ({**BASE, "norm": TensorSpec("F16", (2,))}, Fault.TENSOR_DTYPE, "norm has dtype F16, the served model needs F32"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_would_mix_with_the_old_weights_is_refused(
    tensors: dict[str, TensorSpec], fault: Fault, complaint: str
) -> None:
    """An engine keeps the old tensor where a checkpoint has none; that mixture never gets as far as the engine."""
    with pytest.raises(CheckpointError, match=complaint) as caught:
        check_loadable(tensors, BASE)
    assert caught.value.fault is fault


def test_a_long_list_of_missing_tensors_is_cut() -> None:
    """One line, whatever is missing."""
    base = {f"layer.{number}": NORM for number in range(100)}
    with pytest.raises(CheckpointError, match=r"100 tensors \(layer\.0, layer\.1, layer\.10, \.\.\.\)"):
        check_loadable({}, base)
