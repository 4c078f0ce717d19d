"""The replica agent as the operator and the router see it: over HTTP, with a simulated engine, as real processes."""

import hashlib
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from protocol.manifest import MANIFEST_FILE, STABLE_FILE
from protocol.publisher import publish
from protocol.status import ReplicaState, SwapOutcome, SwapReport
from server.agent import run_agent
from server.agent_api import swap_status
from server.replica import replica_state
from server.settings import AgentSettings, RestartPolicy
from server.sim_model import write_sim_model
from server.supervisor import EnginePhase
from tests.ports import free_port
from tests.server.agent_process import AgentProcess
from tests.waiting import wait_until

FAST = ("--time-scale", "0.1")


@dataclass(frozen=True)
class Models:
    base: Path
    store: Path

    @property
    def settings(self) -> dict[str, Any]:
        return {"model": str(self.base), "store": self.store, "engine_arguments": FAST}

    def folder(self, version: str) -> Path:
        return self.store / "sim" / version


def make_models(folder: Path) -> Models:
    """A base model and, in a store, v2 and v3 of it."""
    models = Models(base=folder / "base", store=folder / "store")
    write_sim_model(models.base)
    for seed in (2, 3):
        write_sim_model(folder / f"source{seed}", seed=seed)
        publish(folder / f"source{seed}", store=models.store, model="sim", version=f"v{seed}")
    return models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def agent(models: Models) -> Iterator[AgentProcess]:
    with AgentProcess(**models.settings) as agent:
        agent.reach(ReplicaState.READY)
        yield agent


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_status_tells_the_router_what_it_needs(agent: AgentProcess) -> None:
    """Where the engine is, what it serves, and how much fits into it."""
    status = agent.status()
    assert status.engine_url == f"http://127.0.0.1:{agent.settings['port']}"
    assert (status.model, status.checkpoint.split("+")[0]) == ("sim", status.checkpoint)
    assert status.reason is None
    assert (status.max_model_len, status.kv_block_size, status.kv_capacity_tokens) == (32768, 16, 16384 * 16)
    assert status.engine_pid is not None
    assert "server.sim_engine" in psutil.Process(status.engine_pid).cmdline()
    assert agent.admin.get("/health").status_code == 200
    assert agent.admin.get("/ready").status_code == 200


def test_the_engines_development_routes_are_closed_to_others(agent: AgentProcess) -> None:
    """Only the agent knows the token that it made for this start of the engine."""
    assert agent.engine.post("/pause").status_code == 403


def test_swaps_change_the_answer_the_label_and_the_epoch(agent: AgentProcess) -> None:
    """base -> v2 -> v3 -> base: every swap counts, and the base answers as it did before."""
    agent.swap("base").raise_for_status()
    epoch = agent.status().epoch
    base, label = agent.answer()
    assert label == f"base+{epoch}"
    answers = {base}
    for number, version in enumerate(("v2", "v3"), start=1):
        response = agent.swap(version)
        assert response.status_code == 200
        report = msgspec.json.decode(response.content, type=SwapReport)
        assert (report.outcome, report.version, report.epoch) == (SwapOutcome.SWAPPED, version, epoch + number)
        assert list(report.phases) == ["verify", "pause", "load", "invalidate", "label", "resume"]
        text, label = agent.answer()
        assert label == f"{version}+{epoch + number}"
        answers.add(text)
        status = agent.status()
        assert (status.checkpoint, status.epoch, status.state) == (version, epoch + number, ReplicaState.READY)
        assert agent.metric(f'intellect_replica_checkpoint_info{{epoch="{epoch + number}",version="{version}"}}') == 1
    assert len(answers) == 3
    assert agent.swap("base").status_code == 200
    assert agent.answer() == (base, f"base+{epoch + 3}")


