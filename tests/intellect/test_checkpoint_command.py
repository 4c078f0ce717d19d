import json
import os
import pty
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from intellect.cli import run
from intellect.machine import our_command
from protocol.store import verify
from server.sim_model import SIM_MODEL_NAME, write_sim_model
from tests.intellect.command import COMMAND, clean_environment, error_line, run_intellect
from tests.ports import free_port


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_sim_model(tmp_path / "source", seed=1)
    return tmp_path / "source"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def publish(source: Path, store: Path, version: str, *more: str) -> int:
    return run(
        ["checkpoint", "publish", str(source), "--model", SIM_MODEL_NAME, "--version", version, "--store", str(store), *more]
    )


def json_of(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_published_folder_is_listed_and_verifies(source: Path, store: Path) -> None:
    """publish, ls and verify as an operator types them."""
    arguments = ("--model", SIM_MODEL_NAME, "--version", "v1", "--store", str(store), "--parent", "v0", "--step", "7")
    published = run_intellect("checkpoint", "publish", str(source), *arguments)
    assert published.returncode == 0
    assert "published simulated v1" in published.stdout
    assert "intellect checkpoint swap v1 --model simulated" in published.stdout
    listed = run_intellect("checkpoint", "ls", "--store", str(store))
    header, row = listed.stdout.splitlines()
    assert header.split() == ["model", "version", "parent", "step", "size", "tensors", "published"]
    assert row.split()[:4] == ["simulated", "v1", "v0", "7"]
    verified = run_intellect("checkpoint", "verify", "--store", str(store))
    assert (verified.returncode, verified.stdout) == (0, "ok   simulated v1: 2.9 kB\n")


def test_scripts_read_json(source: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints one value and nothing else."""
    assert publish(source, store, "v1", "--step", "3", "--json") == 0
    published = json_of(capsys)
    manifest = verify(store, SIM_MODEL_NAME, "v1")
    assert published["base_fingerprint"] == manifest.base_fingerprint
    assert (published["version"], published["step"], published["tensors"]) == ("v1", 3, 4)
    assert Path(published["folder"]) == store / SIM_MODEL_NAME / "v1"
    assert run(["checkpoint", "ls", "--store", str(store), "--json"]) == 0
    assert [(row["model"], row["version"], row["fault"]) for row in json_of(capsys)] == [(SIM_MODEL_NAME, "v1", None)]
    assert run(["checkpoint", "verify", "--store", str(store), "--json"]) == 0
    assert json_of(capsys) == [{"model": SIM_MODEL_NAME, "version": "v1", "ok": True, "fault": None, "message": None}]


def test_verify_finds_the_bad_one_among_the_good(source: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1, the fault as a word for scripts, and the others are checked all the same."""
    for version in ("v1", "v2", "v3"):
        publish(source, store, version)
    weights = store / SIM_MODEL_NAME / "v2" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    capsys.readouterr()
    assert run(["checkpoint", "verify", "--store", str(store), "--json"]) == 1
    assert [(row["version"], row["fault"]) for row in json_of(capsys)] == [("v1", None), ("v2", "file_changed"), ("v3", None)]
    assert run(["checkpoint", "verify", "--store", str(store)]) == 1
    assert "FAIL simulated v2: model.safetensors has sha256" in capsys.readouterr().out
    assert run(["checkpoint", "verify", "--store", str(store), "--model", SIM_MODEL_NAME, "--version", "v3"]) == 0


def test_ls_shows_a_version_that_cannot_be_read(source: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged manifest does not hide the others, nor itself."""
    publish(source, store, "v1")
    publish(source, store, "v2")
    (store / SIM_MODEL_NAME / "v1" / "manifest.json").write_text("{}")
    capsys.readouterr()
    assert run(["checkpoint", "ls", "--store", str(store)]) == 0
    assert "unreadable: manifest_changed" in capsys.readouterr().out


def test_ls_cuts_nothing_off(source: Path, store: Path) -> None:
    """A pipe has no width; a narrow terminal loses other columns before the model or the version."""
    model, version = "a-model-with-a-long-name-" + "x" * 30, "step-" + "1" * 30
    assert run(["checkpoint", "publish", str(source), "--model", model, "--version", version, "--store", str(store)]) == 0
    piped = run_intellect("checkpoint", "ls", "--store", str(store), variables={"COLUMNS": "20"}).stdout
    assert piped.splitlines()[0].split() == ["model", "version", "parent", "step", "size", "tensors", "published"]
    assert piped.splitlines()[1].startswith(f"{model}  {version} ")
    main, child = pty.openpty()
    try:
        arguments = [*COMMAND, "checkpoint", "ls", "--store", str(store)]
        environment = clean_environment(COLUMNS="100")
        subprocess.run(arguments, stdin=child, stdout=child, env=environment, check=True, timeout=60)
        shown = os.read(main, 10_000).decode().splitlines()
    finally:
        os.close(main)
        os.close(child)
    assert shown[0].split() == ["model", "version"]
    assert shown[1].split() == [model, version]


def test_what_publish_prints_can_be_followed(source: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The next command as this shell finds it, and what must hold for it where the store is not the default one."""
    publish(source, store, "v1")
    *_, condition, command = capsys.readouterr().out.splitlines()
    assert condition == f"swap it in, if the replicas were started with --store {store}:"
    assert command == f"{our_command()} checkpoint swap v1 --model simulated"
    publish(source, store.parent / "checkpoints", "v1")
    assert f"or `up` with --state-dir {store.parent}:\n" in capsys.readouterr().out


def test_a_source_without_weights_is_named(source: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The user's own folder, not one inside the store that is gone again."""
    (source / "model.safetensors").unlink()
    assert publish(source, store, "v1") == 1
    assert capsys.readouterr().err == f"error: {source} holds no .safetensors file; save the model as safetensors\n"
    (source / "model.safetensors").write_text("these are no weights at all")
    assert publish(source, store, "v1") == 1
    assert capsys.readouterr().err.startswith("error: model.safetensors: is not a safetensors file: ")


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        (["ls", "--store", "ABSENT"], 2, "--store ABSENT: is not a folder"),
        (["ls", "--store", "STORE", "--model", "other"], 1, "--model other: has no published version"),
        (["ls", "--store", "STORE", "--model", "../x"], 2, "--model ../x: model '../x' is not valid"),
        (["verify", "--store", "ABSENT"], 2, "--store ABSENT: is not a folder"),
        (["publish", "ABSENT", "--model", "m", "--version", "v1", "--store", "STORE"], 2, "SRC_DIR ABSENT: does not exist"),
        (["publish", "FILE", "--model", "m", "--version", "v1", "--store", "STORE"], 2, "SRC_DIR FILE: is a file"),
        (["publish", "SOURCE", "--model", "m", "--version", "base", "--store", "STORE"], 1, "version 'base' is reserved"),
        (["publish", "SOURCE", "--model", "m", "--version", "a b", "--store", "STORE"], 1, "version 'a b' is not valid"),
        (["publish", "SOURCE", "--model", SIM_MODEL_NAME, "--version", "v1", "--store", "STORE"], 1, "simulated v1 is already"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_gets_one_line(
    source: Path, store: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, expected: str
) -> None:
    """The line names the flag and the value."""
    publish(source, store, "v1")
    capsys.readouterr()
    places = {"ABSENT": source.parent / "absent", "STORE": store, "SOURCE": source, "FILE": source / "config.json"}
    for word, path in places.items():
        arguments = [argument.replace(word, str(path)) for argument in arguments]
        expected = expected.replace(word, str(path))
    assert run(["checkpoint", *arguments]) == status
    assert capsys.readouterr().err.startswith(f"error: {expected}")


ROLLOUT = {"id": "r1", "model": "m", "version": "v2", "strategy": "in_place", "seconds": 0.0, "reason": None, "replicas": []}
SWAPPED = {
    "replica": "127.0.0.1:8100",
    "outcome": "swapped",
    "version": "v2",
    "epoch": 1,
    "requested": "v2",
    "seconds": 0.6,
    "phases": {"verify": 0.1, "load": 0.4},
    "code": None,
    "reason": None,
}


@contextmanager
def admin_api(*answers: tuple[int, object]) -> Iterator[tuple[str, list[tuple[str, str, dict[str, str], bytes]]]]:
    """A router's admin port that gives these answers in turn, the last one for ever. Yields its URL and what it was asked."""
    asked: list[tuple[str, str, dict[str, str], bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            asked.append((self.command, self.path, {key.lower(): value for key, value in self.headers.items()}, body))
            status, value = answers[min(len(asked), len(answers)) - 1]
            encoded = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        do_GET = do_POST = _answer  # noqa: N815 - the names that the base class looks for

        def log_message(self, *_arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def swap(url: str, *more: str) -> int:
    return run(["checkpoint", "swap", "v2", "--model", "m", "--admin", url, *more])


def test_a_swap_is_followed_to_its_end(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each replica with its phases, then the total; the token goes along."""
    monkeypatch.setenv("INTELLECT_ADMIN_TOKEN", "admin-secret")
    second = {**SWAPPED, "replica": "127.0.0.1:8101"}
    answers = [
        (202, {**ROLLOUT, "state": "running"}),
        (200, {**ROLLOUT, "state": "running", "replicas": [SWAPPED]}),
        (200, {**ROLLOUT, "state": "running", "replicas": [SWAPPED]}),
        (200, {**ROLLOUT, "state": "done", "seconds": 1.25, "replicas": [SWAPPED, second]}),
    ]
    with admin_api(*answers) as (url, asked):
        assert swap(url) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rollout r1: m to v2, in_place",
        "  127.0.0.1:8100: swapped in 0.60 s (verify 0.10, load 0.40), serves v2+1",
        "  127.0.0.1:8101: swapped in 0.60 s (verify 0.10, load 0.40), serves v2+1",
        "m serves v2 on 2 replicas, in 1.25 s",
    ]
    assert [(method, path) for method, path, _, _ in asked] == [("POST", "/admin/rollouts")] + [
        ("GET", "/admin/rollouts/r1")
    ] * 3
    assert json.loads(asked[0][3]) == {"model": "m", "version": "v2", "strategy": "in_place"}
    assert {headers["authorization"] for _, _, headers, _ in asked} == {"Bearer admin-secret"}


def test_a_refused_swap_ends_with_status_1_and_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """The last line says why, and what the replicas serve."""
    refused = {**SWAPPED, "outcome": "refused", "version": "base", "epoch": 0, "phases": {}, "reason": "a byte changed"}
    reason = "replica 127.0.0.1:8100 refused v2: a byte changed"
    failed = {**ROLLOUT, "state": "failed", "reason": reason, "replicas": [refused]}
    with admin_api((202, {**ROLLOUT, "state": "running"}), (200, failed)) as (url, _):
        assert swap(url) == 1
    out, err = capsys.readouterr()
    assert "  127.0.0.1:8100: refused in 0.60 s, serves base" in out.splitlines()
    assert err == f"error: m was not brought to v2: {reason}\n"
    assert (out + err).count("a byte changed") == 1


def test_every_reason_of_a_failed_swap_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Also the one of a replica that could not go back, which the rollout's own reason does not name."""
    refused = {**SWAPPED, "replica": "127.0.0.1:8101", "outcome": "refused", "phases": {}, "reason": "a byte changed"}
    stuck = {**SWAPPED, "outcome": "failed", "phases": {}, "reason": "the engine is gone"}
    failed = {**ROLLOUT, "state": "failed", "reason": "replica refused v2: a byte changed"}
    with admin_api((202, {**ROLLOUT, "state": "running"}), (200, {**failed, "replicas": [SWAPPED, refused, stuck]})) as (
        url,
        _,
    ):
        assert swap(url) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "  127.0.0.1:8100: the engine is gone"
    assert (out + err).count("a byte changed") == 1


def test_waiting_is_told_from_the_rollout(capsys: pytest.CaptureFixture[str]) -> None:
    """The total is the rollout's own; a command that took much longer says so."""
    done = {**ROLLOUT, "state": "done", "seconds": 0.05, "replicas": [SWAPPED]}
    running = (200, {**ROLLOUT, "state": "running"})
    with admin_api((202, {**ROLLOUT, "state": "running"}), *[running] * 6, (200, done)) as (url, _):
        assert swap(url) == 0
    total = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"m serves v2 on 1 replica, in 0\.05 s \(\d+\.\d s with waiting\)", total)


def test_a_swap_can_be_left_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    """--no-wait --json gives a script the rollout's id."""
    with admin_api((202, {**ROLLOUT, "state": "running"})) as (url, asked):
        assert swap(url, "--no-wait", "--json") == 0
    assert json_of(capsys)["id"] == "r1"
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((401, {"error": {"message": "token"}}), "refused; give its token with --admin-token or INTELLECT_ADMIN_TOKEN"),
        ((404, {"error": {"message": "Invalid URL"}}), "no admin API there; give the router's admin port"),
        ((409, {"error": {"message": "m is not served here"}}), "the router answered 409: m is not served here"),
        ((500, b"oops"), "the router answered 500: oops"),
        ((200, b"<html>"), "what answers there is not a router's admin API"),
    ],
)  # fmt: skip
def test_a_swap_that_cannot_start_says_why(
    capsys: pytest.CaptureFixture[str], answer: tuple[int, object], expected: str
) -> None:
    """Whatever answers on the admin address, the operator gets one line."""
    with admin_api(answer) as (url, _):
        assert swap(url) == 1
    err = capsys.readouterr().err
    assert expected in err
    assert err.count("\n") == 1


def test_a_swap_without_a_router_says_so() -> None:
    """As a process: status 1, one line with the address."""
    address = f"http://127.0.0.1:{free_port()}"
    done = run_intellect("checkpoint", "swap", "v2", "--model", "m", "--admin", address)
    assert done.returncode == 1
    assert error_line(done).startswith(f"--admin {address}: no answer")


def test_a_swap_that_takes_too_long_is_given_up_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Waiting ends; the rollout goes on in the router, and the line says where to look."""
    running = {**ROLLOUT, "state": "running"}
    with admin_api((202, running), (200, running)) as (url, _):
        assert swap(url, "--timeout", "0.3") == 1
    assert "still running after 0.3 s; it goes on" in capsys.readouterr().err
