"""Continuous batching and the KV cache of the simulated engine, on virtual time."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.sim_blocks import AllBlocksCleared, BlockRemoved, BlocksStored, CacheEvent
from server.sim_generation import Emission, Generation, Sampling
from server.sim_scheduler import PauseState, Scheduler, SequenceState
from server.sim_settings import SchedulerSettings, TimingModel
from server.sim_text import STALE_KV_MARKER, decode

OLD, NEW = b"old weights", b"new weights"
TIMING = TimingModel(
    prefill_tokens_per_s=1000.0, step_base_s=0.01, decode_per_sequence_s=0.001, decode_per_context_token_s=0.0001
)


def limits(**changes: int | bool) -> SchedulerSettings:
    small: dict[str, int | bool] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 64,
    }
    return SchedulerSettings(**{**small, **changes})  # type: ignore[arg-type]


def make_scheduler(**changes: int | bool) -> Scheduler:
    return Scheduler(limits(**changes), TIMING, OLD)


def sequence(name: str, prompt: list[int], *, max_tokens: int = 4, salt: str | None = None) -> SequenceState:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    generation = Generation(name, prompt, answered=0, sampling=sampling)
    return SequenceState(name, prompt, generation, arrived_at=0.0, max_tokens=max_tokens, salt=salt)


def drain(scheduler: Scheduler, now: float = 0.0) -> list[Emission]:
    """Steps until nothing is left to do."""
    emissions: list[Emission] = []
    for _ in range(10_000):
        if not scheduler.has_work:
            return emissions
        step = scheduler.step(now)
        now += step.seconds
        emissions.extend(step.emissions)
    raise AssertionError(f"no end after 10,000 steps: {scheduler!r}")


def text_of(emissions: list[Emission], name: str) -> str:
    return decode(emission.token for emission in emissions if emission.sequence_id == name and emission.token is not None)


def undisturbed(state: SequenceState) -> str:
    """What a sequence would have said with an engine of its own."""
    again = sequence("alone", state.tokens[: state.prompt_tokens], max_tokens=state.max_tokens).generation
    emissions = [again.advance(OLD, room=1000) for _ in range(state.max_tokens)]
    return text_of(emissions, "alone")


def test_a_sequence_prefills_once_and_then_decodes_one_token_a_step() -> None:
    """The first step computes the prompt and gives the first token; each later step gives one more."""
    scheduler = make_scheduler()
    state = sequence("a", list(range(10)), max_tokens=3)
    scheduler.add(state)
    first, second, third = (scheduler.step(now) for now in (0.0, 1.0, 2.0))
    assert (first.prefilled_tokens, first.generated_tokens) == (10, 1)
    assert (second.prefilled_tokens, second.generated_tokens) == (0, 1)
    assert third.finished == (state,)
    assert not scheduler.has_work


def test_step_durations_follow_the_timing_model() -> None:
    """10 ms base; prefill at 1000 tokens/s; 1 ms per decoding sequence and 0.1 ms per token of its context."""
    scheduler = make_scheduler()
    scheduler.add(sequence("a", list(range(10)), max_tokens=3))
    assert scheduler.step(0.0).seconds == pytest.approx(0.010 + 10 / 1000)
    assert scheduler.step(1.0).seconds == pytest.approx(0.010 + 0.001 + 11 * 0.0001)


def test_a_long_prompt_is_prefilled_in_chunks_beside_the_running_ones() -> None:
    """No step computes more than max_num_batched_tokens, and running sequences keep their turn."""
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add(sequence("short", [1, 2, 3], max_tokens=30))
    scheduler.step(0.0)
    scheduler.add(sequence("long", list(range(100, 140)), max_tokens=2))
    steps = [scheduler.step(float(now)) for now in range(1, 4)]
    assert [step.prefilled_tokens for step in steps] == [15, 15, 10]
    assert [[e.sequence_id for e in step.emissions] for step in steps] == [["short"], ["short"], ["short", "long"]]


def test_waiting_sequences_are_admitted_in_order_of_arrival() -> None:
    """First come, first served, up to max_num_seqs at a time."""
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(sequence(name, [1, 2, ord(name)], max_tokens=2))
    assert [e.sequence_id for e in scheduler.step(0.0).emissions] == ["a", "b"]
    assert (scheduler.running, scheduler.waiting) == (2, 1)
    scheduler.step(1.0)
    assert [e.sequence_id for e in scheduler.step(2.0).emissions] == ["c"]


def test_the_same_prompt_again_is_served_from_the_cache_in_whole_blocks() -> None:
    """Of 10 tokens in blocks of 4 the second sequence finds 8; usage says so."""
    scheduler = make_scheduler()
    first, second = sequence("a", list(range(10))), sequence("b", list(range(10)))
    scheduler.add(first)
    drain(scheduler)
    scheduler.add(second)
    assert scheduler.step(1.0).prefilled_tokens == 2
    assert (first.cached_tokens, first.created_cache_tokens) == (0, 8)
    assert (second.cached_tokens, second.created_cache_tokens) == (8, 0)


def test_a_prompt_of_whole_blocks_still_computes_its_last_block() -> None:
    """At least one token is computed, so the last of 8 tokens costs its whole block."""
    scheduler = make_scheduler()
    scheduler.add(sequence("a", list(range(8))))
    drain(scheduler)
    again = sequence("b", list(range(8)))
    scheduler.add(again)
    drain(scheduler)
    assert again.cached_tokens == 4


def test_the_next_turn_finds_the_answer_of_the_last_one_cached() -> None:
    """Blocks of generated tokens are cached like those of prompts."""
    scheduler = make_scheduler()
    first = sequence("a", [1, 2, 3], max_tokens=10)
    scheduler.add(first)
    drain(scheduler)
    second = sequence("b", [*first.tokens, 7, 8])
    scheduler.add(second)
    drain(scheduler)
    assert second.cached_tokens == 12  # 3 + 10 tokens, the last of which was never computed


@pytest.mark.parametrize("salts", [("x", "y"), ("x", None)])
def test_another_salt_shares_nothing(salts: tuple[str | None, str | None]) -> None:
    """cache_salt separates tenants."""
    scheduler = make_scheduler()
    states = [sequence(str(index), list(range(12)), salt=salt) for index, salt in enumerate(salts)]
    for state in states:
        scheduler.add(state)
        drain(scheduler)
    assert [state.cached_tokens for state in states] == [0, 0]


def test_without_prefix_caching_nothing_is_found() -> None:
    """--no-enable-prefix-caching."""
    scheduler = make_scheduler(prefix_caching=False)
    for name in "ab":
        state = sequence(name, list(range(12)))
        scheduler.add(state)
        drain(scheduler)
        assert (state.cached_tokens, state.created_cache_tokens) == (0, 0)
    assert scheduler.take_cache_events() == []


def test_answers_from_blocks_of_other_weights_are_marked() -> None:
    """After a swap without a cache reset the second answer says that it read stale KV; after a reset it does not."""
    scheduler = make_scheduler()
    scheduler.add(sequence("before", list(range(12))))
    drain(scheduler)
    scheduler.fingerprint = NEW
    scheduler.add(sequence("stale", list(range(12)), max_tokens=8))
    assert STALE_KV_MARKER in text_of(drain(scheduler), "stale")
    assert scheduler.reset_prefix_cache()
    scheduler.add(sequence("fresh", list(range(12)), max_tokens=8))
    assert STALE_KV_MARKER not in text_of(drain(scheduler), "fresh")


def test_blocks_written_under_b_are_stale_for_a_again() -> None:
    """After A -> B -> A, what was computed under B in between is not A's, even behind a prefix that is."""
    scheduler = make_scheduler()
    scheduler.add(sequence("under-a", list(range(8))))
    drain(scheduler)
    scheduler.fingerprint = NEW
    scheduler.add(sequence("under-b", list(range(20))))
    drain(scheduler)
    scheduler.fingerprint = OLD
    scheduler.add(sequence("prefix-of-a", list(range(9)), max_tokens=8))
    assert STALE_KV_MARKER not in text_of(drain(scheduler), "prefix-of-a")
    scheduler.add(sequence("through-b", list(range(20)), max_tokens=8))
    assert STALE_KV_MARKER in text_of(drain(scheduler), "through-b")


