"""What must hold of every request, and of the router once all is quiet. Pure."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from loadtests.soak.answers import Said, is_given_up_response, read_json
from loadtests.soak.requests import Asked
from loadtests.soak.views import BODY_BYTES_MAX, Ending, Manner, View
from router.outcome import Outcome

RSS_GROWTH_MAX = 1.05
# A shorter run is over before the allocator has seen everything once.
RSS_SECONDS_MIN = 240.0
# The router's own connections for probes come and go with its replicas.
DESCRIPTORS_PER_REPLICA = 1

_FAILED = frozenset(
    {Outcome.UPSTREAM_BROKEN, Outcome.UPSTREAM_TIMEOUT, Outcome.UPSTREAM_UNREACHABLE, Outcome.ENGINE_ERROR}
    | {Outcome.ENGINE_REFUSED, Outcome.REJECTED_NO_REPLICA}
)
_BY_STATUS = {
    429: frozenset({Outcome.ENGINE_REFUSED}),
    500: frozenset({Outcome.ENGINE_ERROR}),
    502: frozenset({Outcome.UPSTREAM_UNREACHABLE, Outcome.ENGINE_ERROR, Outcome.UPSTREAM_BROKEN}),
    503: frozenset({Outcome.REJECTED_NO_REPLICA, Outcome.ENGINE_ERROR}),
    504: frozenset({Outcome.UPSTREAM_TIMEOUT, Outcome.ENGINE_ERROR}),
}


class Invariant(StrEnum):
    ONE_OUTCOME = "every request ends in exactly one outcome"
    TRUE_OUTCOME = "the outcome is what the client saw"
    NO_SILENT_LIE = "an answer is whole and right, or says that it is not"
    NO_HANG = "no client waits for longer than the bound"
    NO_LEAK = "everything is given back"
    NO_FAULT_OF_OURS = "the router has no fault of its own"
    REAL_SOAK = "every kind of request, client and fault took place"


@dataclass(frozen=True, slots=True)
class Violation:
    invariant: Invariant
    what: str


@dataclass(frozen=True, slots=True)
class Logged:
    """A line of the access log."""

    outcome: str
    status: int
    error: str


@dataclass(frozen=True, slots=True)
class Sample:
    """Of the router's process; `at` in seconds since the load began."""

    at: float
    rss_bytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Remains:
    """What is held when the load has ended and everything has had time to settle."""

    in_flight: float
    departing: float
    engines_busy: Mapping[str, float]
    descriptors_before: int
    descriptors: int


Expected = Mapping[Asked, object]  # Said for a stream, else normalized JSON; only of requests that are answered with 200


def judge_views(views: Sequence[View], expected: Expected, *, hang_s: float) -> list[Violation]:
    """What single clients saw."""
    found: list[Violation] = []
    for view in views:
        if view.ending is Ending.HUNG or view.seconds > hang_s:
            found.append(_violation(Invariant.NO_HANG, view, f"{view.seconds:.1f} s"))
        found += [_violation(Invariant.NO_SILENT_LIE, view, fault) for fault in view.faults]
        if (lie := _lie(view, expected)) is not None:
            found.append(_violation(Invariant.NO_SILENT_LIE, view, lie))
    return found


def _lie(view: View, expected: Expected) -> str | None:
    asked = view.asked
    if view.manner is Manner.SPEAKS_NO_HTTP:
        return None if view.status == 400 else "no 400 for what is not HTTP"
    if asked.is_faultless and view.ending not in (Ending.WHOLE, Ending.LEFT, Ending.CUT_OFF):
        return "no fault can have met this request, and it failed"
    wants_refusal = (
        asked.status >= 400 and view.ending is not Ending.ERROR_EVENT
    )  # a silent engine's stream begins all the same
    if (asked.is_routers_refusal and view.status not in (0, asked.status)) or (wants_refusal and 0 < view.status < 300):
        return f"the status should be {asked.status}"
    whole = expected.get(asked)
    match view.ending:
        case Ending.REFUSED if view.status not in (asked.status, *_BY_STATUS):
            return "this error belongs to no fault"
        case Ending.NO_ANSWER if not view.is_withdrawn:
            return f"the connection ended without an answer: {view.note}"
        case Ending.BROKEN if not (asked.is_stream and view.manner is Manner.HTTP10) and len(view.body) < BODY_BYTES_MAX // 2:
            return f"broken off without an error event: {view.note}"
        case Ending.WHOLE if whole is not None:
            try:
                said = read_json(view.body) if view.said is None else view.said
            except ValueError as error:
                return f"its {len(view.body)} bytes are no JSON: {error}"
            # An engine that ends properly behind the last word, but without usage: the answer is whole, its price is not known.
            # Where the router makes an end good, it knows the counts, but not what they are made of.
            has_lost_usage = (
                isinstance(whole, Said)
                and isinstance(said, Said)
                and not asked.is_faultless
                and replace(said, usage=None) == replace(whole, usage=None)
                and (said.usage is None or _counts(said.usage) == _counts(whole.usage))
            )
            is_excused = has_lost_usage or is_given_up_response(asked.path, said, whole)
            return None if said == whole or is_excused else f"said {_shown(said)} instead of {_shown(whole)}"
    if view.said is not None and isinstance(whole, Said) and not view.said.is_beginning_of(whole):
        return f"began with {_shown(view.said)}, which does not begin {_shown(whole)}"
    return None


