import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.checkpoint_files import read_layout, version_folder
from protocol.manifest import MANIFEST_FILE, STABLE_FILE, CheckpointError, Fault, Manifest
from protocol.publisher import publish
from protocol.store import models, read_manifest, verify, versions
from tests.protocol.folders import float32, write_model, write_raw, write_safetensors

MODEL = "tiny"
CONFIGS = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "generation_config.json",
)
DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def publish_v1(source: Path, store: Path) -> Manifest:
    return publish(source, store=store, model=MODEL, version="v1")


def fault_of(act: Callable[[], object]) -> tuple[Fault, str]:
    with pytest.raises(CheckpointError) as caught:
        act()
    message = str(caught.value)
    assert "\n" not in message
    return caught.value.fault, message


def test_a_published_version_verifies(source: Path, store: Path) -> None:
    """What was published can be loaded: every file, byte and tensor is the one that was sealed."""
    manifest = publish(source, store=store, model="org/tiny", version="v1", parent="v0", step=3, metrics={"reward": 1.0})
    assert verify(store, "org/tiny", "v1") == manifest
    assert (manifest.model, manifest.version, manifest.parent, manifest.step) == ("org/tiny", "v1", "v0", 3)
    assert manifest.tensors == read_layout(source)
    assert manifest.metrics == {"reward": 1.0}
    for name, spec in manifest.files.items():
        data = (store / "org" / "tiny" / "v1" / name).read_bytes()
        assert data == (source / name).read_bytes()
        assert (spec.size, spec.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_only_what_a_loader_needs_is_published(source: Path, store: Path) -> None:
    """A README or an older manifest in the source folder stays there."""
    (source / MANIFEST_FILE).write_text("{}")
    (source / STABLE_FILE).write_text("x")
    (source / "subfolder").mkdir()
    assert set(publish_v1(source, store).files) == {
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_the_seal_is_the_manifests_hash(source: Path, store: Path) -> None:
    """STABLE ties the manifest, and through it every byte, to one published state."""
    publish_v1(source, store)
    folder = store / MODEL / "v1"
    assert (folder / STABLE_FILE).read_text().strip() == hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).hexdigest()


def test_stop_tokens_and_template_come_from_where_loaders_look(source: Path, store: Path) -> None:
    """generation_config.json wins over config.json, chat_template.jinja over tokenizer_config.json."""
    first = publish_v1(source, store)
    assert first.stop_token_ids == (2, 7)
    assert first.chat_template_sha256 == hashlib.sha256(b"{{ messages }}").hexdigest()
    (source / "generation_config.json").write_text('{"eos_token_id": 5}')
    (source / "chat_template.jinja").write_text("other")
    second = publish(source, store=store, model=MODEL, version="v2")
    assert second.stop_token_ids == (5,)
    assert second.chat_template_sha256 == hashlib.sha256(b"other").hexdigest()
    assert second.tokenizer_sha256 == first.tokenizer_sha256 is not None


def test_a_model_without_tokenizer_can_be_published(source: Path, store: Path) -> None:
    """Weights alone are a checkpoint too; what is not there is null, not a made-up hash."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    manifest = publish_v1(source, store)
    assert manifest.tokenizer_sha256 is None
    assert manifest.chat_template_sha256 is None


def test_versions_are_listed_oldest_first(source: Path, store: Path) -> None:
    """The list follows publication, not the alphabet, and shows only what is sealed."""
    for version in ("v10", "v9", "a"):
        publish(source, store=store, model=MODEL, version=version)
    publish(source, store=store, model="org/other", version="v1")
    (store / MODEL / "unsealed").mkdir()
    assert versions(store, MODEL) == ["v10", "v9", "a"]
    assert versions(store, "unknown") == []
    assert models(store) == ["org/other", MODEL]


def test_a_version_is_published_once(source: Path, store: Path) -> None:
    """A name always means the same weights."""
    first = publish_v1(source, store)
    fault, message = fault_of(lambda: publish_v1(source, store))
    assert fault is Fault.ALREADY_PUBLISHED
    assert "publish under a new version" in message
    assert verify(store, MODEL, "v1") == first


def test_a_version_whose_writer_died_is_published_again(source: Path, store: Path) -> None:
    """Without STABLE nothing trusts the folder, so it may be replaced."""
    publish_v1(source, store)
    folder = store / MODEL / "v1"
    (folder / STABLE_FILE).unlink()
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"half")
    assert fault_of(lambda: verify(store, MODEL, "v1"))[0] is Fault.NOT_STABLE
    assert versions(store, MODEL) == []
    publish_v1(source, store)
    verify(store, MODEL, "v1")
    assert [entry.name for entry in (store / MODEL).iterdir()] == ["v1"]


def test_a_failed_publication_leaves_nothing(source: Path, store: Path) -> None:
    """A disk that is full halfway is not littered too."""

    def fill(_done: int, _total: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fault, message = fault_of(lambda: publish(source, store=store, model=MODEL, version="v1", progress=fill))
    assert fault is Fault.UNREADABLE
    assert os.strerror(errno.ENOSPC) in message
    assert list((store / MODEL).iterdir()) == []


def test_an_interrupted_publication_leaves_nothing(source: Path, store: Path) -> None:
    """Ctrl-C while copying ends the copy; no half version appears."""

    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(source, store=store, model=MODEL, version="v1", progress=interrupt)
    assert list((store / MODEL).iterdir()) == []


def test_progress_reaches_the_total(source: Path, store: Path) -> None:
    """A progress bar starts below and ends at the number of bytes there are."""
    seen: list[tuple[int, int]] = []
    manifest = publish(source, store=store, model=MODEL, version="v1", progress=lambda done, all_: seen.append((done, all_)))
    total = sum(spec.size for spec in manifest.files.values())
    assert max(seen) == (total, total)
    seen.clear()
    verify(store, MODEL, "v1", progress=lambda done, all_: seen.append((done, all_)))
    assert max(seen) == (total, total)


def test_writers_at_the_same_time_publish_one_whole_version(source: Path, store: Path, tmp_path: Path) -> None:
    """Two trainers that race for a name cannot mix their files; the loser is told so."""
    other = write_model(tmp_path / "other", byte=9)
    outcomes: list[object] = []
    together = threading.Barrier(2)

    def race(folder: Path) -> None:
        together.wait(10)
        try:
            outcomes.append(publish_v1(folder, store))
        except CheckpointError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=race, args=(folder,)) for folder in (source, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    won = [outcome for outcome in outcomes if isinstance(outcome, Manifest)]
    lost = [outcome.fault for outcome in outcomes if isinstance(outcome, CheckpointError)]
    assert won == [verify(store, MODEL, "v1")]
    assert lost == [Fault.ALREADY_PUBLISHED]
    assert [entry.name for entry in (store / MODEL).iterdir()] == ["v1"]


@pytest.mark.parametrize("unsealed", [False, True], ids=["a free name", "over an interrupted copy"])
def test_of_many_writers_exactly_one_wins(source: Path, store: Path, unsealed: bool) -> None:
    """Six at once, thirty times: one is told that it published, the rest that the name is taken, and nothing is left over."""
    for number in range(30):
        version = f"v{number}"
        if unsealed:
            (store / MODEL / version).mkdir(parents=True)
            for name in ("config.json", "tokenizer.json", "model.safetensors"):
                (store / MODEL / version / name).write_text("half")
        faults: list[Fault | None] = []
        together = threading.Barrier(6)

        def race(version: str = version, faults: list[Fault | None] = faults, together: threading.Barrier = together) -> None:
            together.wait(10)
            try:
                publish(source, store=store, model=MODEL, version=version)
            except CheckpointError as error:
                faults.append(error.fault)
            else:
                faults.append(None)

        threads = [threading.Thread(target=race) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(map(str, faults)) == ["None", *["already_published"] * 5]
        verify(store, MODEL, version)
    assert sorted(entry.name for entry in (store / MODEL).iterdir()) == sorted(f"v{number}" for number in range(30))


def test_what_a_killed_writer_staged_is_swept(source: Path, store: Path) -> None:
    """The next publication of the model removes it; what living writers and other machines have staged stays."""
    code = (
        "import sys, os, signal; from pathlib import Path; from protocol.publisher import publish; "
        "publish(Path(sys.argv[1]), store=Path(sys.argv[2]), model='tiny', version='v1', "
        "progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))"
    )
    killed = subprocess.run([sys.executable, "-c", code, source, store], cwd=Path(__file__).parents[2], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    (staged,) = (store / MODEL).iterdir()
    alive = staged.with_name(staged.name.replace(f"-{pid_of(staged)}-", f"-{os.getppid()}-"))
    place = staged.name.split("-")[-3]
    elsewhere = staged.with_name(staged.name.replace(f"-{place}-", "-00000000-"))
    for folder in (alive, elsewhere):
        folder.mkdir()
    publish(source, store=store, model=MODEL, version="v2")
    assert {entry.name for entry in (store / MODEL).iterdir()} == {"v2", alive.name, elsewhere.name}
    assert versions(store, MODEL) == ["v2"]


def pid_of(staged: Path) -> str:
    return staged.name.split("-")[-2]


def test_a_version_cannot_take_the_folder_of_a_model(source: Path, store: Path) -> None:
    """Version d of model c and model c/d would be one folder; whoever comes second is refused, and nothing is lost."""
    first = publish(source, store=store, model="c/d", version="v1")
    fault, message = fault_of(lambda: publish(source, store=store, model="c", version="d"))
    assert fault is Fault.BAD_NAME
    assert f"{store / 'c' / 'd'} cannot become a version" in message
    assert verify(store, "c/d", "v1") == first
    assert (models(store), versions(store, "c"), versions(store, "c/d")) == (["c/d"], [], ["v1"])


@pytest.mark.parametrize("sealed", [True, False])
def test_a_model_cannot_take_the_folder_of_a_version(source: Path, store: Path, sealed: bool) -> None:
    """The other way round; a version that is still being copied counts too."""
    first = publish(source, store=store, model="a", version="b")
    if not sealed:
        (store / "a" / "b" / STABLE_FILE).unlink()
    fault, message = fault_of(lambda: publish(source, store=store, model="a/b", version="v1"))
    assert fault is Fault.BAD_NAME
    assert "version 'b' of model 'a'" in message
    assert not (store / "a" / "b" / "v1").exists()
    if sealed:
        assert verify(store, "a", "b") == first
        assert (models(store), versions(store, "a"), versions(store, "a/b")) == (["a"], ["b"], [])


def test_a_version_named_like_the_seal_is_only_a_version(source: Path, store: Path) -> None:
    """Model c/d with a version STABLE does not look like a sealed version d of model c."""
    publish(source, store=store, model="c/d", version=STABLE_FILE)
    assert fault_of(lambda: publish(source, store=store, model="c", version="d"))[0] is Fault.BAD_NAME
    assert (models(store), versions(store, "c"), versions(store, "c/d")) == (["c/d"], [], [STABLE_FILE])


def test_a_version_is_never_seen_unsealed(source: Path, store: Path) -> None:
    """A reader that looks at any moment finds no version or a whole one: the folder appears with its seal inside."""
    names = [f"v{number}" for number in range(20)]
    has_ended = threading.Event()
    unsealed: list[str] = []

    def watch() -> None:
        while not has_ended.is_set():
            unsealed.extend(
                name for name in names if (store / MODEL / name).exists() and not (store / MODEL / name / STABLE_FILE).exists()
            )

    watcher = threading.Thread(target=watch)
    watcher.start()
    for name in names:
        publish(source, store=store, model=MODEL, version=name)
    has_ended.set()
    watcher.join(30)
    assert unsealed == []
    assert versions(store, MODEL) == names


@pytest.mark.parametrize(
    ("spoil", "fault", "complaint"),
    [
        (lambda folder: (folder / "pytorch_model.bin").write_bytes(b"x"), Fault.UNSAFE_FILE, "save the model as safetensors"),
        (lambda folder: (folder / "modeling.py").write_text("x"), Fault.UNSAFE_FILE, "could run code"),
        (lambda folder: (folder / "config.json").write_text('{"auto_map": {}}'), Fault.UNSAFE_CONFIG, "auto_map"),
        *(
            (
                lambda folder, name=name: (folder / name).write_text('{"inner": [{"auto_map": {}}]}'),
                Fault.UNSAFE_CONFIG,
                f"/{name} has auto_map",
            )
            for name in CONFIGS
        ),
        (lambda folder: (folder / "config.json").write_text("["), Fault.MALFORMED, "not valid JSON"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("["), Fault.MALFORMED, "tokenizer_config.json is not"),
        (lambda folder: (folder / "config.json").write_bytes(DEEP), Fault.MALFORMED, "nested too deeply"),
        (lambda folder: write_raw(folder / "deep.safetensors", DEEP, b""), Fault.MALFORMED, "nested too deeply"),
        (lambda folder: os.mkfifo(folder / "pipe.safetensors"), Fault.UNREADABLE, "is not a regular file"),
        (lambda folder: (folder / "a.json").symlink_to("a.json"), Fault.UNREADABLE, "Too many levels of symbolic links"),
        (lambda folder: (folder / "config.json").write_text("[]"), Fault.MALFORMED, "not valid JSON"),
        (lambda folder: (folder / "config.json").unlink(), Fault.FILE_MISSING, "no config.json; give the folder"),
        (
            lambda folder: (folder / "model-00002-of-00002.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{"),
            Fault.MALFORMED,
            "model-00002-of-00002.safetensors: truncated inside the header",
        ),
        (
            lambda folder: [file.unlink() for file in folder.glob("*.safetensors")],
            Fault.FILE_MISSING,
            "/source holds no .safetensors",
        ),
        (
            lambda folder: write_safetensors(folder / "again.safetensors", {"norm": float32([2])}),
            Fault.MALFORMED,
            "norm stands in another file too",
        ),
    ],
)
def test_a_source_that_must_not_be_loaded_is_not_published(
    source: Path, store: Path, spoil: Callable[[Path], object], fault: Fault, complaint: str
) -> None:
    """Pickles, code and broken folders are refused before anything is sealed."""
    spoil(source)
    found, message = fault_of(lambda: publish_v1(source, store))
    assert found is fault
    assert complaint in message
    assert ".staging" not in message
    assert not (store / MODEL).exists()


def test_a_source_that_is_no_folder_is_refused(source: Path, store: Path) -> None:
    """The message says what to give instead."""
    fault, message = fault_of(lambda: publish(source / "absent", store=store, model=MODEL, version="v1"))
    assert fault is Fault.NOT_FOUND
    assert "give the folder" in message


@pytest.mark.parametrize(("model", "version"), [("../x", "v1"), (MODEL, "../v1"), (MODEL, "base"), ("", "v1")])
def test_names_that_leave_the_store_are_not_published(source: Path, store: Path, model: str, version: str) -> None:
    """Nothing is ever written outside the store."""
    before = sorted(source.parent.rglob("*"))
    fault, _ = fault_of(lambda: publish(source, store=store, model=model, version=version))
    assert fault is Fault.BAD_NAME
    assert sorted(source.parent.rglob("*")) == before


def change_a_byte(folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], object], *, sealed: bool = True) -> None:
    """Changes the manifest, and its seal too, as somebody with access to the store could."""
    manifest = json.loads((folder / MANIFEST_FILE).read_bytes())
    change(manifest)
    encoded = json.dumps(manifest).encode()
    (folder / MANIFEST_FILE).write_bytes(encoded)
    if sealed:
        (folder / STABLE_FILE).write_text(hashlib.sha256(encoded).hexdigest())


def link_outside(folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    outside = folder.parents[2] / "outside.safetensors"
    outside.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(outside)


def list_file(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        spec = {"sha256": hashlib.sha256(b"x").hexdigest(), "size": 1}
        rewrite_manifest(folder, lambda manifest: manifest["files"].update({name: spec}))
        if "/" not in name:
            (folder / name).write_bytes(b"x")

    return spoil


def put_file(name: str, data: bytes) -> Callable[[Path], None]:
    """Writes a file and lists it, as somebody with access to the store could."""

    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(data)
        spec = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        rewrite_manifest(folder, lambda manifest: manifest["files"].update({name: spec}))

    return spoil


def seal_deep_manifest(folder: Path) -> None:
    (folder / MANIFEST_FILE).write_bytes(DEEP)
    (folder / STABLE_FILE).write_text(hashlib.sha256(DEEP).hexdigest())


def become_fifo(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return spoil


def become_loop(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(name)

    return spoil


def become_a_loop_of_folders(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder)


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (change_a_byte, Fault.FILE_CHANGED),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), Fault.FILE_CHANGED),
        (lambda folder: (folder / "tokenizer.json").unlink(), Fault.FILE_MISSING),
        (lambda folder: (folder / "added.json").write_text("{}"), Fault.FILE_UNEXPECTED),
        (lambda folder: (folder / "extra").mkdir(), Fault.FILE_UNEXPECTED),
        (lambda folder: (folder / STABLE_FILE).unlink(), Fault.NOT_STABLE),
        (lambda folder: (folder / STABLE_FILE).write_text(""), Fault.MANIFEST_CHANGED),
        (lambda folder: (folder / MANIFEST_FILE).unlink(), Fault.FILE_MISSING),
        (
            lambda folder: rewrite_manifest(folder, lambda manifest: manifest.update(step=9), sealed=False),
            Fault.MANIFEST_CHANGED,
        ),
        (lambda folder: rewrite_manifest(folder, lambda manifest: manifest.update(version="v9")), Fault.MANIFEST_INVALID),
        (lambda folder: rewrite_manifest(folder, lambda manifest: manifest.pop("files")), Fault.MANIFEST_INVALID),
        (lambda folder: rewrite_manifest(folder, lambda manifest: manifest["tensors"].pop("norm")), Fault.MALFORMED),
        (lambda folder: rewrite_manifest(folder, lambda manifest: manifest.update(base_fingerprint="")), Fault.MALFORMED),
        (list_file("evil.bin"), Fault.UNSAFE_FILE),
        (list_file("evil.py"), Fault.UNSAFE_FILE),
        (list_file("../../../../etc/passwd"), Fault.OUTSIDE_STORE),
        (list_file("/etc/passwd"), Fault.OUTSIDE_STORE),
        (link_outside, Fault.OUTSIDE_STORE),
        (put_file("config.json", b'{"auto_map": {"AutoModel": "evil.Model"}}'), Fault.UNSAFE_CONFIG),
        *((put_file(name, b'{"inner": [{"auto_map": {}}]}'), Fault.UNSAFE_CONFIG) for name in CONFIGS),
        (put_file("config.json", DEEP), Fault.MALFORMED),
        (put_file("deep.safetensors", len(DEEP).to_bytes(8, "little") + DEEP), Fault.MALFORMED),
        (seal_deep_manifest, Fault.MANIFEST_INVALID),
        (become_fifo(STABLE_FILE), Fault.UNREADABLE),
        (become_fifo(MANIFEST_FILE), Fault.UNREADABLE),
        (become_fifo("config.json"), Fault.FILE_MISSING),
        (become_loop(STABLE_FILE), Fault.UNREADABLE),
        (become_loop(MANIFEST_FILE), Fault.UNREADABLE),
        (become_loop("tokenizer.json"), Fault.UNREADABLE),
        (become_a_loop_of_folders, Fault.UNREADABLE),
        (lambda folder: (folder / STABLE_FILE).write_bytes(b" " * 5000), Fault.MALFORMED),
    ],
)
def test_a_checkpoint_that_is_not_what_was_published_is_refused(
    source: Path, store: Path, spoil: Callable[[Path], object], fault: Fault
) -> None:
    """One changed byte, a lost file, a slipped-in pickle or a way out of the store: nothing of it is loaded."""
    publish_v1(source, store)
    spoil(store / MODEL / "v1")
    found, message = fault_of(lambda: verify(store, MODEL, "v1"))
    assert found is fault, message


def test_a_version_folder_that_links_out_of_the_store_is_refused(source: Path, store: Path, tmp_path: Path) -> None:
    """A link in place of a version is followed by no reader."""
    publish_v1(source, store)
    elsewhere = tmp_path / "elsewhere"
    (store / MODEL / "v1").rename(elsewhere)
    (store / MODEL / "v1").symlink_to(elsewhere)
    assert fault_of(lambda: verify(store, MODEL, "v1"))[0] is Fault.OUTSIDE_STORE
    assert fault_of(lambda: read_manifest(store, MODEL, "v1"))[0] is Fault.OUTSIDE_STORE


def test_an_unknown_version_names_the_known_ones(source: Path, store: Path) -> None:
    """A typo costs one look."""
    publish_v1(source, store)
    fault, message = fault_of(lambda: read_manifest(store, MODEL, "v2"))
    assert fault is Fault.NOT_FOUND
    assert "published versions: v1" in message


def test_a_store_that_cannot_be_written_says_so(source: Path, tmp_path: Path) -> None:
    """The operating system's reason reaches the operator."""
    blocked = tmp_path / "file"
    blocked.write_text("a file where the store should be")
    fault, message = fault_of(lambda: publish(source, store=blocked, model=MODEL, version="v1"))
    assert fault is Fault.UNREADABLE
    assert os.strerror(errno.ENOTDIR) in message


def test_a_version_folder_is_below_the_store(store: Path) -> None:
    """The layout that every process agrees on."""
    assert version_folder(store, "org/tiny", "v1") == store / "org" / "tiny" / "v1"