def test_a_swap_moves_the_metrics(agent: AgentProcess) -> None:
    """Outcomes are counted and every phase is timed."""
    agent.swap("v2").raise_for_status()
    swapped = agent.metric('intellect_replica_swaps_total{outcome="swapped"}')
    loads = agent.metric('intellect_replica_swap_phase_seconds_count{phase="load"}')
    agent.swap("v3").raise_for_status()
    assert agent.metric('intellect_replica_swaps_total{outcome="swapped"}') == swapped + 1
    assert agent.metric('intellect_replica_swap_phase_seconds_count{phase="load"}') == loads + 1
    assert agent.metric('intellect_replica_state{state="ready"}') == 1
    assert agent.metric('intellect_replica_state{state="swapping"}') == 0
    assert agent.metric("intellect_replica_engine_up") == 1
    assert agent.metric("intellect_replica_engine_restarts_total") == 0
    assert 'intellect_replica_build_info{preset="sim",version=' in agent.admin.get("/metrics").text


def break_shape(folder: Path) -> None:
    write_broken(folder, lambda header: header["model.norm.weight"].__setitem__("shape", [4, 2]))


def lose_tensor(folder: Path) -> None:
    def rename(header: dict[str, Any]) -> None:
        header["model.other.weight"] = header.pop("model.norm.weight")

    write_broken(folder, rename)


def write_broken(folder: Path, change: Any) -> None:
    """Rewrites the header of the weights in a folder that is not published yet."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[8 + size :])


def loop_the_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")


def nest_the_config(folder: Path) -> None:
    deep = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    (folder / "config.json").write_bytes(deep)
    manifest = json.loads((folder / MANIFEST_FILE).read_bytes())
    manifest["files"]["config.json"] = {"sha256": hashlib.sha256(deep).hexdigest(), "size": len(deep)}
    encoded = json.dumps(manifest).encode()
    (folder / MANIFEST_FILE).write_bytes(encoded)
    (folder / STABLE_FILE).write_text(hashlib.sha256(encoded).hexdigest())


def flip_byte(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("before", "after", "status", "code"),
    [
        (lose_tensor, None, 422, "tensor_missing"),
        (break_shape, None, 422, "tensor_shape"),
        (None, flip_byte, 422, "file_changed"),
        (None, lambda folder: (folder / STABLE_FILE).unlink(), 422, "not_stable"),
        (None, shutil.rmtree, 404, "not_found"),
    ],
    ids=["missing tensor", "wrong shape", "changed byte", "no STABLE", "not there"],
)
def test_a_bad_checkpoint_is_refused_and_the_old_one_answers_on(
    agent: AgentProcess, models: Models, tmp_path: Path, before: Any, after: Any, status: int, code: str
) -> None:
    """The engine is never touched: same answer, same label, same epoch; the reason names the fault."""
    version = f"bad-{code.replace('_', '-')}"
    write_sim_model(tmp_path, seed=9)
    if before:
        before(tmp_path)
    publish(tmp_path, store=models.store, model="sim", version=version)
    if after:
        after(models.folder(version))
    agent.swap("v2").raise_for_status()
    answer, before_status = agent.answer(), agent.status()
    refused = agent.metric('intellect_replica_swaps_total{outcome="refused"}')

    response = agent.swap(version)

    assert response.status_code == status
    error = error_of(response)
    assert (error["code"], error["param"]) == (code, "version")
    report = msgspec.json.decode(response.content, type=SwapReport)
    assert (report.outcome, report.version, report.requested) == (SwapOutcome.REFUSED, "v2", version)
    assert report.reason == error["message"]
    assert agent.answer() == answer
    assert agent.status() == before_status
    assert agent.metric('intellect_replica_swaps_total{outcome="refused"}') == refused + 1


@pytest.mark.parametrize("version", ["../v2", "", "v2/..", "a" * 200])
def test_a_version_that_is_no_name_is_refused(agent: AgentProcess, version: str) -> None:
    """Paths do not get into the store through a version's name."""
    response = agent.swap(version)
    assert response.status_code == 422
    assert error_of(response)["code"] == "bad_name"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/checkpoint", b"", 400, "version"),
        ("/checkpoint", b"v2", 400, "version"),
        ("/checkpoint", b'{"version": 2}', 400, "version"),
        ("/checkpoint", b'{"version": "v2", "force": true}', 400, "version"),
        ("/drain", b'{"draining": "yes"}', 400, "draining"),
        ("/drain", b"\xff", 400, "draining"),
        ("/drain", b" " * 70_000, 413, None),
        ("/nothing", b"{}", 404, None),
        ("/status", b"{}", 405, None),
    ],
)
def test_bad_requests_are_named_in_openais_shape(
    agent: AgentProcess, path: str, body: bytes, status: int, param: str | None
) -> None:
    """The message says what the body must be."""
    response = agent.admin.post(path, content=body, headers={"content-type": "application/json; charset=utf-8"})
    assert response.status_code == status
    assert error_of(response)["param"] == param


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "text/json; application/json"]
)
@pytest.mark.parametrize(("path", "body"), [("/drain", b'{"draining": true}'), ("/checkpoint", b'{"version": "v2"}')])
def test_a_web_page_cannot_change_the_replica(agent: AgentProcess, path: str, body: bytes, content_type: str | None) -> None:
    """What a browser sends to a local port without asking first is turned away; the message says which header to send."""
    before = agent.status()
    response = agent.admin.post(path, content=body, headers={"content-type": content_type} if content_type else {})
    assert response.status_code == 415
    assert "send the header content-type: application/json" in error_of(response)["message"]
    assert agent.status() == before