def test_a_block_filled_on_both_sides_of_a_swap_belongs_to_nobody() -> None:
    """A sequence that ran through a swap leaves a block of mixed weights; whoever hits it is marked under either weights."""
    scheduler = make_scheduler(block_size=16, num_blocks=16)
    state = sequence("through", list(range(10)), max_tokens=30)
    scheduler.add(state)
    scheduler.step(0.0)
    scheduler.fingerprint = NEW
    drain(scheduler)
    for fingerprint in (NEW, OLD):
        scheduler.fingerprint = fingerprint
        scheduler.add(sequence(f"hit-{fingerprint!r}", state.tokens[:20], max_tokens=8))
        assert STALE_KV_MARKER in text_of(drain(scheduler), f"hit-{fingerprint!r}")


def test_a_frozen_scheduler_does_nothing_and_queues() -> None:
    """ALL_WAIT: neither running nor new sequences advance; they go on afterwards."""
    scheduler = make_scheduler()
    scheduler.add(sequence("a", [1, 2, 3]))
    scheduler.step(0.0)
    scheduler.pause = PauseState.ALL_WAIT
    scheduler.add(sequence("b", [4, 5, 6]))
    assert not scheduler.has_work
    assert scheduler.step(1.0).emissions == ()
    scheduler.pause = PauseState.RUNNING
    assert Counter(e.sequence_id for e in drain(scheduler)) == {"a": 3, "b": 4}


