"""What placement may know of a request, from its body and its headers."""

from collections.abc import Mapping

from xxhash import xxh3_128_hexdigest

from protocol import headers as names
from protocol.openai import Surface
from router.exchange import Exchange, Rejection
from router.outcome import Outcome
from router.policy.interface import PlacementRequest, Priority
from router.policy.prompt import Chains, scope_of
from router.request.fields import RequestFacts
from router.request.prompt_bytes import prompt_in

# The surfaces that are answered with generated tokens.
GENERATING = frozenset({Surface.CHAT, Surface.COMPLETIONS, Surface.RESPONSES, Surface.MESSAGES})
_PRIORITIES = {priority.value.encode(): priority for priority in Priority}


def placement_request(
    exchange: Exchange,
    facts: RequestFacts,
    headers: Mapping[bytes, bytes],
    body: bytes,
    engine_model: str,
    chains: Chains,
    *,
    is_changed: bool,
) -> PlacementRequest:
    """`body` is the engine's; `is_changed`: it is not the one that `facts` were read from. Raises Rejection."""
    word = headers.get(names.SESSION_ID)
    if word is None and facts.prompt_cache_key is not None:
        word = facts.prompt_cache_key.encode("utf-8", "replace")
    return PlacementRequest(
        engine_model,
        prompt_in(body, facts.prompt, scope_of(engine_model), is_changed=is_changed, chains=chains),
        tenant=exchange.tenant,
        affinity=affinity_of(exchange.tenant, engine_model, word) if word else None,
        priority=_priority(headers.get(names.PRIORITY)),
        output_max=facts.output_max,
        streams=facts.stream,
        generates=exchange.surface in GENERATING,
        is_whole=facts.previous_response_id is None,
        media=facts.media.pieces,
        media_bytes=facts.media.size,
    )


def affinity_of(tenant: str, model: str, word: bytes) -> str:
    """A client's word which requests belong together, of one length and nobody else's."""
    return xxh3_128_hexdigest(b"%b\0%b\0%b" % (tenant.encode(), model.encode(), word))


def _priority(word: bytes | None) -> Priority:
    """Raises Rejection for a word that is none of the three."""
    if word is None:
        return Priority.DEFAULT
    try:
        return _PRIORITIES[word.strip().lower()]
    except KeyError:
        shown = word[:40].decode("latin-1")
        message = f"The header 'x-intellect-priority' is '{shown}', but must be one of {', '.join(Priority)}."
        raise Rejection(400, message, Outcome.REJECTED_INVALID, param="x-intellect-priority", code="invalid_value") from None
