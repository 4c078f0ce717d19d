"""Placement learns from the engines' own KV events what they hold, and does without where there are none."""

import json
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tests.ports import free_port
from tests.router.process import RouterProcess, start_router
from tests.sim import SimEngine, start_sim_engine
from tests.waiting import wait_until

MODEL = "org/sim"
ENGINE = ("--served-model-name", MODEL, "--enable-prompt-tokens-details")
SECONDS = 15.0


@contextmanager
def publishing(*arguments: str, endpoint: str | None = None) -> Iterator[SimEngine]:
    """An engine with KV events. It connects to an `endpoint` that names a host, as vLLM does, and binds a wildcard."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint or f"tcp://*:{free_port()}"}
    if endpoint is None:
        config["replay_endpoint"] = f"tcp://*:{free_port()}"
    with start_sim_engine(*ENGINE, "--kv-events-config", json.dumps(config), *arguments) as engine:
        yield engine


def prompt_of(name: str, size: int = 4000) -> str:
    """About `size` bytes that have nothing in common with another name's."""
    words = (f"{name}{zlib.crc32(f'{name} {number}'.encode()):x}" for number in range(size))
    text = ""
    while len(text) < size:
        text += next(words) + " "
    return text


def complete(router: RouterProcess, prompt: str, request_id: str = "r") -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
    answer = router.http.post(f"{router.v1}/completions", json=body, headers={"x-request-id": request_id})
    assert answer.status_code == 200, answer.text


def decision(router: RouterProcess, request_id: str) -> dict[str, Any]:
    """The last one of this request."""
    answer = router.http.get(f"{router.admin}/admin/decisions", params={"request_id": request_id})
    found: dict[str, Any] = answer.json()["decisions"][0]
    return found


def modes(router: RouterProcess, engine: SimEngine) -> set[str]:
    """The modes that are shown as 1."""
    names = ("off", "joining", "live", "partial", "suspended")
    replica = f"127.0.0.1:{engine.port}"
    return {mode for mode in names if router.metric("intellect_router_kv_events_mode", replica=replica, mode=mode)}


def wait_mode(router: RouterProcess, engine: SimEngine, mode: str) -> None:
    wait_until(lambda: modes(router, engine) == {mode}, SECONDS, f"{mode}, not {modes(router, engine)}; {router.log}")


def test_engines_that_publish_are_followed_and_the_metrics_say_so() -> None:
    """Two engines with events: both are live, and their blocks are counted."""
    with publishing() as one, publishing() as two, start_router([one.url, two.url]) as router:
        for number in range(12):
            complete(router, prompt_of(f"p{number}"))
        wait_mode(router, one, "live")
        wait_mode(router, two, "live")
        wait_until(lambda: router.metric("intellect_router_kv_blocks") > 12 * 10, SECONDS, "blocks")
        assert router.metric("intellect_router_kv_events_malformed_total") == 0
        assert router.terminate() == 0


def test_what_an_engine_has_evicted_is_not_counted_on() -> None:
    """The prompt was sent there and answered, but its KV had to make room for others; the prediction follows the engine."""
    with (
        publishing("--num-gpu-blocks-override", "600", "--max-model-len", "8192") as engine,
        start_router([engine.url]) as router,
    ):
        complete(router, prompt_of("cold"))
        wait_mode(router, engine, "live")
        complete(router, prompt_of("first"))  # whose tokens are asked for, now that events tell
        wait_until(lambda: router.metric("intellect_router_kv_prompt_tokenizations_total", outcome="asked"), SECONDS, "asking")
        complete(router, prompt_of("first"), "warm")
        warm = decision(router, "warm")
        assert warm["predicted_cached_tokens"] > 0.8 * warm["cached_tokens"] > 0

        def follows() -> bool:
            for number in range(14):  # the engine's own requests, of which the router has placed none
                body = {"model": MODEL, "prompt": prompt_of(f"other{number}"), "max_tokens": 1}
                assert engine.client.post("/v1/completions", json=body).status_code == 200
            complete(router, prompt_of("first"), "evicted")
            evicted = decision(router, "evicted")
            assert evicted["cached_tokens"] < 0.1 * warm["cached_tokens"]
            return bool(evicted["predicted_cached_tokens"] < 0.1 * warm["cached_tokens"])

        wait_until(follows, SECONDS, "a prediction that follows the engine")


def test_an_engine_whose_publisher_is_silent_is_placed_on_by_what_was_sent_to_it() -> None:
    """Silence is not an empty cache: where the other engine's events are live, prompts still go back to the silent one."""
    nowhere = f"tcp://127.0.0.1:{free_port()}"
    with (
        publishing() as loud,
        publishing(endpoint=nowhere) as silent,
        start_router([loud.url, silent.url], "--debug-headers") as router,
    ):
        names = [f"p{number}" for number in range(24)]
        with ThreadPoolExecutor(8) as pool:  # at once, so that no replica can have them all
            list(pool.map(lambda name: complete(router, prompt_of(name), name), names))
        mine = [name for name in names if decision(router, name)["replica"] == silent.url.removeprefix("http://")]
        assert mine, "some went to the silent one"
        wait_mode(router, loud, "live")
        assert modes(router, silent) == {"joining"}
        for name in mine:
            complete(router, prompt_of(name), name)
            [terms] = [one for one in decision(router, name)["candidates"] if one["replica"] == silent.url[7:]]
            assert terms["cached_tokens"] > 500, "it is known to hold the prompt all the same"
        assert modes(router, silent) == {"joining"}


def test_an_engine_without_events_is_shown_as_off() -> None:
    """And is served as well as any."""
    with start_sim_engine(*ENGINE) as engine, start_router([engine.url]) as router:
        complete(router, prompt_of("a"))
        assert modes(router, engine) == {"off"}


def test_events_can_be_switched_off() -> None:
    """The setting: then no source is followed, and the metrics say off."""
    with publishing() as engine, start_router([engine.url], env={"INTELLECT_KV_EVENTS": "false"}) as router:
        complete(router, prompt_of("a"))
        assert modes(router, engine) == {"off"}
