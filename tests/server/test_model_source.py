import json
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.checkpoint_files import read_layout
from protocol.publisher import publish
from server.model_source import (
    DEFAULT_MODEL,
    ModelUnavailable,
    ResolvedModel,
    is_default_model_ready,
    resolve_model,
    resolve_sim_model,
)
from server.sim_model import SIM_MODEL_NAME, write_sim_model
from tests.waiting import wait_until


def ignore(_line: str) -> None: ...


def test_a_folder_is_served_under_its_name(tmp_path: Path) -> None:
    """--model FOLDER needs no second flag."""
    write_sim_model(tmp_path / "my-model")
    expected = ResolvedModel(str((tmp_path / "my-model").resolve()), "my-model")
    assert resolve_model(str(tmp_path / "my-model"), tmp_path, ignore) == expected
    (tmp_path / "link").symlink_to(tmp_path / "my-model")
    assert resolve_model(str(tmp_path / "link"), tmp_path, ignore) == expected


def test_a_hub_id_is_passed_through(tmp_path: Path) -> None:
    """The engine knows how to fetch it; nothing is looked up or written here."""
    assert resolve_model("org/name-1.5", tmp_path, ignore) == ResolvedModel("org/name-1.5", "org/name-1.5")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("EMPTY", "holds no config.json"),
        ("NO_WEIGHTS", "holds no *.safetensors"),
        ("FILE", "is a file; give the folder"),
        ("ABSENT", "is no folder here, not the default model smollm2-135m-instruct, and no hub id"),
        ("smollm2-135m", "is no folder here"),
        ("a/b/c", "is no folder here"),
        ("../a/b", "is no folder here"),
    ],
)
def test_what_is_no_model_gets_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, complaint: str
) -> None:
    """Cause and remedy at once, not an engine's traceback a minute later."""
    monkeypatch.chdir(tmp_path)
    for name in ("EMPTY", "NO_WEIGHTS"):
        (tmp_path / name).mkdir()
    (tmp_path / "NO_WEIGHTS" / "config.json").write_text("{}")
    (tmp_path / "FILE").write_text("")
    with pytest.raises(ModelUnavailable) as caught:
        resolve_model(reference, tmp_path, ignore)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_default_model_is_made_once(tmp_path: Path) -> None:
    """A cache that holds it is used as it is, at no cost."""
    ready = tmp_path / "models" / DEFAULT_MODEL
    assert not is_default_model_ready(tmp_path)
    write_sim_model(ready)
    lines: list[str] = []
    assert resolve_model(DEFAULT_MODEL, tmp_path, lines.append) == ResolvedModel(str(ready), DEFAULT_MODEL)
    assert lines == []
    assert is_default_model_ready(tmp_path)


CALLER = """
import sys
from pathlib import Path
from server.model_source import DEFAULT_MODEL, resolve_model
print(resolve_model(DEFAULT_MODEL, Path(sys.argv[1]), lambda line: print(line, flush=True)).folder_or_id, flush=True)
"""


def start_caller(cache: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", CALLER, str(cache)], stdout=subprocess.PIPE, text=True)


@pytest.mark.timeout(300)
def test_the_default_model_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    """A conversion that is killed leaves no model and no process; callers at the same time make it once and share it.

    The real conversion: about half a minute of work.
    """
    models = tmp_path / "models"
    killed = start_caller(tmp_path)
    assert killed.stdout is not None
    killed.stdout.readline()
    wait_until(lambda: list(models.glob(".making-*")), 30, "the conversion to begin")
    killed.kill()
    killed.wait(10)
    killed.stdout.close()
    assert not (models / DEFAULT_MODEL).exists()
    left = str(next(models.glob(".making-*")))
    wait_until(lambda: not _processes_that_name(left), 20, "the conversion's processes to end")

    callers = [start_caller(tmp_path), start_caller(tmp_path)]
    outputs = [caller.communicate(timeout=240)[0].splitlines() for caller in callers]
    assert [lines[-1] for lines in outputs] == [str(models / DEFAULT_MODEL)] * 2
    assert sorted("writing the weights" in lines for lines in outputs) == [False, True]
    assert {entry.name for entry in models.iterdir()} == {DEFAULT_MODEL, f".{DEFAULT_MODEL}.lock"}

    folder = models / DEFAULT_MODEL
    layout = read_layout(folder)
    assert layout["model.embed_tokens.weight"].shape == (49152, 576)
    assert {spec.dtype for spec in layout.values()} == {"BF16"}
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    manifest = publish(folder, store=tmp_path / "store", model=DEFAULT_MODEL, version="v1")
    assert manifest.tokenizer_sha256 is not None
    assert manifest.chat_template_sha256 is not None
    assert manifest.stop_token_ids == (2,)
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text()


def _processes_that_name(text: str) -> list[str]:
    return [path.name for path in Path("/proc").glob("[0-9]*") if text in _command_line(path)]


def _command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""  # it ended while we looked


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    """The line names the folder and the operating system's reason."""
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(ModelUnavailable, match=r"cannot write .*: File exists; free some space there"):
        resolve_sim_model(tmp_path)


def test_the_simulated_model_is_a_real_folder(tmp_path: Path) -> None:
    """Publish and swap treat it like any model; it is written once."""
    resolved = resolve_sim_model(tmp_path)
    folder = tmp_path / "models" / SIM_MODEL_NAME
    assert resolved == ResolvedModel(str(folder), SIM_MODEL_NAME)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_sim_model(tmp_path) == resolved
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert publish(folder, store=tmp_path / "store", model=SIM_MODEL_NAME, version="v1").tensors == read_layout(folder)


def test_simulated_models_differ_in_their_weights_alone(tmp_path: Path) -> None:
    """One can replace another; equal seeds are equal bytes."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_sim_model(tmp_path / name, seed)
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert weights["a"] == weights["b"] != weights["c"]
    assert read_layout(tmp_path / "a") == read_layout(tmp_path / "c")
