"""The checkpoint swap: the order of its steps, every way in which one can fail, and what is served afterwards."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from protocol.manifest import CheckpointError, Fault
from protocol.status import SwapOutcome, SwapReport
from server.checkpoint_check import SwapRefused
from server.engine_client import EngineClient, EngineRefused
from server.settings import SwapDeadlines
from server.sim_model import write_sim_model
from server.swap import Served, swap
from tests.sim import TOKEN, SimEngine, start_sim_engine
from tests.waiting import await_until

FORMER = Served(version="v1", epoch=3, weights="/store/v1")
TARGET = Served(version="v2", epoch=4, weights="/store/v2")
THERE = ["pause", "load /store/v2", "reset", "label v2+4", "resume"]
BACK = ["load /store/v1", "reset", "label v1+3", "resume"]
DEADLINES = SwapDeadlines(verify_s=0.05, pause_s=0.05, load_s=0.05, invalidate_s=0.05, label_s=0.05, resume_s=0.05)


class ScriptedEngine:
    """Records what it is asked, and fails or hangs at the calls with the given numbers."""

    def __init__(self, *, fails: tuple[int, ...] = (), hangs: tuple[int, ...] = ()) -> None:
        self.calls: list[str] = []
        self._fails, self._hangs = fails, hangs

    async def _record(self, call: str) -> None:
        number = len(self.calls)
        self.calls.append(call)
        if number in self._hangs:
            await asyncio.Event().wait()
        if number in self._fails:
            raise EngineRefused(f"call {number} is refused")

    async def pause(self) -> None:
        await self._record("pause")

    async def resume(self) -> None:
        await self._record("resume")

    async def load(self, weights: str) -> None:
        await self._record(f"load {weights}")

    async def reset_cache(self) -> None:
        await self._record("reset")

    async def set_label(self, label: str) -> None:
        await self._record(f"label {label}")


async def no_fault() -> None:
    pass


async def run(engine: ScriptedEngine | EngineClient, **kwargs: object) -> SwapReport:
    ticks = itertools.count()
    arguments = {"former": FORMER, "target": TARGET, "verify": no_fault, "deadlines": DEADLINES, **kwargs}
    return await swap(engine, clock=lambda: float(next(ticks)), **arguments)  # type: ignore[arg-type]


async def test_a_swap_goes_through_its_phases_in_order() -> None:
    """Nothing is scheduled between pause and resume; the report says what is served and where the time went."""
    engine = ScriptedEngine()
    report = await run(engine)
    assert engine.calls == THERE
    assert (report.outcome, report.version, report.epoch, report.requested) == (SwapOutcome.SWAPPED, "v2", 4, "v2")
    assert list(report.phases) == ["verify", "pause", "load", "invalidate", "label", "resume"]
    # The clock ticks once a reading: one reading at either end of a phase, one at either end of the swap.
    assert set(report.phases.values()) == {1.0}
    assert report.seconds == 13.0
    assert (report.code, report.reason) == (None, None)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (CheckpointError(Fault.TENSOR_SHAPE, "tensor x has shape [1]"), "tensor_shape"),
        (CheckpointError(Fault.NOT_STABLE, "no STABLE"), "not_stable"),
        (SwapRefused("no_store", "no store"), "no_store"),
    ],
)
async def test_a_checkpoint_that_does_not_verify_never_touches_the_engine(fault: Exception, code: str) -> None:
    """The former version goes on being served, and the reason is passed on."""

    async def verify() -> None:
        raise fault

    engine = ScriptedEngine()
    report = await run(engine, verify=verify)
    assert engine.calls == []
    assert (report.outcome, report.version, report.epoch) == (SwapOutcome.REFUSED, "v1", 3)
    assert (report.code, report.reason) == (code, str(fault))


async def test_verification_has_a_deadline() -> None:
    """A store that hangs does not block swaps for ever."""
    engine = ScriptedEngine()
    report = await run(engine, verify=asyncio.Event().wait)
    assert (report.outcome, report.code, engine.calls) == (SwapOutcome.REFUSED, "verify_failed", [])


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_a_pause_that_fails_only_resumes(how: str) -> None:
    """Weights and cache were not touched, so they are left alone."""
    engine = ScriptedEngine(**{how: (0,)})
    report = await run(engine)
    assert engine.calls == ["pause", "resume"]
    assert (report.outcome, report.version, report.code) == (SwapOutcome.RESTORED, "v1", "pause_failed")


@pytest.mark.parametrize("how", ["fails", "hangs"])
@pytest.mark.parametrize(("step", "phase"), [(1, "load"), (2, "invalidate"), (3, "label"), (4, "resume")])
async def test_a_failure_after_the_pause_brings_the_former_weights_back(how: str, step: int, phase: str) -> None:
    """Weights, cache and label of the former version, and then requests go on; a step that hangs has failed."""
    engine = ScriptedEngine(**{how: (step,)})
    report = await run(engine)
    assert engine.calls == THERE[: step + 1] + BACK
    assert (report.outcome, report.version, report.epoch) == (SwapOutcome.RESTORED, "v1", 3)
    assert report.code == f"{phase}_failed"
    assert report.reason is not None
    assert report.reason.startswith(f"{phase}: ")
    assert list(report.phases)[-1] == "restore"


@pytest.mark.parametrize("how", ["fails", "hangs"])
@pytest.mark.parametrize("back", range(4))
async def test_a_failure_on_the_way_back_is_said_and_goes_no_further(how: str, back: int) -> None:
    """Half-restored weights are never resumed: the caller restarts the engine."""
    failing = (1, 2 + back)
    engine = ScriptedEngine(**{how: failing})
    report = await run(engine)
    assert engine.calls == THERE[:2] + BACK[: back + 1]
    assert (report.outcome, report.version, report.epoch) == (SwapOutcome.FAILED, "v1", 3)
    assert report.code == "restore_failed"
    assert report.reason is not None
    assert "load: " in report.reason
    assert "restore: " in report.reason


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), RecursionError("too deep"), OSError(40, "a loop")])
async def test_an_unexpected_error_of_the_verification_is_a_refusal(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """The engine was not touched and serves on; the log has the traceback."""

    async def verify() -> None:
        raise error

    engine = ScriptedEngine()
    report = await run(engine, verify=verify)
    assert engine.calls == []
    assert (report.outcome, report.version, report.code) == (SwapOutcome.REFUSED, "v1", "internal")
    assert type(error).__name__ in (report.reason or "")
    assert "in verify\n    raise error" in caplog.text


async def test_an_unexpected_error_of_the_engines_client_is_not_swallowed() -> None:
    """Nobody knows then what the engine holds."""

    class Broken(ScriptedEngine):
        async def load(self, weights: str) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run(Broken())


# --- on the simulated engine, over HTTP


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    for seed in (1, 2):
        write_sim_model(tmp_path / f"v{seed}", seed=seed)
    return tmp_path / "v1", tmp_path / "v2"


@pytest.fixture
def engine(models: tuple[Path, Path]) -> Iterator[SimEngine]:
    with start_sim_engine(*serving(models[0]), "--time-scale", "1", "--weights-load-seconds", "0.2") as engine:
        yield engine


PROMPT = {"model": "simulated", "prompt": "a fixed prompt of some length, " * 20, "max_tokens": 12, "temperature": 0}


def serving(model: Path) -> tuple[str, ...]:
    return ("--model", str(model), "--served-model-name", "simulated")


def fixed_answer(engine: SimEngine) -> tuple[str, str, int]:
    answer = engine.client.post("/v1/completions", json=PROMPT).raise_for_status()
    body = answer.json()
    details = body["usage"]["prompt_tokens_details"] or {}
    return body["choices"][0]["text"], answer.headers["x-intellect-checkpoint"], details.get("cached_tokens", 0)


async def swap_on(engine: SimEngine, former: Served, target: Served) -> SwapReport:
    client = EngineClient(engine.url, TOKEN)
    try:
        return await run(client, former=former, target=target, deadlines=SwapDeadlines())
    finally:
        await client.aclose()


async def test_running_streams_survive_a_swap(engine: SimEngine, models: tuple[Path, Path]) -> None:
    """Sixteen streams: none fails, none is cut; the fixed prompt's answer and the label change."""
    before, label, _ = fixed_answer(engine)
    assert label == "base"

    async def stream(client: httpx.AsyncClient) -> int:
        body = {"model": "simulated", "prompt": "long", "max_tokens": 150, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            events = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        return len(events) - 1

    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as client, asyncio.TaskGroup() as group:
        streams = [group.create_task(stream(client)) for _ in range(16)]
        await await_until(lambda: engine.metric("vllm:num_requests_running") == 16, 10, "all streams to run")
        report = await swap_on(
            engine,
            Served(version="base", epoch=0, weights=str(models[0])),
            Served(version="v2", epoch=1, weights=str(models[1])),
        )
        assert not any(task.done() for task in streams)
    assert report.outcome is SwapOutcome.SWAPPED
    assert [task.result() for task in streams] == [150] * 16
    after, label, _ = fixed_answer(engine)
    assert label == "v2+1"
    assert after != before


async def test_no_prompt_hits_the_cache_of_other_weights(models: tuple[Path, Path]) -> None:
    """A -> B -> A: the first request after each swap computes its whole prompt; the second one finds its own blocks."""
    with start_sim_engine(*serving(models[0]), "--enable-prompt-tokens-details") as engine:
        a, b = (str(model) for model in models)
        first = fixed_answer(engine)
        assert first[2] == 0
        assert fixed_answer(engine)[2] > 0
        assert (
            await swap_on(engine, Served(version="base", epoch=0, weights=a), Served(version="b", epoch=1, weights=b))
        ).epoch == 1
        assert fixed_answer(engine)[1:] == ("b+1", 0)
        assert fixed_answer(engine)[2] > 0
        await swap_on(engine, Served(version="b", epoch=1, weights=b), Served(version="base", epoch=2, weights=a))
        assert fixed_answer(engine) == (first[0], "base+2", 0)


async def test_a_reload_that_fails_leaves_the_former_weights(models: tuple[Path, Path]) -> None:
    """The worker refuses the new weights once; the former ones answer as before, under their label."""
    fault = '{"kind": "fail_reload", "times": 1}'
    with start_sim_engine(*serving(models[0]), "--fault", fault) as engine:
        before = fixed_answer(engine)
        report = await swap_on(
            engine,
            Served(version="base", epoch=0, weights=str(models[0])),
            Served(version="v2", epoch=1, weights=str(models[1])),
        )
        assert (report.outcome, report.version, report.code) == (SwapOutcome.RESTORED, "base", "load_failed")
        assert fixed_answer(engine) == before
        assert engine.admin("GET", "/is_paused").json() == {"is_paused": False}