def test_draining_takes_the_replica_out_of_rotation_and_back(agent: AgentProcess) -> None:
    """The engine goes on; the router sees that nothing new should come."""
    response = agent.admin.post("/drain", json={"draining": True})
    assert response.json()["state"] == "draining"
    ready = agent.admin.get("/ready")
    assert (ready.status_code, error_of(ready)["code"]) == (503, "replica_draining")
    assert agent.answer()
    assert agent.admin.post("/drain", json={"draining": False}).json()["state"] == "ready"
    assert agent.admin.get("/ready").status_code == 200


def test_one_swap_at_a_time_and_requests_wait_through_it(models: Models) -> None:
    """While one swap loads, the state says so, another swap is turned away, and a request waits and gets its answer."""
    slow = (*FAST, "--weights-load-seconds", "20")  # times 0.1
    with AgentProcess(**{**models.settings, "engine_arguments": slow}) as agent:
        agent.reach(ReplicaState.READY)
        responses: list[httpx.Response] = []
        swapping = threading.Thread(target=lambda: responses.append(agent.swap("v2")))
        swapping.start()
        status = agent.reach(ReplicaState.SWAPPING)
        assert (status.checkpoint, status.reason) == ("base", "swapping to v2")
        assert agent.admin.get("/ready").status_code == 200
        second = agent.swap("v3")
        assert (second.status_code, error_of(second)["code"]) == (409, "not_now")
        text, label = agent.answer()  # sent during the swap
        swapping.join()
        assert [response.status_code for response in responses] == [200]
        assert label == "v2+1"
        assert (text, label) == agent.answer()


def test_a_draining_replica_that_swaps_says_that_it_is_paused(models: Models) -> None:
    """Its state is draining, but it is silent for the same good reason as one that is swapping."""
    slow = (*FAST, "--weights-load-seconds", "20")
    with AgentProcess(**{**models.settings, "engine_arguments": slow}) as agent:
        assert not agent.reach(ReplicaState.READY).paused
        agent.admin.post("/drain", json={"draining": True}).raise_for_status()
        assert not agent.status().paused
        swapping = threading.Thread(target=lambda: agent.swap("v2"))
        swapping.start()
        wait_until(lambda: agent.status().paused, 10, "the pause")
        assert agent.status().state is ReplicaState.DRAINING
        swapping.join()
        assert (agent.status().paused, agent.status().checkpoint) == (False, "v2")


