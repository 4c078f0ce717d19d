"""Several worker processes behind one port look like one router: to clients, to the admin API, to Prometheus, to signals."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.router.process import RouterProcess, start_router
from tests.sim import SimEngine, start_sim_engine
from tests.waiting import wait_until

WORKERS = 3
BODY = {"model": "org/sim", "prompt": "hello", "max_tokens": 4}


@pytest.fixture(scope="module")
def engine() -> Iterator[SimEngine]:
    with start_sim_engine("--served-model-name", "org/sim") as engine:
        yield engine


@contextmanager
def started(engine: SimEngine) -> Iterator[RouterProcess]:
    with start_router([engine.url], "--workers", str(WORKERS)) as router:
        wait_until(lambda: answers_everywhere(router), 30, "all workers to serve")
        yield router


@pytest.fixture(scope="module")
def router(engine: SimEngine) -> Iterator[RouterProcess]:
    with started(engine) as router:
        yield router


@pytest.fixture
def mortal(engine: SimEngine) -> Iterator[RouterProcess]:
    """A router that the test may stop."""
    with started(engine) as router:
        yield router


def workers_of(router: RouterProcess) -> list[psutil.Process]:
    return psutil.Process(router.process.pid).children()


def post(router: RouterProcess) -> int:
    """On a connection of its own, which any worker may get."""
    with plain_client() as client:
        return client.post(f"{router.v1}/completions", json=BODY).status_code


def plain_client() -> httpx.Client:
    return httpx.Client(verify=False, timeout=20)


def answers_everywhere(router: RouterProcess) -> bool:
    return len(workers_of(router)) == WORKERS and all(post(router) == 200 for _ in range(8 * WORKERS))


def completed(router: RouterProcess) -> float:
    return router.metric("intellect_router_requests_total", outcome="completed")


def test_the_port_is_shared_and_the_metrics_are_of_all_workers(router: RouterProcess) -> None:
    """Every request is counted once, whichever process served it, and one scrape shows them all."""
    before = completed(router)
    for _ in range(40):
        assert post(router) == 200
    assert completed(router) == before + 40
    ports = [
        len(
            [
                c
                for c in worker.net_connections("tcp")
                if c.status == psutil.CONN_LISTEN and router.url.endswith(f":{c.laddr.port}")
            ]
        )
        for worker in workers_of(router)
    ]
    assert ports == [1] * WORKERS
    assert router.metric("intellect_router_replica_health", health="ready") == 1
    assert router.metric("intellect_router_request_duration_seconds_count") == completed(router)
    assert router.in_flight() == 0


def test_what_is_in_flight_in_any_worker_is_listed(router: RouterProcess) -> None:
    """An operator who drains a replica sees when it is empty, though other processes send to it."""
    body = {**BODY, "stream": True, "max_tokens": 4000, "ignore_eos": True}
    with plain_client() as client:
        streams = [client.stream("POST", f"{router.v1}/completions", json=body) for _ in range(12)]
        for stream in streams:
            stream.__enter__()

        def listed() -> int:
            (replica,) = router.http.get(f"{router.admin}/admin/replicas").json()
            return int(replica["in_flight"])

        wait_until(lambda: listed() == router.in_flight() == 12, 5, "twelve requests in flight")
        for stream in streams:
            stream.__exit__(None, None, None)
    wait_until(lambda: listed() == router.in_flight() == 0, 5, "none in flight")


def test_replicas_are_added_drained_and_removed_in_all_workers(router: RouterProcess, engine: SimEngine) -> None:
    """Once the admin API has answered, no worker does otherwise."""
    (replica,) = router.http.get(f"{router.admin}/admin/replicas").json()
    path = f"{router.admin}/admin/replicas/{replica['id']}"
    assert router.http.post(f"{path}/drain", json={"draining": True}).status_code == 200
    assert {post(router) for _ in range(24)} == {503}
    assert router.http.post(f"{path}/drain", json={"draining": False}).status_code == 200
    assert {post(router) for _ in range(24)} == {200}
    assert router.http.delete(path).status_code == 200
    assert 200 not in {post(router) for _ in range(24)}
    assert router.http.post(f"{router.admin}/admin/replicas", json={"url": engine.url}).status_code == 201
    wait_until(lambda: answers_everywhere(router), 5, "every worker to know it again")


@pytest.mark.parametrize("index", [0, 1])
def test_a_worker_that_dies_is_started_again_and_loses_no_count(mortal: RouterProcess, index: int) -> None:
    """A crash costs what that process had in flight, and nothing that an operator had changed or Prometheus had seen."""
    with start_sim_engine("--served-model-name", "org/sim") as other:
        assert mortal.http.post(f"{mortal.admin}/admin/replicas", json={"url": other.url}).status_code == 201
        before = completed(mortal)
        victim = sorted(workers_of(mortal), key=lambda worker: worker.pid)[index]
        victim.kill()
        wait_until(lambda: not psutil.pid_exists(victim.pid), 5, "its end")
        wait_until(lambda: answers(mortal), 10, "the admin port")
        assert completed(mortal) >= before
        wait_until(lambda: answers_everywhere(mortal), 10, "the worker to be back")
        assert completed(mortal) > before
        assert len(mortal.http.get(f"{mortal.admin}/admin/replicas").json()) == 2
        assert "was ended by SIGKILL; it is started again" in mortal.log


def test_replicas_that_were_added_outlive_the_first_worker_though_the_others_are_busy(mortal: RouterProcess) -> None:
    """Worker 0, started again, need not hear from anybody what an operator had changed."""
    with start_sim_engine("--served-model-name", "org/sim") as other:
        assert mortal.http.post(f"{mortal.admin}/admin/replicas", json={"url": other.url}).status_code == 201
        victim, *busy = sorted(workers_of(mortal), key=lambda worker: worker.pid)
        for worker in busy:
            worker.suspend()
        try:
            victim.kill()
            wait_until(lambda: not psutil.pid_exists(victim.pid), 5, "its end")
            wait_until(lambda: answers(mortal), 10, "the admin port")
            assert len(mortal.http.get(f"{mortal.admin}/admin/replicas").json()) == 2
        finally:
            for worker in busy:
                worker.resume()
        wait_until(lambda: answers_everywhere(mortal), 10, "all workers to serve")
        assert len(mortal.http.get(f"{mortal.admin}/admin/replicas").json()) == 2


def answers(router: RouterProcess) -> bool:
    try:
        return router.http.get(f"{router.admin}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_sigterm_drains_all_workers_and_ends_with_status_zero(mortal: RouterProcess) -> None:
    """A deployment's restart loses no answer."""
    answered: list[int] = []
    body = {**BODY, "max_tokens": 60, "ignore_eos": True}

    def ask() -> None:
        with plain_client() as client:
            answered.append(client.post(f"{mortal.v1}/completions", json=body).status_code)

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    wait_until(lambda: mortal.in_flight() + len(answered) == 12, 5, "the requests to be on their way")
    workers = workers_of(mortal)
    assert mortal.terminate() == 0
    for thread in threads:
        thread.join()
    assert answered == [200] * 12
    assert not any(worker.is_running() for worker in workers)