def _counts(usage: object) -> dict[str, object]:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {name: usage.get(name) for name in names} if isinstance(usage, dict) else {}


def judge_accounts(views: Sequence[View], log: Mapping[str, Sequence[Logged]], counted: Mapping[str, float]) -> list[Violation]:
    """The router's accounts against what the clients saw. `counted` is intellect_router_requests_total by outcome."""
    found: list[Violation] = []
    for view in views:
        if not view.asked.is_counted or view.manner is Manner.SPEAKS_NO_HTTP:
            continue
        lines = log.get(view.request_id, ())
        if len(lines) != 1 and not (view.is_withdrawn and not lines):
            found.append(_violation(Invariant.ONE_OUTCOME, view, f"{len(lines)} outcomes: {[line.outcome for line in lines]}"))
        for line in lines:
            if line.outcome == Outcome.ROUTER_ERROR:
                found.append(_violation(Invariant.NO_FAULT_OF_OURS, view, line.error))
            elif line.outcome not in outcomes_of(view):
                found.append(_violation(Invariant.TRUE_OUTCOME, view, f"logged as {line.outcome} {line.status} {line.error}"))
    known = {view.request_id for view in views}
    strangers = sorted(request_id for request_id in log if request_id not in known)
    if strangers:
        found.append(Violation(Invariant.ONE_OUTCOME, f"logged, but never sent: {strangers[:5]}"))
    logged = Counter(line.outcome for lines in log.values() for line in lines)
    if dict(logged) != {outcome: int(count) for outcome, count in counted.items() if count}:
        what = f"intellect_router_requests_total says {dict(counted)}, the access log {dict(logged)}"
        found.append(Violation(Invariant.ONE_OUTCOME, what))
    return found


def outcomes_of(view: View) -> frozenset[Outcome]:
    """The outcomes that are true to what the client saw."""
    asked = view.asked
    match view.ending:
        case Ending.WHOLE:
            return frozenset({Outcome.COMPLETED})
        case Ending.REFUSED if asked.is_routers_refusal:
            return frozenset({Outcome.REJECTED_INVALID})
        case Ending.REFUSED if view.status == asked.status:
            return frozenset({Outcome.ENGINE_REFUSED})
        case Ending.REFUSED:
            return _BY_STATUS.get(view.status, frozenset())
        case Ending.ERROR_EVENT | Ending.BROKEN:
            return _FAILED
        case _:
            refused = Outcome.REJECTED_INVALID if asked.is_routers_refusal else Outcome.ENGINE_REFUSED
            return _FAILED | {Outcome.COMPLETED, Outcome.CLIENT_GONE, refused}


def judge_remains(remains: Remains, samples: Sequence[Sample], *, replicas: int) -> list[Violation]:
    """Leaks."""
    held = {"requests in flight": remains.in_flight, "departing requests": remains.departing}
    held |= {f"requests in {name}": count for name, count in remains.engines_busy.items()}
    found = [Violation(Invariant.NO_LEAK, f"{what}: {count:g}") for what, count in held.items() if count]
    more = remains.descriptors - remains.descriptors_before
    if more > replicas * DESCRIPTORS_PER_REPLICA:
        found.append(Violation(Invariant.NO_LEAK, f"{more} open descriptors more than the {remains.descriptors_before} before"))
    if samples and samples[-1].at >= RSS_SECONDS_MIN and (growth := rss_growth(samples)) > RSS_GROWTH_MAX:
        found.append(Violation(Invariant.NO_LEAK, f"resident memory grew to {growth:.3f} times its early size"))
    return found


def rss_growth(samples: Sequence[Sample]) -> float:
    """The median of the last fifth of the samples divided by that of the second; 1.0 of too few."""
    fifth = len(samples) // 5
    if not fifth:
        return 1.0
    early, late = samples[fifth : 2 * fifth], samples[-fifth:]
    return statistics.median(s.rss_bytes for s in late) / statistics.median(s.rss_bytes for s in early)


def judge_coverage(views: Sequence[View], catalogue: Sequence[Asked], faults_missing: Sequence[str]) -> list[Violation]:
    """A soak in which something never happened, or never succeeded, shows nothing about it."""
    found = [Violation(Invariant.REAL_SOAK, f"no {name} was done") for name in faults_missing]
    fine = {
        view.asked.kind for view in views if view.ending in (Ending.WHOLE, Ending.REFUSED) and view.status == view.asked.status
    }
    found += [Violation(Invariant.REAL_SOAK, f"no '{kind}' went well") for kind in sorted({a.kind for a in catalogue} - fine)]
    manners = {view.manner for view in views}
    return found + [Violation(Invariant.REAL_SOAK, f"no client {manner}") for manner in Manner if manner not in manners]


def _violation(invariant: Invariant, view: View, what: str) -> Violation:
    seen = f"{view.request_id} ({view.asked.kind}; client {view.manner}; {view.ending} {view.status}"
    seen += f"; {view.continuations} continuations)" if view.continuations else ")"
    return Violation(invariant, f"{seen}: {what}")


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 1000 else f"{text[:700]} ... {text[-300:]}"