def test_a_client_that_leaves_does_not_leave_the_engine_paused(models: Models) -> None:
    """The swap belongs to the agent; it ends without the one who asked for it."""
    slow = (*FAST, "--weights-load-seconds", "10")
    with AgentProcess(**{**models.settings, "engine_arguments": slow}) as agent:
        agent.reach(ReplicaState.READY)
        with pytest.raises(httpx.ReadTimeout):
            agent.admin.post("/checkpoint", json={"version": "v2"}, timeout=0.3)
        wait_until(lambda: agent.status().checkpoint == "v2", 10, "the swap to end")
        assert agent.answer()[1] == "v2+1"


@pytest.mark.parametrize(("spoil", "code"), [(loop_the_config, "unreadable"), (nest_the_config, "malformed")])
def test_a_checkpoint_that_breaks_the_reader_does_not_touch_the_engine(
    agent: AgentProcess, models: Models, tmp_path: Path, spoil: Callable[[Path], None], code: str
) -> None:
    """The swap is refused, the engine is the same process, and a stream that runs meanwhile is whole."""
    write_sim_model(tmp_path, seed=9)
    publish(tmp_path, store=models.store, model="sim", version=f"breaks-{code}")
    spoil(models.folder(f"breaks-{code}"))
    before = agent.status()
    body = {"model": "sim", "prompt": "long", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with agent.engine.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        events = [next(lines)]
        response = agent.swap(f"breaks-{code}")
        events += [line for line in lines if line]
    assert (response.status_code, error_of(response)["code"]) == (422, code)
    assert response.json()["outcome"] == "refused"
    assert (len(events), events[-1]) == (201, "data: [DONE]")
    assert agent.status() == before


def test_loading_that_fails_brings_the_former_weights_back(models: Models) -> None:
    """500 with the reason; the replica stays ready on what it served."""
    fault = ("--fault", '{"kind": "fail_reload", "times": 1}')
    with AgentProcess(**{**models.settings, "engine_arguments": (*FAST, *fault)}) as agent:
        agent.reach(ReplicaState.READY)
        before = agent.answer()
        response = agent.swap("v2")
        assert response.status_code == 500
        assert error_of(response)["code"] == "load_failed"
        assert response.json()["outcome"] == "restored"
        assert agent.answer() == before
        assert agent.status().state is ReplicaState.READY
        assert agent.metric('intellect_replica_swaps_total{outcome="restored"}') == 1
        assert agent.swap("v2").status_code == 200


def test_if_restoring_fails_too_the_engine_starts_again_on_the_former_weights(models: Models) -> None:
    """Nobody knows what it holds then, so it serves nothing until it has started afresh."""
    fault = ("--fault", '{"kind": "fail_reload"}')
    with AgentProcess(**{**models.settings, "engine_arguments": (*FAST, *fault)}) as agent:
        first = agent.reach(ReplicaState.READY)
        before = agent.answer()
        response = agent.swap("v2")
        assert response.status_code == 500
        assert (response.json()["outcome"], error_of(response)["code"]) == ("failed", "restore_failed")
        assert not agent.is_in(ReplicaState.READY)
        status = agent.reach(ReplicaState.READY)
        assert status.engine_pid != first.engine_pid
        assert (status.checkpoint, status.epoch, status.engine_restarts) == ("base", 0, 1)
        assert agent.answer() == before


def test_a_killed_engine_comes_back_with_the_version_it_served(models: Models) -> None:
    """Its first answer after the restart is that of v2, never that of the base; the epoch does not fall."""
    with AgentProcess(**models.settings) as agent:
        agent.reach(ReplicaState.READY)
        agent.swap("v2").raise_for_status()
        before, pid = agent.answer(), agent.status().engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        status = agent.reach(ReplicaState.STARTING)
        assert status.max_model_len is None  # not known while nothing answers
        assert agent.admin.get("/ready").status_code == 503
        assert agent.metric("intellect_replica_engine_up") == 0
        not_now = agent.swap("v3")
        assert (not_now.status_code, error_of(not_now)["code"]) == (409, "not_now")
        status = agent.reach(ReplicaState.READY)
        assert (status.checkpoint, status.epoch, status.engine_restarts) == ("v2", 1, 1)
        assert status.engine_pid != pid
        assert agent.answer() == before
        assert agent.metric("intellect_replica_engine_restarts_total") == 1


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (flip_byte, "model.safetensors has sha256"),
        (loop_the_config, "cannot read"),
        (nest_the_config, "config.json is not valid JSON: it is nested too deeply"),
    ],
    ids=["changed byte", "loop of links", "deep JSON"],
)
def test_if_the_version_it_served_is_gone_nothing_is_served(tmp_path: Path, spoil: Callable[[Path], None], why: str) -> None:
    """Rather than falling back to the base silently, the replica fails and says why."""
    models = make_models(tmp_path)
    with AgentProcess(**models.settings) as agent:
        agent.reach(ReplicaState.READY)
        agent.swap("v2").raise_for_status()
        pid = agent.status().engine_pid
        assert pid is not None
        spoil(models.folder("v2"))
        os.kill(pid, signal.SIGKILL)
        status = agent.reach(ReplicaState.FAILED)
        assert status.reason is not None
        assert f"v2, which was served before, cannot be loaded again: {why}" in status.reason
        with pytest.raises(httpx.ConnectError):
            agent.engine.get("/health")
        assert agent.admin.get("/health").status_code == 200
        ready = agent.admin.get("/ready")
        assert (ready.status_code, error_of(ready)["code"]) == (503, "replica_failed")


