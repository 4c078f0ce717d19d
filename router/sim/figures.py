"""What one run says of a policy, computed from its records."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.sim.result import RequestOutcome, RequestRecord, Result
from router.sim.statistics import jain, max_min_shares, percentile, variation


class Metric(NamedTuple):
    """How a figure is shown. `scale` turns its base unit into the shown one."""

    title: str
    unit: str
    decimals: int
    scale: float = 1.0
    more_is_better: bool | None = None  # None: neither


METRICS: Mapping[str, Metric] = {
    "goodput_share": Metric("goodput", "%", 1, 100.0, True),
    "goodput_rps": Metric("good req/s", "1/s", 2, 1.0, True),
    "output_tokens_per_s": Metric("output", "tok/s", 0, 1.0, True),
    "requests_per_s": Metric("requests", "1/s", 2, 1.0, True),
    "ttft_p50_s": Metric("TTFT p50", "s", 3, 1.0, False),
    "ttft_p90_s": Metric("TTFT p90", "s", 3, 1.0, False),
    "ttft_p99_s": Metric("TTFT p99", "s", 3, 1.0, False),
    "itl_p50_s": Metric("ITL p50", "ms", 1, 1e3, False),
    "itl_p90_s": Metric("ITL p90", "ms", 1, 1e3, False),
    "itl_p99_s": Metric("ITL p99", "ms", 1, 1e3, False),
    "hit_rate": Metric("hit", "%", 1, 100.0, True),
    "load_cv": Metric("load CV", "", 2, 1.0, False),
    "hot_spot": Metric("max share x n", "", 2, 1.0, False),
    "preemptions": Metric("preemptions", "", 0, 1.0, False),
    "refused": Metric("refused", "", 0, 1.0, False),
    "unserved": Metric("failed or unfinished", "", 0, 1.0, False),
    "jain": Metric("Jain", "", 3, 1.0, True),
    "decision_us": Metric("decision", "us", 1, 1.0, False),
    "decision_p99_us": Metric("decision p99", "us", 1, 1.0, False),
    "makespan_s": Metric("makespan", "s", 1, 1.0, False),
}


@dataclass(frozen=True, slots=True)
class RunFigures:
    """`values` has every key of METRICS; seconds, tokens and shares from 0 to 1."""

    values: Mapping[str, float]
    tenants: Mapping[str, Mapping[str, float]]  # by tenant: requests, goodput_share, ttft_p99_s, tokens
    requests: int


def figures_of(result: Result, itl_target_s: float) -> RunFigures:
    """Throughput, tokens and fairness count what was done before arrivals stopped; times and goodput concern all requests."""
    records, horizon = result.requests, result.horizon_s
    good = [record for record in records if is_good(record, itl_target_s)]
    waits = _waits(records)
    gaps = sorted(record.itl_mean_s for record in records if record.itl_mean_s is not None)
    sent = [record for record in records if record.replica is not None]
    outcomes = Counter(record.outcome for record in records)
    completed = outcomes[RequestOutcome.COMPLETED]
    decisions = sorted(nanoseconds / 1e3 for nanoseconds in result.decision_ns)
    values = {
        "goodput_share": _ratio(len(good), len(records)),
        "goodput_rps": len(good) / horizon,
        "output_tokens_per_s": sum(_generated_by(record, horizon) for record in records) / horizon,
        "requests_per_s": sum(record.outcome is RequestOutcome.COMPLETED and record.ended_at <= horizon for record in records)
        / horizon,
        "ttft_p50_s": percentile(waits, 0.5),
        "ttft_p90_s": percentile(waits, 0.9),
        "ttft_p99_s": percentile(waits, 0.99),
        "itl_p50_s": percentile(gaps, 0.5),
        "itl_p90_s": percentile(gaps, 0.9),
        "itl_p99_s": percentile(gaps, 0.99),
        "hit_rate": _ratio(sum(record.cached_tokens for record in sent), sum(record.prompt_tokens for record in sent)),
        "load_cv": _load_cv(result),
        "hot_spot": _hot_spot(result),
        "preemptions": float(sum(rank.preemptions for rank in result.ranks)),
        "refused": float(outcomes[RequestOutcome.REFUSED]),
        "unserved": float(len(records) - completed - outcomes[RequestOutcome.REFUSED]),
        "jain": _jain(records, horizon),
        "decision_us": _ratio(sum(decisions), len(decisions)),
        "decision_p99_us": percentile(decisions, 0.99),
        "makespan_s": result.ended_at,
    }
    return RunFigures(values, _tenants(records, horizon, itl_target_s), len(records))


def is_good(record: RequestRecord, itl_target_s: float) -> bool:
    """Completed, its first token within its own target, the others at the target's mean distance or less."""
    return record.is_good and (record.itl_mean_s is None or record.itl_mean_s <= itl_target_s)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _waits(records: Sequence[RequestRecord]) -> list[float]:
    """Times to first tokens, ascending. Who never got one has waited at least to the end; the refused did not wait."""
    waits = []
    for record in records:
        if record.ttft_s is not None:
            waits.append(record.ttft_s)
        elif record.outcome is not RequestOutcome.REFUSED:
            waits.append(record.ended_at - record.arrives_at)
    return sorted(waits)


