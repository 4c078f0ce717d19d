"""Every rival can be made by its name, tuned, and run on any traffic."""

import dataclasses
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.usage import Usage
from router.policy.interface import EngineLoad, PlacementRequest, Policy, ReplicaFacts, Ticket
from router.policy.prompt import BytesPrompt
from router.sim.rivals.registry import RIVALS
from router.sim.rivals.rival import Rival
from router.types import ReplicaId
from tests.router.sim.rivals.shapes import chain

IDS = [ReplicaId(name) for name in "abcde"]
CALLS = [
    "place",
    "place",
    "place",
    "first_token",
    "ended",
    "adopt",
    "stored",
    "evicted",
    "scraped",
    "changed",
    "removed",
    "restarted",
]
Step = tuple[str, int, int, list[ReplicaId], float]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(CALLS),
        st.integers(0, 9),
        st.integers(0, 40),
        st.lists(st.sampled_from(IDS), min_size=1, max_size=5, unique=True),
        st.sampled_from([0.0, 0.01, 1.0, 40.0, 500.0]),
    ),
    min_size=5,
    max_size=60,
)


@pytest.mark.parametrize("name", RIVALS)
def test_the_search_space_is_made_of_the_settings_fields(name: str) -> None:
    """A tuner can set every field that the space names, to every value."""
    entry = RIVALS[name]
    for field, values in entry.search.items():
        for value in values:
            entry.make(random.Random(0), dataclasses.replace(entry.defaults, **{field: value}))
    assert isinstance(entry.defaults, entry.settings)


@pytest.mark.parametrize("name", RIVALS)
@settings(max_examples=50)
@given(steps=STEPS, seed=st.integers(0, 3))
def test_every_rival_survives_any_traffic_and_is_deterministic(name: str, steps: Sequence[Step], seed: int) -> None:
    """It chooses only candidates, whatever it was told before, and the same again with the same seed; no count is left over."""
    entry = RIVALS[name]
    first = run(entry.make(random.Random(seed), entry.defaults), steps)
    assert run(entry.make(random.Random(seed), entry.defaults), steps) == first


@pytest.mark.parametrize("name", [name for name, entry in RIVALS.items() if "temperature" in entry.search])
@given(steps=STEPS)
@settings(max_examples=50)
def test_rivals_that_sample_choose_only_candidates(name: str, steps: Sequence[Step]) -> None:
    """Also with a temperature."""
    entry = RIVALS[name]
    run(entry.make(random.Random(0), dataclasses.replace(entry.defaults, temperature=0.5)), steps)


def run(policy: Policy, steps: Sequence[Step]) -> list[tuple[ReplicaId, int]]:
    """The decisions."""
    now = 0.0
    decisions = []
    waiting: list[Ticket] = []
    answering: list[Ticket] = []
    for call, which, length, replicas, wait in steps:
        now += wait
        replica = replicas[0]
        if call in ("place", "adopt"):
            request = PlacementRequest(
                "m",
                BytesPrompt(b"%d" % which * length * 64, 1),
                affinity=f"s{which}" if which % 3 else None,
                blocks=chain(which, length),
            )
            if call == "adopt":
                waiting.append(policy.adopt(request, replica, 0, now))
                continue
            ticket = policy.place(request, replicas, now)
            assert ticket is not None
            assert ticket.replica in replicas
            assert ticket.request is request
            decisions.append((ticket.replica, ticket.rank))
            waiting.append(ticket)
        elif call == "first_token" and waiting:
            ticket = waiting.pop(which % len(waiting))
            policy.first_token(ticket, now)
            answering.append(ticket)
        elif call == "ended" and waiting + answering:
            tickets = answering or waiting
            policy.ended(tickets.pop(which % len(tickets)), Usage(16 * length, which) if which else None, now)
        elif call == "stored":
            policy.stored(replica, 0, chain(which, length), now)
        elif call == "evicted":
            policy.evicted(replica, 0, chain(which, length)[-3:], now)
        elif call == "scraped":
            policy.scraped(replica, EngineLoad(which, length, which / 9), now)
        elif call == "changed":
            policy.changed(ReplicaFacts(replica, version=str(length), ranks=1 + which % 3, kv_block_tokens=16))
        elif call == "removed":
            policy.removed(replica)
        elif call == "restarted":
            policy.restarted(replica)
    for ticket in waiting + answering:
        policy.ended(ticket, None, now)
    if isinstance(policy, Rival):
        assert all(policy.requests.on((replica, rank)) == 0 for replica in IDS for rank in range(3))
    return decisions
