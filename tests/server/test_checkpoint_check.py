"""Finding the served model's tensors, and the reasons why no swap can begin."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.checkpoint_files import read_layout
from protocol.manifest import CheckpointError, Fault
from protocol.publisher import publish
from server.checkpoint_check import SwapRefused, base_layout, verify_version
from server.sim_model import write_sim_model


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_sim_model(tmp_path / "source")
    publish(tmp_path / "source", store=tmp_path / "store", model="m", version="v2")
    return tmp_path / "store"


def test_a_folder_names_its_own_tensors(tmp_path: Path) -> None:
    """A local model is its own reference."""
    write_sim_model(tmp_path)
    assert base_layout(str(tmp_path)) == read_layout(tmp_path) != {}


def test_a_model_that_fits_passes(store: Path) -> None:
    """Verified bytes, and the very tensors of the served model."""
    verify_version(store, "m", "v2", base_layout(str(store.parent / "source")))


def test_a_model_of_another_shape_does_not(store: Path) -> None:
    """What the engine would only log is an error here."""
    base = base_layout(str(store.parent / "source"))
    del base["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is in the checkpoint but not in the served") as error:
        verify_version(store, "m", "v2", base)
    assert error.value.fault is Fault.TENSOR_UNKNOWN


def test_without_a_store_there_is_nothing_to_swap_to() -> None:
    """The message names the flag."""
    with pytest.raises(SwapRefused, match="--store DIR") as error:
        verify_version(None, "m", "v2")
    assert error.value.code == "no_store"


@pytest.mark.parametrize("model", [None, "nobody/has-this", "/no/such/folder"])
def test_without_a_reference_there_is_no_swap(model: str | None) -> None:
    """Weights that cannot be compared with the served ones are not loaded over them."""
    with pytest.raises(SwapRefused) as error:
        base_layout(model)
    assert error.value.code == "no_base"


def test_a_hub_id_is_found_in_the_cache(tmp_path: Path) -> None:
    """The engine has downloaded it, so its files are on this machine; nothing is fetched again."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "models--owner--name"
    write_sim_model(cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    result = subprocess.run(
        [sys.executable, "-c", "from server.checkpoint_check import base_layout; print(sorted(base_layout('owner/name')))"],
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "model.norm.weight" in result.stdout, result.stderr
