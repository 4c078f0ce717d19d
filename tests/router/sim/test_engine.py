"""The simulated engine: token budget, prefix cache, eviction, preemption and steps taken together."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.sim.blocks import BlockCache, Node
from router.sim.engine import Engine, StepOutcome
from router.sim.fleet import EngineLimits
from router.sim.sequence import EngineSequence
from router.sim.timing import H200_GLM, StepTiming
from tests.router.sim.loads import fresh, request_of

TIMING = StepTiming(base_s=0.01, prefill_tokens_per_s=1000.0, per_sequence_s=0.001, per_context_token_s=0.0001)


def make_engine(*, blocks: int = 64, batch: int = 8, budget: int = 64, reserve_full_prompt: bool = True) -> Engine:
    limits = EngineLimits(
        kv_capacity_tokens=blocks * 4,
        kv_block_tokens=4,
        max_num_seqs=batch,
        max_num_batched_tokens=budget,
        reserve_full_prompt=reserve_full_prompt,
    )
    return Engine(limits, TIMING, records_events=True)


def sequence(number: int, prompt: list[int], output: int = 4) -> EngineSequence:
    answer = [1_000_000 * (number + 1) + index for index in range(output)]
    return EngineSequence(request_of(number, 0.0, prompt, answer, block=4))


def take_step(engine: Engine, now: float = 0.0) -> tuple[float, StepOutcome]:
    """One step, though more might be taken together."""
    assert engine.plan(now) >= 1
    seconds = engine.seconds(1)
    return seconds, engine.finish(1, now + seconds, seconds)


def drain(engine: Engine, now: float = 0.0) -> tuple[float, list[EngineSequence]]:
    """Takes steps until nothing is left to do; returns when, and what has finished."""
    finished: list[EngineSequence] = []
    while steps := engine.plan(now):
        seconds = engine.seconds(steps)
        last_s = seconds - (engine.seconds(steps - 1) if steps > 1 else 0.0)
        now += seconds
        finished += engine.finish(steps, now, last_s).finished
    return now, finished


def test_a_step_takes_as_long_as_the_timing_says() -> None:
    """10 ms base; prefill at 1000 tokens/s; 1 ms per decoding sequence and 0.1 ms per token of its context."""
    engine = make_engine()
    engine.submit(sequence(0, list(range(20)), output=3))
    seconds, outcome = take_step(engine)
    assert seconds == pytest.approx(0.01 + 0.020)
    assert len(outcome.started) == 1
    seconds, _ = take_step(engine)
    assert seconds == pytest.approx(0.01 + 0.001 + 21 * 0.0001)
    seconds, outcome = take_step(engine)
    assert seconds == pytest.approx(0.01 + 0.001 + 22 * 0.0001)
    assert len(outcome.finished) == 1
    assert engine.plan(0.0) == 0


def test_attention_makes_a_later_chunk_dearer() -> None:
    """With a quadratic term the prefill of n tokens behind c others costs q * n * (2c + n)."""
    timing = StepTiming(
        base_s=0.0, prefill_tokens_per_s=1e9, per_sequence_s=1.0, per_context_token_s=0.0, per_attended_pair_s=1e-3
    )
    engine = Engine(EngineLimits(kv_capacity_tokens=400, kv_block_tokens=4, max_num_seqs=8, max_num_batched_tokens=10), timing)
    engine.submit(sequence(0, list(range(20)), output=1))
    first, _ = take_step(engine)
    second, _ = take_step(engine)
    assert first == pytest.approx(0.1, abs=1e-6)
    assert second == pytest.approx(0.3, abs=1e-6)


def test_a_long_prompt_is_computed_in_chunks_beside_decoding() -> None:
    """Running sequences keep their token in every step; the prompt gets what the budget leaves."""
    engine = make_engine(blocks=64, budget=16)
    short, long = sequence(0, list(range(8)), output=20), sequence(1, list(range(100, 140)), output=2)
    engine.submit(short)
    take_step(engine)
    engine.submit(long)
    for computed in (15, 30, 40):
        take_step(engine)
        assert long.computed == computed
    assert engine.output_of(short) == 4
    assert engine.output_of(long) == 1


def test_siblings_in_one_step_share_the_prompt() -> None:
    """Blocks are cached when their step is scheduled, so that of identical prompts only the first is computed."""
    engine = make_engine()
    prompt = list(range(22))
    siblings = [sequence(number, prompt) for number in range(4)]
    for sibling in siblings:
        engine.submit(sibling)
    take_step(engine)
    assert [sibling.cached_tokens for sibling in siblings] == [0, 20, 20, 20]
    assert engine.prefilled_tokens == 22 + 3 * 2


def test_one_token_of_a_known_prompt_is_always_computed() -> None:
    """A prompt of whole blocks that is wholly cached still has its last block computed."""
    engine = make_engine()
    first, again = sequence(0, list(range(16)), output=1), sequence(1, list(range(16)), output=1)
    engine.submit(first)
    drain(engine)
    engine.submit(again)
    drain(engine)
    assert again.cached_tokens == 12


def test_the_next_turn_finds_the_answer_in_the_cache() -> None:
    """What was generated is cached as well, except the last token, whose KV was never computed."""
    engine = make_engine()
    turn = sequence(0, list(range(10)), output=7)
    engine.submit(turn)
    drain(engine)
    answer = [1_000_000 + index for index in range(7)]
    following = sequence(1, [*range(10), *answer, 5, 6, 7])
    engine.submit(following)
    drain(engine)
    assert following.cached_tokens == 16


def test_the_least_recently_used_prefix_is_evicted_first_and_from_its_end() -> None:
    """A prompt that was used again outlives one that was not, and of that one the beginning goes last."""
    engine = make_engine(blocks=12)
    old, used = list(range(16)), list(range(100, 116))
    for number, prompt in enumerate((old, used, old[:4] + [7], used)):
        engine.submit(sequence(number, prompt, output=1))
        drain(engine)
    engine.submit(sequence(9, list(range(200, 220)), output=1))
    drain(engine)
    assert engine.cached_prefix(sequence(10, used).hashes, 100) == 16
    assert 0 < engine.cached_prefix(sequence(10, old).hashes, 100) < 16


def test_too_little_kv_preempts_the_youngest_and_all_work_still_ends() -> None:
    """The oldest is never preempted, and the preempted lose time but no tokens."""
    engine = make_engine(blocks=16)
    sequences = [sequence(number, [100 * number + index for index in range(8)], output=30) for number in range(5)]
    for one in sequences:
        engine.submit(one)
    _, finished = drain(engine)
    assert engine.preemptions > 0
    assert sequences[0].preemptions == 0
    assert sorted(one.request.id for one in finished) == [0, 1, 2, 3, 4]
    assert all(one.output == 30 for one in sequences)
    assert engine.generated_tokens == 5 * 30
    assert engine.cache.held == 0


def test_the_worst_gap_of_an_answer_covers_a_neighbours_prefill_and_a_preemption() -> None:
    """A client sees the step that was long because of somebody else's prompt."""
    engine = make_engine(blocks=200, budget=200)
    waiting = sequence(0, list(range(8)), output=10)
    engine.submit(waiting)
    take_step(engine)
    take_step(engine)
    engine.submit(sequence(1, list(range(100, 250)), output=1))
    long, _ = take_step(engine)
    drain(engine)
    assert long > 0.15
    assert waiting.worst_gap_s == pytest.approx(long)