def test_an_engine_that_cannot_start_is_reported_with_its_own_words(models: Models) -> None:
    """The agent stays, so that somebody can read why."""
    policy = RestartPolicy(first_delay_s=0.05, failures_max=2)
    with AgentProcess(**{**models.settings, "engine_arguments": ("--no-such-flag",), "restart": policy}) as agent:
        status = agent.reach(ReplicaState.FAILED)
        assert status.reason is not None
        assert "unrecognized arguments: --no-such-flag" in status.reason
        agent.process.send_signal(signal.SIGTERM)
        assert agent.process.wait(10) == 0


@pytest.mark.parametrize(("settings", "code"), [({"store": None}, "no_store"), ({"model": None}, "no_base")])
def test_a_swap_that_cannot_be_says_what_is_missing(models: Models, settings: dict[str, Any], code: str) -> None:
    """Without a store, or without a model folder to compare with, the message says which flag helps."""
    with AgentProcess(**{**models.settings, **settings}) as agent:
        agent.reach(ReplicaState.READY)
        response = agent.swap("v2")
        assert response.status_code == 422
        assert error_of(response)["code"] == code


def test_an_engine_that_hangs_is_replaced(models: Models) -> None:
    """kill -STOP of a serving engine: the agent notices, says so, and starts another one."""
    with AgentProcess(**models.settings, restart=RestartPolicy(first_delay_s=0.05, hang_s=3)) as agent:
        pid = agent.reach(ReplicaState.READY).engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: agent.status().engine_restarts == 1, 20, "the restart")
        assert "It ran but did not answer for 3 s" in agent.log_text
        assert agent.reach(ReplicaState.READY).engine_pid != pid
        assert not psutil.pid_exists(pid)
        assert agent.answer()


def test_an_engine_that_dies_in_a_swap_comes_back_on_the_former_weights(models: Models) -> None:
    """The swap fails; what was served before is served again, under its old label."""
    slow = (*FAST, "--weights-load-seconds", "100")
    with AgentProcess(**{**models.settings, "engine_arguments": slow}) as agent:
        pid = agent.reach(ReplicaState.READY).engine_pid
        assert pid is not None
        before = agent.answer()
        responses: list[httpx.Response] = []
        swapping = threading.Thread(target=lambda: responses.append(agent.swap("v2")))
        swapping.start()
        agent.reach(ReplicaState.SWAPPING)
        os.kill(pid, signal.SIGKILL)
        swapping.join()
        assert [response.status_code for response in responses] == [500]
        assert responses[0].json()["outcome"] == "failed"
        status = agent.reach(ReplicaState.READY)
        assert (status.checkpoint, status.epoch, status.engine_restarts) == ("base", 0, 1)
        assert agent.answer() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_agent_and_engine(models: Models, number: signal.Signals) -> None:
    """Exit code 0, and nothing is left."""
    with AgentProcess(**models.settings) as agent:
        agent.reach(ReplicaState.READY)
        family = agent.family()
        assert len(family) >= 4  # agent, leash (two), engine
        agent.process.send_signal(number)
        assert agent.process.wait(10) == 0
        assert not [one for one in family if one.is_running()]


