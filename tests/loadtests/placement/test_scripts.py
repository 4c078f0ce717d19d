"""What is sent to a server is what the simulator is told: equal beginnings are equal in both, token for token."""

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest

from loadtests.placement.fleet_figures import Counters, of_result, of_servers
from loadtests.placement.scripts import (
    Prefixes,
    Range,
    Script,
    Talks,
    Turn,
    in_order,
    jittered,
    prefix_scripts,
    round_scripts,
    talk_scripts,
)
from loadtests.placement.simulated import ScriptedWorkload, run_simulated
from loadtests.placement.spelling import LETTERS, WORDS, Spelling
from router.policy.catalogue import PolicyName
from router.sim.fleet import EngineLimits, FleetSettings
from router.sim.prompts import Segment
from router.sim.request import SimRequest
from server.sim_text import encode

PREFIXES = Prefixes(shared=3, tokens=200, question=Range(10, 90), output=Range(1, 8), rate=20.0)
TALKS = Talks(systems=2, system_tokens=100, step=Range(5, 50), output=Range(1, 30), turns=Range(1, 5), pause_s=1.0, rate=5.0)


def requests_of(scripts: Sequence[Script], spelling: Spelling, kv_block_tokens: int = 16) -> dict[tuple[str, int], SimRequest]:
    """Of the simulator, every turn of every script."""
    workload = ScriptedWorkload(scripts, bytes_per_token=spelling.bytes_per_token, kv_block_tokens=kv_block_tokens)
    open_requests = list(workload.initial(Random(0)))
    found = {}
    while open_requests:
        request = open_requests.pop()
        found[request.session, request.turn] = request
        open_requests += workload.follow_up(request, request.arrives_at, Random(0))
    return found


def texts_of(scripts: Sequence[Script], spelling: Spelling) -> dict[tuple[str, int], str]:
    """Every prompt as it is sent, with answers such as the server might give."""
    texts = {}
    for script in scripts:
        prompt = ""
        for number, turn in enumerate(script.turns):
            prompt += "".join(map(spelling.text, turn.segments))
            texts[script.id, number] = prompt
            prompt += spelling.text(turn.answer)
    return texts


def tokens_of(text: str, spelling: Spelling) -> list[int]:
    return encode(text) if spelling is WORDS else list(text.encode())


@pytest.mark.parametrize("spelling", [WORDS, LETTERS])
def test_prompts_share_in_the_text_what_they_share_in_the_simulator(spelling: Spelling) -> None:
    """Lengths are equal, and two prompts have as many equal leading KV blocks in one as in the other."""
    rng = Random(5)
    scripts = in_order(prefix_scripts(PREFIXES, 1.0, rng), talk_scripts(TALKS, 1.5, rng))
    simulated, texts = requests_of(scripts, spelling), texts_of(scripts, spelling)
    assert simulated.keys() == texts.keys()
    tokens = {key: tokens_of(text, spelling) for key, text in texts.items()}
    shared = 0
    for key, request in simulated.items():
        assert request.prompt_tokens == len(tokens[key])
        assert len(request.blocks) == len(tokens[key]) // 16
        assert request.prompt.size == len(texts[key])
        for other, another in simulated.items():
            blocks = _common(request.blocks, another.blocks)
            assert blocks == _common(_blocks(tokens[key]), _blocks(tokens[other]))
            shared += key != other and blocks > 0
    assert shared > 0


def test_a_later_turn_begins_with_the_answer_before_it() -> None:
    """So that what an engine has generated is found in its cache."""
    scripts = [Script("talk", 0.0, (Turn((Segment(1, 64),), Segment(2, 64)), Turn((Segment(3, 30),), Segment(4, 5), 0.5)))]
    first, second = (requests_of(scripts, WORDS)["talk", turn] for turn in (0, 1))
    assert [*first.blocks, *first.answer_blocks] == [*second.blocks][:8]
    assert second.arrives_at == pytest.approx(0.5)
    assert second.prompt_tokens == 158