def _generated_by(record: RequestRecord, horizon: float) -> float:
    """Tokens of the answer that were there at `horizon`, as if they came evenly."""
    if record.first_token_at is None or record.first_token_at > horizon:
        return 0.0
    if record.ended_at <= horizon:
        return float(record.output_tokens)
    return record.output_tokens * (horizon - record.first_token_at) / (record.ended_at - record.first_token_at)


def _load_cv(result: Result) -> float:
    """How unevenly requests lie on the ranks, as the mean over time while there is one for each rank or more."""
    moments = int(result.horizon_s / result.sample_interval_s) + 1
    variations = []
    for loads in list(zip(*(rank.samples for rank in result.ranks), strict=False))[:moments]:
        requests = [float(load.running + load.waiting) for load in loads]
        if sum(requests) >= len(requests):
            variations.append(variation(requests))
    return _ratio(sum(variations), len(variations))


def _hot_spot(result: Result) -> float:
    """The largest share that one rank got of all requests, times the number of ranks: 1 where all got as many."""
    counts = Counter((record.replica, record.rank) for record in result.requests if record.replica is not None)
    return _ratio(max(counts.values(), default=0) * len(result.ranks), counts.total())


def _by_tenant(records: tuple[RequestRecord, ...]) -> dict[str, list[RequestRecord]]:
    tenants: dict[str, list[RequestRecord]] = {}
    for record in records:
        tenants.setdefault(record.tenant, []).append(record)
    return dict(sorted(tenants.items()))


def _served_tokens(records: list[RequestRecord], horizon: float) -> float:
    """Tokens of prompts and answers that were dealt with at `horizon`."""
    begun = [record for record in records if record.first_token_at is not None and record.first_token_at <= horizon]
    return sum(record.prompt_tokens + _generated_by(record, horizon) for record in begun)


def _jain(records: tuple[RequestRecord, ...], horizon: float) -> float:
    """Jain's index over tenants of the tokens that each was served, relative to what it was due.

    Due is the max-min fair part of all tokens that were served, with what the tenant asked for as its demand: a tenant that
    asks for little is due all of it. What a request that was not completed would have been answered is not known; it
    counts as asking for the mean answer of its tenant.
    """
    tenants = _by_tenant(records)
    if len(tenants) < 2:
        return 1.0
    served = {tenant: _served_tokens(own, horizon) for tenant, own in tenants.items()}
    demands = {tenant: max(served[tenant], _asked_tokens(own)) for tenant, own in tenants.items()}
    due = max_min_shares(demands, sum(served.values()))
    return jain([served[tenant] / due[tenant] for tenant in tenants if due[tenant] > 0])


def _asked_tokens(records: list[RequestRecord]) -> float:
    answers = [record.output_tokens for record in records if record.outcome is RequestOutcome.COMPLETED]
    mean = _ratio(sum(answers), len(answers))
    return sum(record.prompt_tokens for record in records) + sum(answers) + mean * (len(records) - len(answers))


def _tenants(records: tuple[RequestRecord, ...], horizon: float, itl_target_s: float) -> dict[str, dict[str, float]]:
    return {
        tenant: {
            "requests": float(len(own)),
            "goodput_share": _ratio(sum(is_good(record, itl_target_s) for record in own), len(own)),
            "ttft_p99_s": percentile(_waits(own), 0.99),
            "tokens": _served_tokens(own, horizon),
        }
        for tenant, own in _by_tenant(records).items()
    }
