"""Why each request went where it went: on the admin port, in a header, in the metrics, and in a log that can be replayed."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.intellect.command import error_line, run_intellect
from tests.router.process import RouterProcess, start_router
from tests.sim import SimEngine, start_sim_engine
from tests.waiting import wait_until

ENGINE = ("--served-model-name", "org/sim", "--enable-prompt-tokens-details")
SYSTEM = " ".join(f"rule {number}: be terse about {number * 7919}." for number in range(150))  # about 4 kB


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[SimEngine, SimEngine]]:
    with start_sim_engine(*ENGINE) as one, start_sim_engine(*ENGINE) as two:
        yield one, two


def urls(engines: tuple[SimEngine, SimEngine]) -> list[str]:
    return [engine.url for engine in engines]


def chat(router: RouterProcess, turns: list[dict[str, str]], session: str, **headers: str) -> httpx.Response:
    body = {"model": "org/sim", "messages": turns, "max_tokens": 12, "stream": True}
    return router.http.post(f"{router.v1}/chat/completions", json=body, headers={"x-session-id": session, **headers})


def converse(router: RouterProcess, conversations: int, turns: int) -> None:
    """Conversations in turn; each second one shares its system prompt with every other second one."""
    histories = [[{"role": "system", "content": f"{number % 2} {SYSTEM}"}] for number in range(conversations)]
    for turn in range(turns):
        for number, history in enumerate(histories):
            history.append({"role": "user", "content": f"turn {turn} of {number}: " + f"detail {number} " * 60})
            assert chat(router, history, f"secret-{number}").status_code == 200


def decisions(router: RouterProcess, **query: str) -> dict[str, Any]:
    answer = router.http.get(f"{router.admin}/admin/decisions", params=query)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def test_each_placement_is_explained_and_compared_with_what_came(engines: tuple[SimEngine, SimEngine]) -> None:
    """The header tells the client at once, the admin port afterwards, and the metrics count on."""
    with start_router(urls(engines), "--debug-headers") as router:
        for number in range(3):
            answer = chat(router, [{"role": "user", "content": SYSTEM}], "my-session", **{"x-request-id": f"r{number}"})
        header = dict(part.split("=") for part in answer.headers["x-intellect-decision"].split(";"))
        assert header["replica"] == answer.headers["x-intellect-replica"]
        assert header["candidates"] == "2"
        terms = [float(header[f"{name}_ms"]) for name in ("wait", "own", "step", "decode", "evict", "room")]
        assert sum(terms) > 0
        (last,) = decisions(router, request_id="r2")["decisions"]
        assert (last["replica"], last["model"], last["outcome"], last["attempts"]) == (
            header["replica"],
            "org/sim",
            "completed",
            1,
        )
        assert last["predicted_s"] * 1000 == pytest.approx(float(header["predicted_ttft_ms"]), abs=0.01)
        assert last["ttft_s"] > 0
        assert last["cached_tokens"] > 500
        assert last["predicted_cached_tokens"] == pytest.approx(last["cached_tokens"], rel=0.25)
        assert last["output_tokens"] == 12
        costs = {candidate["replica"]: candidate["seconds"]["total"] for candidate in last["candidates"]}
        assert len(costs) == 2
        assert min(costs, key=lambda replica: costs[replica]) == last["replica"]
        everything = decisions(router)
        assert [one["request_id"] for one in everything["decisions"]] == ["r2", "r1", "r0"]
        assert everything["summary"]["decisions"] == 3
        assert everything["summary"]["predicted_to_actual"]["cached_tokens"]["count"] == 2
        text = json.dumps(everything)
        assert "rule 1" not in text
        assert "my-session" not in text
        assert decisions(router, replica="nowhere:1")["decisions"] == []
        assert len(decisions(router, limit="2")["decisions"]) == 2
        refused = router.http.get(f"{router.admin}/admin/decisions", params={"limit": "0"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (422, "limit")
        assert router.metric("intellect_router_predicted_first_token_error_seconds_count") == 3
        assert router.metric("intellect_router_found_cached_tokens_total", model="org/sim") > 1000
        assert router.metric("intellect_router_predicted_cached_tokens_total", model="org/sim") > 1000
        assert router.metric("intellect_router_queue_wait_seconds_count", priority="default") == 3
        assert router.metric("intellect_router_index_chunks", replica=last["replica"]) > 5


def test_a_request_that_waited_says_how_long() -> None:
    """A fleet that is full takes the rest one after another; the wait is in the decision and in the metric."""
    slow = ("--max-num-seqs", "1", "--prefill-tokens-per-second", "8000", "--time-scale", "1")
    with start_sim_engine(*ENGINE, *slow) as engine, start_router([engine.url]) as router:

        def ask(number: int) -> None:
            body = {"model": "org/sim", "prompt": f"{number} {SYSTEM * 3}", "max_tokens": 2, "stream": True}
            assert httpx.post(f"{router.v1}/completions", json=body, timeout=60, verify=False).status_code == 200

        body = {"model": "org/sim", "prompt": "short", "max_tokens": 1, "stream": True}
        for _ in range(80):  # the engine's pace must be known before anything waits for it
            assert router.http.post(f"{router.v1}/completions", json=body).status_code == 200
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(14)]
        for thread in threads:
            thread.start()
        wait_until(lambda: router.metric("intellect_router_waiting_requests") > 0, 10, "a request to wait")
        assert router.metric("intellect_router_waiting_tokens", priority="default") > 1000
        for thread in threads:
            thread.join(60)
        waited = [one["waited_s"] for one in decisions(router)["decisions"]]
        assert len(waited) == 94
        assert max(waited) > 0.1
        assert min(waited) == 0
        assert router.metric("intellect_router_queue_wait_seconds_sum") == pytest.approx(sum(waited), abs=0.01)
        assert router.metric("intellect_router_queue_endings_total", ending="dispatched") == sum(one > 0 for one in waited)


@pytest.fixture(scope="module")
def blind(engines: tuple[SimEngine, SimEngine]) -> Iterator[RouterProcess]:
    """A router whose policy predicts nothing, that tells clients nothing, and operators only with their token."""
    with start_router(urls(engines), "--policy", "random", "--admin-token", "t0ken", wait=False) as router:
        wait_until(lambda: router.http.get(f"{router.url}/ready").status_code == 200, 20, "the router to be ready")
        yield router


def test_only_who_has_the_token_learns_of_decisions(blind: RouterProcess) -> None:
    """As everywhere on the admin port; and without debug headers clients are told nothing."""
    answer = chat(blind, [{"role": "user", "content": "hello"}], "s")
    assert answer.status_code == 200
    assert "x-intellect-decision" not in answer.headers
    assert blind.http.get(f"{blind.admin}/admin/decisions").status_code == 401


def test_a_policy_that_predicts_nothing_still_says_what_it_did(blind: RouterProcess) -> None:
    """Fields are null and terms absent; nothing fails."""
    answer = chat(blind, [{"role": "user", "content": "hello"}], "s", **{"x-request-id": "mine"})
    assert answer.status_code == 200
    listed = blind.http.get(
        f"{blind.admin}/admin/decisions", params={"request_id": "mine"}, headers={"authorization": "Bearer t0ken"}
    )
    (only,) = listed.json()["decisions"]
    assert (only["outcome"], only["predicted_s"], only["expected_tokens"]) == ("completed", None, None)
    assert only["ttft_s"] > 0
    assert "candidates" not in only


def test_workers_answer_for_each_other(engines: tuple[SimEngine, SimEngine], tmp_path: Path) -> None:
    """Whichever process placed a request, the admin port knows of it; the lines of the log are whole."""
    log = tmp_path / "log"
    with start_router(urls(engines), "--workers", "2", "--decision-log", str(log)) as router:

        def ask() -> None:
            body = {"model": "org/sim", "prompt": "hello", "max_tokens": 2}
            # On a connection of its own, which any worker may get.
            httpx.post(f"{router.v1}/completions", json=body, verify=False, timeout=20)

        def busy_workers() -> int:
            ask()
            return len({one["replica"] for one in decisions(router)["decisions"]})

        wait_until(lambda: busy_workers() >= 2, 20, "both replicas to be used")
        for _ in range(20):
            ask()
        document = decisions(router)
        completed = router.metric("intellect_router_requests_total", outcome="completed")
        assert document["summary"]["decisions"] == completed
        times = [one["time"] for one in document["decisions"]]
        assert times == sorted(times, reverse=True)
        wait_until(lambda: log.read_text().count("\n") == completed, 10, "a line for each request")
        assert {json.loads(line)["outcome"] for line in log.read_text().splitlines()} == {"completed"}


def test_a_decision_log_is_replayed_under_other_policies(engines: tuple[SimEngine, SimEngine], tmp_path: Path) -> None:
    """What was recorded in front of real engines ranks policies in the simulator, and our own about as well as it did."""
    log, result = tmp_path / "decisions.jsonl", tmp_path / "result.json"
    with start_router(urls(engines), "--decision-log", str(log)) as router:
        converse(router, conversations=6, turns=4)
        bad = router.http.post(f"{router.v1}/completions", json={"model": "org/sim", "prompt": 7})
        assert bad.status_code == 400
        assert router.terminate() == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert "secret-" not in log.read_text()
    assert "rule 1" not in log.read_text()
    good = [line for line in lines if line["outcome"] == "completed"]
    assert len(good) == 24
    assert all(line["output_tokens"] == 12 and line["predicted_s"] > 0 and line["ttft_s"] > 0 for line in good)
    assert len({line["session"] for line in good}) == 6
    done = run_intellect(
        *("sim", "--trace", str(log), "--policy", "predicted", "--policy", "random", "--replicas", "2"),
        *("--seeds", "1,2,3", "--processes", "1", "--json", str(result)),
    )
    assert done.returncode == 0, done.stderr
    hits: dict[str, list[float]] = {"predicted": [], "random": []}
    for run in json.loads(result.read_text())["runs"]:
        hits[run["policy"]].append(run["figures"]["hit_rate"])
    assert min(hits["predicted"]) > max(hits["random"])
    real = sum(line["cached_tokens"] for line in good) / sum(line["prompt_tokens"] for line in good)
    assert sum(hits["predicted"]) / 3 == pytest.approx(real, abs=0.1)


def test_a_decision_log_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    """Not when the first request ends."""
    done = run_intellect("router", "--decision-log", str(tmp_path / "none" / "log"))
    assert done.returncode == 2
    assert error_line(done) == f"decision_log {tmp_path}/none/log: its folder does not exist; make it first"