def test_workers_end_when_the_process_that_started_them_is_killed(mortal: RouterProcess) -> None:
    """Nothing keeps the port when the router is gone, and no folder is left behind."""
    workers = workers_of(mortal)
    sockets = [str(connection.laddr) for worker in workers for connection in worker.net_connections("unix")]
    (folder,) = {Path(path).parent for path in sockets if path.endswith(".sock")}
    assert folder.stat().st_mode & 0o777 == 0o700, "only its own user may ask the workers"
    mortal.process.kill()
    mortal.process.wait(5)
    wait_until(lambda: not any(psutil.pid_exists(worker.pid) for worker in workers), 10, "the workers to end")
    assert not folder.exists()


def test_each_line_of_the_access_log_is_whole(mortal: RouterProcess) -> None:
    """Processes that write to one stream do not break each other's lines."""
    for _ in range(60):
        post(mortal)
    assert mortal.terminate() == 0
    lines = [line for line in mortal.log.splitlines() if '"request_id"' in line]
    assert len(lines) >= 60
    assert all(line.startswith("{") and line.endswith("}") for line in lines)


def test_several_workers_without_redis_are_warned_of_once(router: RouterProcess) -> None:
    """They work, but each sees only its own placements."""
    assert router.log.count("without redis") == 1


def test_a_port_in_use_ends_the_router_with_one_line(router: RouterProcess, tmp_path: Path) -> None:
    """A second router does not silently take a share of the first one's clients."""
    port = router.url.rpartition(":")[2]
    with (
        pytest.raises(AssertionError, match=f"status 1:\nerror: port {port} on 127.0.0.1 cannot be used"),
        start_router((), "--port", port, "--workers", "2", env={"INTELLECT_REDIS": "redis://127.0.0.1:1"}),
    ):
        pass


def test_a_worker_that_is_interrupted_from_the_keyboard_stops_with_the_others(mortal: RouterProcess) -> None:
    """Ctrl-C reaches every process of the terminal at once."""
    for worker in workers_of(mortal):
        os.kill(worker.pid, signal.SIGINT)
    mortal.process.send_signal(signal.SIGINT)
    assert mortal.process.wait(15) == 0