def test_a_prompt_is_admitted_only_if_all_of_it_fits() -> None:
    """With chunks alone two long prompts would be begun that cannot both be ended."""
    for reserves, begun in ((True, 1), (False, 2)):
        engine = make_engine(blocks=12, budget=16, reserve_full_prompt=reserves)
        for number in range(2):
            engine.submit(sequence(number, [100 * number + index for index in range(30)], output=1 + 9 * (1 - number)))
        take_step(engine)
        take_step(engine)
        assert len(engine.running) == begun


def test_a_request_that_could_never_run_is_turned_down() -> None:
    """It would wait for ever."""
    engine = make_engine(blocks=4)
    with pytest.raises(ValueError, match=r"request 3 has 20 tokens .* a rank holds 16: raise kv_capacity_tokens"):
        engine.submit(sequence(3, list(range(16)), output=4))


def test_an_aborted_sequence_gives_its_blocks_back() -> None:
    """At once while it waits, else when its step ends."""
    engine = make_engine(batch=1)
    running, waiting = sequence(0, list(range(8)), output=50), sequence(1, list(range(8)))
    engine.submit(running)
    engine.submit(waiting)
    take_step(engine)
    engine.abort(waiting)
    assert not engine.waiting
    assert engine.plan(0.0) == 49
    engine.abort(running)
    engine.finish(1, 1.0, 1.0)
    assert not engine.running
    assert engine.cache.held == 0
    assert engine.plan(1.0) == 0