def test_kill_9_of_the_agent_leaves_no_engine(models: Models) -> None:
    """The leash ends the engine, and a new agent can take the same ports at once."""
    with AgentProcess(**models.settings) as agent:
        agent.reach(ReplicaState.READY)
        family = agent.family()
        agent.process.kill()
        agent.process.wait()
        with AgentProcess(**agent.settings) as successor:
            successor.reach(ReplicaState.READY)
            assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
            assert successor.answer()


def test_a_token_guards_what_changes_the_replica(models: Models) -> None:
    """Anybody may read; swapping and draining need the token. An agent that listens everywhere names a usable address."""
    with AgentProcess(**models.settings, host="0.0.0.0", token="agent-token") as agent:
        status = agent.reach(ReplicaState.READY)
        assert status.engine_url == f"http://127.0.0.1:{agent.settings['port']}"
        for authorization in ("", "Bearer", "Bearer wrong", "Basic agent-token", "agent-token", "Bearer agent-tokenx"):
            for path, body in (("/checkpoint", {"version": "v2"}), ("/drain", {"draining": True})):
                response = agent.admin.post(path, json=body, headers={"authorization": authorization})
                assert (response.status_code, error_of(response)["code"]) == (401, "invalid_token")
        assert agent.swap("v2").status_code == 200
        assert "agent-token" not in agent.log_text


@pytest.mark.parametrize(
    ("outcome", "code", "status"),
    [
        (SwapOutcome.SWAPPED, None, 200),
        (SwapOutcome.REFUSED, "not_found", 404),
        (SwapOutcome.REFUSED, "file_changed", 422),
        (SwapOutcome.RESTORED, "load_failed", 500),
        (SwapOutcome.FAILED, "restore_failed", 500),
    ],
)
def test_each_outcome_has_its_status(outcome: SwapOutcome, code: str | None, status: int) -> None:
    """Scripts tell the endings of a swap apart by the HTTP status."""
    report = SwapReport(outcome=outcome, version="v1", epoch=0, requested="v2", seconds=0, code=code)
    assert swap_status(report) == status


@pytest.mark.parametrize(
    ("phase", "draining", "swapping", "state"),
    [
        (EnginePhase.STARTING, False, False, ReplicaState.STARTING),
        (EnginePhase.STARTING, True, False, ReplicaState.STARTING),
        (EnginePhase.STARTING, False, True, ReplicaState.STARTING),
        (EnginePhase.RUNNING, False, False, ReplicaState.READY),
        (EnginePhase.RUNNING, False, True, ReplicaState.SWAPPING),
        (EnginePhase.RUNNING, True, False, ReplicaState.DRAINING),
        (EnginePhase.RUNNING, True, True, ReplicaState.DRAINING),
        (EnginePhase.FAILED, True, False, ReplicaState.FAILED),
        (EnginePhase.STOPPED, False, False, ReplicaState.DRAINING),
    ],
)
def test_the_state_follows_from_engine_drain_and_swap(
    phase: EnginePhase, draining: bool, swapping: bool, state: ReplicaState
) -> None:
    """What matters most to the router wins."""
    assert replica_state(phase, draining=draining, swapping=swapping) is state


async def test_a_taken_port_is_named() -> None:
    """The error names the setting, the port and the remedy."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, other in (("port", "admin_port"), ("admin_port", "port")):
            ports = {name: port, other: free_port()}
            with pytest.raises(ValueError, match=rf"^{name} is {port}, .*choose another"):
                await run_agent(AgentSettings(served_model_name="sim", preset="sim", **ports), port_wait_s=0)
