"""Records of runs that never were, so that a report's arithmetic can be done by hand."""

from router.policy.interface import Priority
from router.sim.experiment import Run, RunSpec
from router.sim.figures import METRICS, RunFigures
from router.sim.result import LoadSample, RankRecord, RequestOutcome, RequestRecord, Result
from router.types import ReplicaId


def record(
    number: int,
    *,
    arrives_at: float = 0.0,
    first_token_at: float | None = 1.0,
    ended_at: float = 2.0,
    outcome: RequestOutcome = RequestOutcome.COMPLETED,
    prompt_tokens: int = 100,
    cached_tokens: int = 0,
    output_tokens: int = 10,
    itl_mean_s: float | None = 0.05,
    replica: str | None = "r0",
    tenant: str = "",
) -> RequestRecord:
    return RequestRecord(
        id=number,
        tenant=tenant,
        session="",
        turn=0,
        priority=Priority.DEFAULT,
        ttft_target_s=2.0,
        outcome=outcome,
        arrives_at=arrives_at,
        prompt_tokens=prompt_tokens,
        gateway=0,
        attempts=1,
        ended_at=ended_at,
        replica=None if replica is None else ReplicaId(replica),
        first_token_at=first_token_at,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
        itl_mean_s=itl_mean_s,
    )


def rank(replica: str, loads: list[int], preemptions: int = 0) -> RankRecord:
    """`loads`: requests on it at 0 s, 1 s, ..."""
    return RankRecord(
        replica=ReplicaId(replica),
        rank=0,
        busy_s=1.0,
        steps=1,
        prefilled_tokens=0,
        cached_tokens=0,
        generated_tokens=0,
        preemptions=preemptions,
        samples=tuple(LoadSample(load, 0, 0.0, 0) for load in loads),
    )


def result(*records: RequestRecord, ranks: tuple[RankRecord, ...] = (), decision_ns: tuple[int, ...] = ()) -> Result:
    """Of ten seconds of arrivals."""
    ended_at = max(one.ended_at for one in records)
    return Result("w", 10.0, ended_at, 1.0, records, ranks or (rank("r0", [1] * 20),), decision_ns)


def run(policy: str, seed: int, workload: str = "agents", **values: float) -> Run:
    """A run whose figures are `values`, and 1 for all others."""
    figures = RunFigures({**dict.fromkeys(METRICS, 1.0), **values}, {"": {"ttft_p99_s": 1.0}}, 100)
    return Run(RunSpec(policy=policy, workload=workload, seed=seed), figures, 0.5)