def test_a_draining_scheduler_finishes_what_runs_and_admits_nothing() -> None:
    """NEW_WAIT: running sequences end, waiting ones stay."""
    scheduler = make_scheduler()
    scheduler.add(sequence("a", [1, 2, 3]))
    scheduler.step(0.0)
    scheduler.pause = PauseState.NEW_WAIT
    scheduler.add(sequence("b", [4, 5, 6]))
    assert {e.sequence_id for e in drain(scheduler)} == {"a"}
    assert (scheduler.running, scheduler.waiting) == (0, 1)


def test_the_cache_cannot_be_reset_under_a_running_sequence_unless_it_is_preempted() -> None:
    """reset_prefix_cache is false while blocks are held; with preemption the sequence is computed again, text unchanged."""
    plain, interrupted = make_scheduler(), make_scheduler()
    for scheduler in (plain, interrupted):
        scheduler.add(sequence("a", list(range(10)), max_tokens=9))
        scheduler.step(0.0)
    assert not interrupted.reset_prefix_cache()
    assert interrupted.reset_prefix_cache(preempt_running=True)
    assert interrupted.kv_usage == 0
    assert interrupted.step(1.0).prefilled_tokens == 11
    assert text_of(drain(plain), "a")[5:] == text_of(drain(interrupted), "a")


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    """There must be room for one token."""
    with pytest.raises(ValueError, match="leaves no room"):
        make_scheduler().add(sequence("a", list(range(64))))


def test_an_aborted_sequence_frees_its_blocks_at_once() -> None:
    """Running or waiting, an abort leaves nothing behind, and a second one finds nothing."""
    scheduler = make_scheduler(max_num_seqs=1)
    for name in "ab":
        scheduler.add(sequence(name, list(range(10))))
    scheduler.step(0.0)
    assert scheduler.kv_usage > 0
    assert scheduler.abort("b", 1.0) is not None
    assert scheduler.abort("a", 1.0) is not None
    assert scheduler.abort("a", 1.0) is None
    assert (scheduler.kv_usage, scheduler.running, scheduler.waiting) == (0, 0, 0)


def test_cache_events_tell_what_is_stored_evicted_and_cleared() -> None:
    """Events name chained blocks with their tokens; removal names what stood there; a reset clears all."""
    scheduler = make_scheduler(num_blocks=16, max_model_len=64)
    scheduler.add(sequence("a", list(range(9)), salt="s"))
    drain(scheduler)
    (prompt_blocks, answer_block) = scheduler.take_cache_events()
    assert isinstance(prompt_blocks, BlocksStored)
    assert (prompt_blocks.parent, prompt_blocks.tokens, prompt_blocks.salt) == (None, tuple(range(8)), "s")
    assert isinstance(answer_block, BlocksStored)
    assert (answer_block.parent, answer_block.salt) == (prompt_blocks.hashes[-1], None)
    scheduler.add(sequence("b", list(range(100, 160))))
    drain(scheduler)
    removed = [event for event in scheduler.take_cache_events() if isinstance(event, BlockRemoved)]
    assert {event.hash for event in removed} == {*prompt_blocks.hashes, *answer_block.hashes}
    assert scheduler.reset_prefix_cache()
    assert scheduler.take_cache_events() == [AllBlocksCleared()]


