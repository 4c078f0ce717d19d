"""`intellect up --engine sim` as real processes: what it prints works, and nothing stays behind."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from server.sim_model import write_sim_model
from tests.intellect.command import COMMAND, clean_environment, error_line, run_intellect
from tests.ports import free_port
from tests.waiting import wait_until

START_TIMEOUT_S = 60.0
STOP_PROMISED_S = 10.0
DEATH_PROMISED_S = 15.0


@dataclass(frozen=True, slots=True)
class Stack:
    process: "subprocess.Popen[bytes]"
    output_file: Path
    port: int
    admin_port: int
    state_dir: Path

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    def family(self) -> list[psutil.Process]:
        """Everything below it: router, agents, engines and their leashes."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def await_ready(self) -> "Stack":
        def is_ready() -> bool:
            assert self.process.poll() is None, self.output
            return "Ready after" in self.output

        wait_until(is_ready, START_TIMEOUT_S, "the stack to be ready")
        return self


@contextlib.contextmanager
def running(state_dir: Path, *arguments: str, variables: dict[str, str] | None = None) -> Iterator[Stack]:
    state_dir.mkdir(exist_ok=True)
    port, admin_port = free_port(), free_port()
    output_file = state_dir / f"output-{port}.txt"
    ports = ("--port", str(port), "--admin-port", str(admin_port), "--state-dir", str(state_dir))
    with output_file.open("wb") as output:
        process = subprocess.Popen(
            [*COMMAND, "up", "--engine", "sim", *ports, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=clean_environment(**(variables or {})),
        )
    try:
        yield Stack(process, output_file, port, admin_port, state_dir)
    finally:
        process.terminate()
        try:
            process.wait(STOP_PROMISED_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("up")) as started:
        yield started.await_ready()


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def await_end(family: list[psutil.Process], timeout_s: float) -> None:
    wait_until(lambda: not [process for process in family if is_alive(process)], timeout_s, "every process to end")


def printed_commands(stack: Stack, start: str) -> list[str]:
    return [line for line in stack.output.splitlines() if line.startswith(start)]


def test_the_start_is_told_line_by_line(stack: Stack) -> None:
    """Where no terminal is watching, each process reports once per change of state."""
    for name in ("router", "replica-0", "replica-1"):
        assert re.search(rf"^{name} ready, \d+ s$", stack.output, re.MULTILINE)
        assert (stack.state_dir / "logs" / str(stack.port) / f"{name}.log").stat().st_size > 0
    assert re.search(r"^Ready after \d+ s: simulated on 2 replicas, at ", stack.output, re.MULTILINE)


def test_the_printed_curl_lines_work_as_they_stand(stack: Stack) -> None:
    """Copied into a shell: one answer, then the same as a stream that ends with its [DONE]."""
    plain, streamed = printed_commands(stack, "curl ")
    answer = json.loads(subprocess.run(["bash", "-c", plain], capture_output=True, check=True, timeout=30).stdout)
    assert answer["choices"][0]["message"]["content"]
    events = subprocess.run(["bash", "-c", streamed], capture_output=True, text=True, check=True, timeout=30).stdout
    assert events.count("data: ") > 2
    assert events.rstrip().endswith("data: [DONE]")


def test_the_printed_python_works_as_it_stands(stack: Stack) -> None:
    """Copied into a file, with the openai package."""
    snippet = re.search(r"^from openai.*?^print\(.*?\)$", stack.output, re.MULTILINE | re.DOTALL)
    assert snippet is not None
    done = subprocess.run([sys.executable, "-c", snippet[0]], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_printed_swap_works_as_it_stands(stack: Stack, tmp_path: Path) -> None:
    """Publish a folder, swap it in, and every replica answers with the new version."""
    write_sim_model(tmp_path / "trained", seed=5)
    publish, swap = (line for line in stack.output.splitlines() if "intellect checkpoint " in line)
    for line in (publish.replace("FOLDER", str(tmp_path / "trained")), swap):
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    assert "simulated serves v1 on 2 replicas" in done.stdout
    for _ in range(6):
        answer = _ask(stack)
        assert answer.headers["x-intellect-checkpoint"] == "v1+1"


def _ask(stack: Stack) -> httpx.Response:
    body = {"model": "simulated", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    return httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=30)


def test_no_secret_can_be_read_from_the_process_list(stack: Stack) -> None:
    """Any user of a machine sees arguments; ours carry no key and no token, and the engines refuse whoever has none."""
    engine = httpx.get(f"{stack.admin}/admin/replicas").json()[0]["engine"]
    body = {"model": "simulated", "messages": [{"role": "user", "content": "hello"}]}
    assert httpx.post(f"{engine}/v1/chat/completions", json=body).status_code == 401
    agent = httpx.get(f"{stack.admin}/admin/replicas").json()[0]["url"]
    assert httpx.post(f"{agent}/drain", json={"draining": True}).status_code == 401
    secrets = {
        value
        for process in stack.family()
        for name, value in process.environ().items()
        if name in ("INTELLECT_AGENT_TOKEN", "INTELLECT_UPSTREAM_KEY", "VLLM_API_KEY", "INTELLECT_ENGINE_TOKEN")
    }
    assert len(secrets) >= 3
    arguments = " ".join(" ".join(process.cmdline()) for process in stack.family())
    assert not [secret for secret in secrets if secret in arguments]


def test_the_router_learns_what_each_engine_can_hold(stack: Stack) -> None:
    """Although the engines are closed with a key, their agents read context length and cache size for the router."""
    for replica in httpx.get(f"{stack.admin}/admin/replicas").json():
        assert replica["status"]["max_model_len"] > 0
        assert replica["status"]["kv_capacity_tokens"] > 0


def test_a_second_stack_is_told_who_holds_the_port(stack: Stack) -> None:
    """One line, status 1, and nothing has been started."""
    ports = ("--port", str(stack.port), "--admin-port", str(free_port()), "--state-dir", str(stack.state_dir))
    done = run_intellect("up", "--engine", "sim", *ports)
    assert done.returncode == 1
    assert re.match(rf"--port {stack.port}: in use by .+ \(pid \d+\); stop it or give another --port", error_line(done))


def test_ports_can_be_given_by_variable(stack: Stack) -> None:
    """As for the router; a flag wins. The refusals tell which ports were meant."""
    variables = {"INTELLECT_PORT": str(stack.port), "INTELLECT_ADMIN_PORT": str(stack.admin_port)}
    arguments = ("up", "--engine", "sim", "--state-dir", str(stack.state_dir))
    assert error_line(run_intellect(*arguments, variables=variables)).startswith(f"--port {stack.port}: in use by ")
    done = run_intellect(*arguments, "--port", str(free_port()), variables=variables)
    assert error_line(done).startswith(f"--admin-port {stack.admin_port}: in use by ")


def test_an_agent_or_a_router_that_is_killed_comes_back(stack: Stack) -> None:
    """The stack heals itself, and says so."""
    for command in ("router", "replica"):
        before = _processes_of(stack, command)
        killed = before[0]
        told = stack.output.count("ended with status 137")
        killed.kill()
        wait_until(lambda: stack.output.count("ended with status 137") > told, 10, f"the death of the {command} to be told")  # noqa: B023
        wait_until(lambda: set(_processes_of(stack, command)) - set(before), 20, f"another {command}")  # noqa: B023
        wait_until(lambda: _ready_replicas(stack) == 2 and _ready_agents(stack) == 2, 30, f"the {command} to serve again")
    assert _ask(stack).status_code == 200


def test_a_log_folder_that_was_removed_keeps_nothing_from_coming_back(stack: Stack) -> None:
    """A tidy operator does not cost the stack its self-healing."""
    shutil.rmtree(stack.state_dir / "logs")
    (before, *_) = _processes_of(stack, "router")
    before.kill()
    wait_until(lambda: before not in _processes_of(stack, "router") and _ready_replicas(stack) == 2, 30, "the router to return")


def _processes_of(stack: Stack, command: str) -> list[psutil.Process]:
    """Those that run this command, not the leashes around it."""
    arguments = ["-P", "-m", "intellect", command]
    return [process for process in stack.family() if _arguments_of(process)[:4] == arguments]


def _arguments_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()[1:]
    except psutil.Error:
        return []  # it has ended


def _ready_replicas(stack: Stack) -> int:
    """As the router sees them."""
    try:
        replicas = httpx.get(f"{stack.admin}/admin/replicas", timeout=2).json()
    except httpx.HTTPError:
        return 0
    return sum(replica["health"] == "ready" for replica in replicas)


def _ready_agents(stack: Stack) -> int:
    """As they see themselves."""
    ready = 0
    for replica in httpx.get(f"{stack.admin}/admin/replicas", timeout=2).json():
        with contextlib.suppress(httpx.HTTPError):
            ready += httpx.get(f"{replica['url']}/ready", timeout=2).status_code == 200
    return ready


def test_ctrl_c_stops_everything_within_ten_seconds(tmp_path: Path) -> None:
    """Status 0 and no process left, even while an answer is streaming. Keys given by variable are required, not printed."""
    key = {"authorization": "Bearer client-key"}
    arguments = ("--replicas", "1", "--require-keys", "--", "--time-scale", "20")
    with running(tmp_path, *arguments, variables={"INTELLECT_API_KEY": "client-key"}) as stack:
        family = stack.await_ready().family()
        assert "client-key" not in stack.output
        assert _ask(stack).status_code == 401
        body = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 5000}
        url = f"{stack.url}/v1/chat/completions"
        with httpx.Client(headers=key) as client, client.stream("POST", url, json=body, timeout=30) as answer:
            assert answer.status_code == 200
            next(answer.iter_bytes())
            stack.process.send_signal(signal.SIGINT)
            assert stack.process.wait(STOP_PROMISED_S) == 0
        await_end(family, 1.0)


def test_a_stop_while_starting_is_as_clean(tmp_path: Path) -> None:
    """Whoever changes their mind does not wait for the engine first."""
    with running(tmp_path, "--replicas", "1", "--", "--startup-seconds", "60") as stack:
        wait_until(lambda: "replica-0 starting" in stack.output and len(stack.family()) > 6, 30, "the engine to start")
        family = stack.family()
        stack.process.send_signal(signal.SIGTERM)
        assert stack.process.wait(STOP_PROMISED_S) == 0
        await_end(family, 1.0)
        assert "Ready" not in stack.output


def test_killing_it_leaves_no_process_behind(stack: Stack) -> None:
    """kill -9 gives it no chance to clean up; the leashes do. It ran beside another stack, on other private ports."""
    # With the first one's state folder: their logs must not get mixed.
    log = stack.state_dir / "logs" / str(stack.port) / "router.log"
    written = log.read_text().count(" started at ")
    with running(stack.state_dir, "--replicas", "2") as second:
        family = second.await_ready().family()
        assert "some agent ports from 8100 up are in use; taking " in second.output
        assert _ask(second).status_code == 200
        assert len(family) > 10
        assert log.read_text().count(" started at ") == written
        assert (stack.state_dir / "logs" / str(second.port) / "router.log").exists()
        second.process.kill()
        await_end(family, DEATH_PROMISED_S)
    assert _ask(stack).status_code == 200


def test_an_engine_that_cannot_start_ends_the_stack(tmp_path: Path) -> None:
    """The last lines of its log, one error line with the cause, status 1, and nothing left running."""
    with running(tmp_path, "--replicas", "1", "--", "--foo", "3") as stack:
        assert stack.process.wait(START_TIMEOUT_S) == 1
        assert "the last lines of" in stack.output
        log = tmp_path / "logs" / str(stack.port) / "replica-0.log"
        expected = (
            f"error: replica-0: the engine exited with code 2: unrecognized arguments: --foo 3; the whole log is in {log}"
        )
        assert expected in stack.output.splitlines()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--model", "/nonexistent/model"), "--model /nonexistent/model: '/nonexistent/model' is no folder here"),
        (("--model", "/"), "--model /: / holds no config.json"),
        (("--state-dir", "/proc/nowhere"), "--state-dir /proc/nowhere: cannot be written"),
    ],
)
def test_what_is_missing_is_named_before_anything_starts(tmp_path: Path, arguments: tuple[str, ...], expected: str) -> None:
    """One line with the cause and the remedy, status 1."""
    ports = ("--port", str(free_port()), "--admin-port", str(free_port()))
    state = () if "--state-dir" in arguments else ("--state-dir", str(tmp_path))
    done = run_intellect("up", "--engine", "sim", *ports, *state, *arguments)
    assert done.returncode == 1
    assert error_line(done).startswith(expected)
