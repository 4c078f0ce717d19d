"""A session stays on its replica and begins where the fewest sessions are."""

from collections import Counter

from router.sim.rivals.sticky import StickyLeastLoaded, StickySettings
from tests.router.sim.rivals.shapes import A, B, C, chosen, request, rng


def test_sessions_are_spread_by_their_number_and_stay() -> None:
    """Ten sessions on three replicas: 3, 3 and 4, whatever they send afterwards."""
    policy = StickyLeastLoaded(rng(), StickySettings())
    homes = {session: chosen(policy, request(affinity=session)) for session in "abcdefghij"}
    assert sorted(Counter(homes.values()).values()) == [3, 3, 4]
    assert {session: chosen(policy, request(affinity=session)) for session in homes for _ in range(3)} == homes


def test_a_session_whose_replica_is_away_begins_anew_and_does_not_return() -> None:
    """Its cache is built where it is now."""
    policy = StickyLeastLoaded(rng(), StickySettings())
    first = chosen(policy, request(affinity="s"))
    others = [replica for replica in (A, B, C) if replica != first]
    second = chosen(policy, request(affinity="s"), candidates=others)
    assert second in others
    assert chosen(policy, request(affinity="s")) == second


def test_requests_without_an_id_go_where_the_fewest_sessions_are_and_are_not_counted() -> None:
    """However many there are, the next session is placed as if there were none."""
    policy = StickyLeastLoaded(rng(), StickySettings())
    taken = {chosen(policy, request(affinity=session)) for session in "ab"}
    (free,) = {A, B, C} - taken
    assert {chosen(policy, request(range(length))) for length in range(1, 20)} == {free}
    assert chosen(policy, request(affinity="c")) == free


def test_a_session_expires_after_its_last_request() -> None:
    """A forgotten session no longer counts against its replica."""
    policy = StickyLeastLoaded(rng(), StickySettings(session_ttl_s=300.0))
    old = chosen(policy, request(affinity="old"), now=0.0, candidates=(A, B))
    kept = chosen(policy, request(affinity="kept"), now=0.0, candidates=(A, B))
    assert {old, kept} == {A, B}
    chosen(policy, request(affinity="kept"), now=200.0)
    assert chosen(policy, request(affinity="new"), now=310.0, candidates=(A, B)) == old