@dataclass(frozen=True)
class Workload:
    prompts: list[list[int]]
    max_tokens: list[int]
    aborts: list[int]  # a step number for each sequence; 0: never


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Prompts that share prefixes, more of them than the cache of 16 blocks holds."""
    stems = draw(st.lists(st.lists(st.integers(0, 3), max_size=24), min_size=1, max_size=3))
    count = draw(st.integers(1, 12))
    prompts = [draw(st.sampled_from(stems)) + draw(st.lists(st.integers(0, 9), min_size=1, max_size=12)) for _ in range(count)]
    aborts = draw(st.lists(st.sampled_from([0, 0, 0, 1, 3, 9]), min_size=count, max_size=count))
    return Workload(prompts, draw(st.lists(st.integers(1, 24), min_size=count, max_size=count)), aborts)


def replay_events(events: list[CacheEvent], cached: Counter[bytes]) -> None:
    """Keeps a copy of the cache; as in vLLM a hash counts once for each block that holds it."""
    for event in events:
        match event:
            case BlocksStored(hashes, parent):
                assert parent is None or cached[parent] > 0
                cached.update(hashes)
            case BlockRemoved(block_hash):
                assert cached[block_hash] > 0
                cached[block_hash] -= 1
            case AllBlocksCleared():
                cached.clear()


@settings(max_examples=300, deadline=None)
@given(workloads(), st.booleans())
def test_whatever_the_load_every_sequence_ends_once_and_no_block_leaks(load: Workload, roomy: bool) -> None:
    """Under any mix of shared prefixes, aborts and too few blocks: no block is lent twice or lost, prefix hits are whole
    blocks short of the prompt, events keep a faithful copy of the cache, and preempted sequences say the same."""
    num_blocks = 400 if roomy else 16
    scheduler = make_scheduler(num_blocks=num_blocks, max_num_batched_tokens=20, max_num_seqs=6)
    states = [
        sequence(f"s{index}", prompt, max_tokens=count)
        for index, (prompt, count) in enumerate(zip(load.prompts, load.max_tokens, strict=True))
    ]
    for state in states:
        scheduler.add(state)
    ended: Counter[str] = Counter()
    emissions: list[Emission] = []
    cached: Counter[bytes] = Counter()
    now = 0.0
    for number in range(1, 5000):
        if not scheduler.has_work:
            break
        for state, at in zip(states, load.aborts, strict=True):
            if at == number and scheduler.abort(state.id, now) is not None:
                ended[state.id] += 1
        step = scheduler.step(now)
        now += step.seconds
        emissions.extend(step.emissions)
        ended.update(state.id for state in step.finished)
        assert 0 <= scheduler.kv_usage <= 1
        assert step.prefilled_tokens <= 20
        assert scheduler.running <= 6
        replay_events(scheduler.take_cache_events(), cached)
    assert not scheduler.has_work
    assert scheduler.kv_usage == 0
    assert ended == {state.id: 1 for state in states}
    for state, at in zip(states, load.aborts, strict=True):
        if state.cached_tokens is not None:
            assert state.cached_tokens % 4 == 0
            assert state.cached_tokens < state.prompt_tokens
        if at == 0:
            assert text_of(emissions, state.id) == undisturbed(state)
    assert scheduler.reset_prefix_cache()


def test_the_youngest_sequence_is_preempted_and_says_the_same_afterwards() -> None:
    """With 16 blocks for two sequences that need 11 each, the second is computed again after the first has ended."""
    scheduler = make_scheduler(num_blocks=16)
    states = [sequence(name, [ord(name)] * 4, max_tokens=40) for name in "ab"]
    for state in states:
        scheduler.add(state)
    emissions = drain(scheduler)
    assert [state.preemptions for state in states] == [0, 1]
    assert text_of(emissions, "b") == undisturbed(states[1])