def test_a_killed_engine_has_an_empty_cache() -> None:
    """Nothing of the former process is found again."""
    engine = make_engine()
    engine.submit(sequence(0, list(range(16)), output=50))
    take_step(engine)
    lost = engine.kill()
    assert [one.request.id for one in lost] == [0]
    assert engine.cached_prefix(lost[0].hashes, 100) == 0
    assert engine.plan(0.0) == 0


def test_steps_taken_together_equal_the_same_steps_taken_singly() -> None:
    """Only the work of the simulation becomes less."""
    ends = []
    for together in (True, False):
        engine, now = make_engine(blocks=30), 0.0
        for number in range(6):
            engine.submit(sequence(number, [100 * number + index for index in range(5 + number)], output=10 + 7 * number))
        while steps := engine.plan(now):
            steps = steps if together else 1
            seconds = engine.seconds(steps)
            now += seconds
            engine.finish(steps, now, seconds - (engine.seconds(steps - 1) if steps > 1 else 0.0))
        ends.append((now, engine.preemptions, engine.generated_tokens, engine.prefilled_tokens, engine.steps))
    assert ends[0] == pytest.approx(ends[1])
    assert ends[0][1] > 0


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(12, 60),
    st.integers(1, 8),
    st.integers(8, 80),
    st.booleans(),
)
def test_every_sequence_ends_and_blocks_are_accounted_for(
    seed: int, blocks: int, batch: int, budget: int, reserve: bool
) -> None:
    """Whatever the load, the limits hold in every step, all tokens come out, and at the end no block is held."""
    rng = random.Random(seed)
    engine = make_engine(blocks=blocks, batch=batch, budget=max(budget, batch), reserve_full_prompt=reserve)
    stems = [fresh(rng, rng.randint(0, 20)) for _ in range(3)]
    incoming = [
        sequence(number, [*rng.choice(stems), *fresh(rng, rng.randint(1, 10))], output=rng.randint(1, 15))
        for number in range(25)
    ]
    left, finished, now = list(incoming), [], 0.0
    stored: set[int] = set()
    while left or engine.running or engine.waiting:
        for _ in range(rng.randint(0, 3)):
            if left:
                engine.submit(left.pop())
        if not (steps := engine.plan(now)):
            continue
        steps = rng.randint(1, steps)
        assert len(engine.running) <= batch
        assert sum(1 for one in engine.running if one.is_decoding) == engine.decoding
        seconds = engine.seconds(steps)
        now += seconds
        outcome = engine.finish(steps, now, seconds / steps)
        finished += outcome.finished
        cache = engine.cache
        assert 0 <= cache.held <= cache.capacity
        assert cache.empty >= 0
        for event in outcome.events:
            assert stored.isdisjoint(event.blocks) if event.is_stored else stored.issuperset(event.blocks)
            stored.symmetric_difference_update(event.blocks)
        assert len(stored) <= blocks
    assert sorted(one.request.id for one in finished) == list(range(25))
    assert engine.generated_tokens == sum(one.request.output_tokens for one in incoming)
    assert engine.cache.held == 0
    assert engine.cache.idle == len(stored)
    first_prefills = sum(one.request.prompt_tokens - (one.cached_tokens or 0) for one in incoming)
    assert engine.prefilled_tokens >= first_prefills
    assert engine.preemptions or engine.prefilled_tokens == first_prefills