def test_larger_kv_blocks_are_whole_ones_of_the_small() -> None:
    """An engine with blocks of 128 tokens finds a shared beginning in whole blocks only."""
    shared = Segment(9, 300)
    scripts = [
        Script(str(number), 0.0, (Turn((shared, Segment(number, 100)), Segment(-number - 1 & 255, 8)),)) for number in (1, 2)
    ]
    one, other = requests_of(scripts, LETTERS, kv_block_tokens=128).values()
    assert len(one.blocks) == 400 // 128
    assert _common(one.blocks, other.blocks) == 300 // 128
    with pytest.raises(ValueError, match="multiple of 16"):
        ScriptedWorkload(scripts, bytes_per_token=1.0, kv_block_tokens=100)


def test_a_segment_cut_short_reads_as_its_beginning() -> None:
    """As in the simulator; another segment reads otherwise."""
    whole = WORDS.text(Segment(7, 50))
    assert whole.startswith(WORDS.text(Segment(7, 20)))
    assert len(encode(whole)) == 50
    assert WORDS.text(Segment(8, 50)) != whole


def test_the_same_seed_makes_the_same_traffic() -> None:
    """In the order of arrival, within the time that was asked for."""
    scripts = [in_order(prefix_scripts(PREFIXES, 3.0, Random(1)), talk_scripts(TALKS, 3.0, Random(2))) for _ in range(2)]
    assert scripts[0] == scripts[1]
    assert all(0 < earlier.at <= later.at < 3.0 for earlier, later in pairwise(scripts[0]))
    assert len({script.id for script in scripts[0]}) == len(scripts[0])


def test_jitter_moves_times_and_nothing_else() -> None:
    """Each client by no more than was said, still in order."""
    scripts = prefix_scripts(PREFIXES, 3.0, Random(1))
    moved = jittered(scripts, 0.02, Random(2))
    assert [script.at for script in moved] == sorted(script.at for script in moved)
    at = {script.id: script.at for script in moved}
    assert all(abs(at[script.id] - script.at) <= 0.02 for script in scripts)
    assert {(script.id, script.turns) for script in moved} == {(script.id, script.turns) for script in scripts}
    assert [script.at for script in moved] != [script.at for script in scripts]


def test_skewed_beginnings_come_oftener() -> None:
    """The first of them most."""
    scripts = prefix_scripts(PREFIXES._replace(skew=3.0, rate=200.0), 5.0, Random(1))
    counts: dict[Segment, int] = {}
    for script in scripts:
        beginning = script.turns[0].segments[0]
        counts[beginning] = counts.get(beginning, 0) + 1
    assert sorted(counts.values())[-1] > 0.8 * len(scripts)


def test_every_user_of_every_beginning_comes_once() -> None:
    """Three beginnings, four users each, in an order that is not theirs."""
    order = [script.turns[0].segments[0] for script in round_scripts(PREFIXES, 4, Random(1))]
    assert sorted(order.count(beginning) for beginning in set(order)) == [4, 4, 4]
    assert order != sorted(order)


def test_the_simulator_serves_every_turn() -> None:
    """And counts hits as the engines do: what is cached of all that was sent."""
    scripts = in_order(prefix_scripts(PREFIXES, 2.0, Random(1)), talk_scripts(TALKS, 2.0, Random(2)))
    fleet = FleetSettings(replicas=1, limits=EngineLimits(kv_capacity_tokens=65_536))
    result = run_simulated(scripts, fleet, PolicyName.RANDOM, bytes_per_token=5.0, seed=1)
    figures = of_result(result)
    assert figures.requests == sum(len(script.turns) for script in scripts)
    assert 0.3 < figures.hit_rate < 1.0
    assert figures.uncached_tokens == sum(rank.prefilled_tokens for rank in result.ranks)


def test_counts_of_engines_are_summed_before_they_are_divided() -> None:
    """A replica with few requests does not weigh as much as one with many."""
    before, after = Counters(100.0, 50.0, 100.0), Counters(1100.0, 850.0, 1100.0)
    figures = of_servers([], [after.since(before), Counters(10.0, 0.0, 10.0)])
    assert figures.hit_rate == pytest.approx(800 / 1010)
    assert figures.uncached_tokens == 210.0


def _blocks(tokens: list[int]) -> list[tuple[int, ...]]:
    """Chained as hashes are: each stands for all before it."""
    return [tuple(tokens[: end + 16]) for end in range(0, len(tokens) - 15, 16)]


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
