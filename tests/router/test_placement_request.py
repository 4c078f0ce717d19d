"""What placement may know of a request."""

import pytest

from protocol.openai import Surface
from router.exchange import Exchange, Rejection
from router.placement_request import placement_request
from router.policy.interface import PlacementRequest, Priority
from router.policy.prompt import Chains
from router.request.fields import read_request

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":7%b}'


def known(
    headers: dict[bytes, bytes],
    more: bytes = b"",
    *,
    tenant: str = "",
    surface: Surface = Surface.CHAT,
    body: bytes | None = None,
) -> PlacementRequest:
    raw = CHAT % more if body is None else body
    exchange = Exchange(surface, surface.value, "r", "e", 0.0, tenant)
    return placement_request(exchange, read_request(surface, raw), headers, raw, "engines-model", Chains(), is_changed=False)


def test_a_session_is_known_by_the_clients_word_and_is_nobody_elses() -> None:
    """The header wins over the key in the body; equal words of two tenants are two sessions; an empty one is none."""
    one = known({b"x-session-id": b"s"}, tenant="a")
    assert one.affinity == known({b"x-session-id": b"s"}, b',"prompt_cache_key":"k"', tenant="a").affinity
    assert one.affinity != known({b"x-session-id": b"s"}, tenant="b").affinity
    assert known({}, b',"prompt_cache_key":"s"', tenant="a").affinity == one.affinity
    assert known({b"x-session-id": b""}).affinity is None
    assert known({}).affinity is None


@pytest.mark.parametrize("word", [b"\xff\x00odd", b"x" * 60_000])
def test_a_word_of_any_length_and_bytes_is_kept_in_the_same_space(word: bytes) -> None:
    """Clients with megabytes for an id do not fill the router's memory."""
    affinity = known({b"x-session-id": word}).affinity
    assert affinity is not None
    assert len(affinity) == 32


@pytest.mark.parametrize(
    ("word", "priority"),
    [(None, Priority.DEFAULT), (b"batch", Priority.BATCH), (b" Interactive ", Priority.INTERACTIVE)],
)
def test_priority_is_one_of_three_words(word: bytes | None, priority: Priority) -> None:
    """Anything else is refused by name, so that nobody believes in a class that there is not."""
    assert known({} if word is None else {b"x-intellect-priority": word}).priority is priority
    with pytest.raises(Rejection) as refusal:
        known({b"x-intellect-priority": b"urgent"})
    assert (refusal.value.status, refusal.value.detail.param) == (400, "x-intellect-priority")


def test_what_is_no_text_is_told_apart() -> None:
    """Pictures, embeddings and stored responses have other sizes than their bytes say."""
    picture = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,' + b"A" * 4000 + b'"}}'
    body = b'{"model":"m","messages":[{"role":"user","content":[' + picture + b',{"type":"text","text":"what?"}]}]}'
    seen = known({}, body=body)
    assert (seen.media, seen.media_bytes, seen.generates, seen.is_whole) == (1, 4000, True, True)
    vector = known({}, surface=Surface.EMBEDDINGS, body=b'{"model":"m","input":"x"}')
    assert (vector.generates, vector.prompt.size) == (False, 0)
    following = b'{"model":"m","input":"x","previous_response_id":"resp_1"}'
    assert not known({}, surface=Surface.RESPONSES, body=following).is_whole


def test_the_clients_limit_of_its_answer_is_known() -> None:
    """A request for seven tokens does not count as one for hundreds."""
    assert known({}).output_max == 7
    assert known({}, b',"max_completion_tokens":3').output_max == 3
    assert known({}, b',"max_completion_tokens":"many"').output_max is None, "the engine will say what is wrong with it"