class PlainCache:
    """The same cache kept block by block, as plainly as can be."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.refs: dict[int, int] = {}
        self.idle: list[int] = []  # next victim first

    def match(self, hashes: list[int]) -> int:
        return next((index for index, block in enumerate(hashes) if block not in self.refs), len(hashes))

    def take(self, hashes: list[int]) -> bool:
        """Holds all of `hashes`, computing those that are not there."""
        hit = self.match(hashes)
        held = sum(1 for refs in self.refs.values() if refs)
        idle_hits = sum(1 for block in hashes[:hit] if not self.refs[block])
        if held + idle_hits + len(hashes) - hit > self.capacity:
            return False
        for block in hashes[:hit]:
            if not self.refs[block]:
                self.idle.remove(block)
            self.refs[block] += 1
        for block in hashes[hit:]:
            if len(self.refs) == self.capacity:
                del self.refs[self.idle.pop(0)]
            self.refs[block] = 1
        return True

    def drop(self, hashes: list[int]) -> None:
        for block in reversed(hashes):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.idle.append(block)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1_000_000), st.integers(5, 40))
def test_runs_of_blocks_behave_as_single_blocks_do(seed: int, capacity: int) -> None:
    """The radix tree finds and evicts exactly what a pool of blocks would."""
    rng = random.Random(seed)
    tree, plain = BlockCache(capacity, records_events=True), PlainCache(capacity)
    paths: list[list[int]] = [[]]
    holders: list[tuple[list[int], Node]] = []
    known: set[int] = set()
    for _ in range(60):
        if holders and rng.random() < 0.5:
            hashes, tip = holders.pop(rng.randrange(len(holders)))
            tree.release(tip, 0)
            plain.drop(hashes)
        else:
            base = rng.choice(paths)
            hashes = [*base[: rng.randint(0, len(base))], *(rng.getrandbits(60) for _ in range(rng.randint(1, 6)))]
            match = tree.match(hashes, len(hashes))
            assert match.blocks == plain.match(hashes)
            fits = len(hashes) - match.blocks + match.idle <= tree.free
            assert fits == plain.take(hashes)
            if fits:
                tip = tree.acquire(match)
                tree.reserve(len(hashes) - match.blocks)
                tip, copies = tree.extend(tip, hashes[match.blocks :])
                assert copies == 0
                holders.append((hashes, tip))
                paths.append(hashes)
        for event in tree.take_events():
            known = known.union(event.blocks) if event.is_stored else known.difference(event.blocks)
        assert known == set(plain.refs)
        assert tree.held == sum(1 for refs in plain.refs.values() if refs)
        assert tree.idle == len(plain.idle)


def test_more_blocks_than_there_are_cannot_be_reserved() -> None:
    """Whoever asks has to look first."""
    with pytest.raises(ValueError, match="5 KV blocks wanted, 4 free"):
        BlockCache(4, records_events=False).reserve(5)


@pytest.mark.parametrize(
    ("field", "value"),
    [("base_s", -1.0), ("prefill_tokens_per_s", 0.0), ("per_attended_pair_s", -1e-9), ("per_sequence_s", -1.0)],
)
def test_a_timing_that_cannot_be_is_refused(field: str, value: float) -> None:
    """The message names the field and its value."""
    values = {
        "base_s": H200_GLM.base_s,
        "prefill_tokens_per_s": H200_GLM.prefill_tokens_per_s,
        "per_sequence_s": H200_GLM.per_sequence_s,
        "per_context_token_s": H200_GLM.per_context_token_s,
        field: value,
    }
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        StepTiming(**values)
