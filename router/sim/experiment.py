"""Runs policies on workloads with several seeds, in as many processes as are wanted."""

import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

from router.policy.interface import Policy
from router.sim.cluster import simulate
from router.sim.contestants import ORACLE, PREDICTED, default_settings, make_policy
from router.sim.figures import RunFigures, figures_of
from router.sim.fleet import FleetSettings, KvEvents
from router.sim.gateway import DirectGateway, Gateway
from router.sim.late_binding import LateBindingGateway
from router.sim.oracle import Oracle
from router.sim.timing import H200_GLM
from router.sim.trace import TraceWorkload, read_trace
from router.sim.workload import Workload
from router.sim.workloads.catalogue import SCENARIOS
from router.sim.workloads.scenario import Scenario, Slo

# How late routers hear of each other's placements over redis.
SHARING_DELAY_S = 0.002
TRACE_TTFT_TARGET_S = 2.0
TRACE_SLO = Slo(itl_target_s=0.1)
TRACE_FLEET = FleetSettings(replicas=4, timing=H200_GLM)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One run. `workload` names a scenario, or a trace file where `is_trace`. None: as the workload has it."""

    policy: str
    workload: str
    seed: int
    settings: Any = None  # of the policy; None: its defaults
    is_trace: bool = False
    load: float = 1.0
    duration_s: float | None = None
    replicas: int | None = None
    routers: int = 1
    sharing: bool = True  # routers hear of each other's placements
    events: bool = True  # engines publish KV events


@dataclass(frozen=True, slots=True)
class Run:
    spec: RunSpec
    figures: RunFigures
    wall_s: float


class RunFailed(Exception):
    """A run raised an error of the program; the message names the run."""


def scenario_of(spec: RunSpec) -> Scenario:
    """The workload of a run with its fleet. Raises TraceError for a trace that cannot be used."""
    if not spec.is_trace:
        return SCENARIOS[spec.workload]
    rows = read_trace(Path(spec.workload))

    def play(load: float, duration_s: float) -> Workload:
        horizon_s = None if spec.duration_s is None else duration_s
        return TraceWorkload(spec.workload, rows, ttft_target_s=TRACE_TTFT_TARGET_S, speed=load, horizon_s=horizon_s)

    return Scenario(spec.workload, "a trace", TRACE_FLEET, TRACE_SLO, rows[-1].t, play)


def execute(spec: RunSpec) -> Run:
    """One run, in this process. The same spec has the same figures, but for the times that it took."""
    began = time.monotonic()
    scenario = scenario_of(spec)
    workload = scenario.build(spec.load, scenario.duration_s if spec.duration_s is None else spec.duration_s)
    fleet = dataclasses.replace(
        scenario.fleet,
        replicas=scenario.fleet.replicas if spec.replicas is None else spec.replicas,
        events=KvEvents() if spec.events else None,
    )
    policies = _policies(spec)
    result = simulate(
        fleet,
        workload,
        [_gateway(spec.policy, policy) for policy in policies],
        seed=spec.seed,
        sharing_delay_s=SHARING_DELAY_S if spec.sharing else None,
        grace_s=scenario.grace_s,
        reveal_to=[policy for policy in policies if isinstance(policy, Oracle)],
    )
    return Run(spec, figures_of(result, scenario.slo.itl_target_s), time.monotonic() - began)


def _policies(spec: RunSpec) -> list[Policy]:
    """One for each router. The oracle is always one: it is the measure, and sees everything anyway."""
    settings = default_settings(spec.policy) if spec.settings is None else spec.settings
    routers = 1 if spec.policy == ORACLE else spec.routers
    return [make_policy(spec.policy, settings, Random(f"{spec.seed} {spec.policy} {number}")) for number in range(routers)]


def _gateway(name: str, policy: Policy) -> Gateway:
    """Ours and the oracle come with our queue; the others place each request the moment it arrives, as they do at home."""
    if name in (PREDICTED, ORACLE):
        return LateBindingGateway(policy, clock_ns=time.process_time_ns)
    return DirectGateway(policy, clock_ns=time.process_time_ns)


def execute_all(specs: Sequence[RunSpec], processes: int, done: Callable[[Run], None]) -> list[Run]:
    """All runs, in the order of `specs`; `done` is told of each as it ends. Raises RunFailed for the first that fails."""
    runs: dict[int, Run] = {}
    for number, run in _executed(specs, processes):
        runs[number] = run
        done(run)
    return [runs[number] for number in range(len(specs))]


def _executed(specs: Sequence[RunSpec], processes: int) -> Iterator[tuple[int, Run]]:
    if processes == 1 or len(specs) == 1:
        for number, spec in enumerate(specs):
            yield number, _named(spec, partial(execute, spec))
        return
    # Spawned, not forked: whoever calls this may have threads (a progress bar has one).
    pool = ProcessPoolExecutor(min(processes, len(specs)), mp_context=get_context("spawn"), initializer=_end_on_interrupt)
    try:
        numbers = {pool.submit(execute, spec): number for number, spec in enumerate(specs)}
        for future in as_completed(numbers):
            number = numbers[future]
            yield number, _named(specs[number], future.result)
    finally:
        pool.shutdown(cancel_futures=True)


def _end_on_interrupt() -> None:
    """Ctrl-C reaches every process of a terminal; a worker ends at once and says nothing, its parent speaks."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _named(spec: RunSpec, result: Callable[[], Run]) -> Run:
    try:
        return result()
    except Exception as error:
        cause = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise RunFailed(f"{spec.policy} on {spec.workload}, seed {spec.seed}: {cause}") from error


def specs_of(policies: Mapping[str, Any], workloads: Sequence[str], seeds: Sequence[int], common: RunSpec) -> list[RunSpec]:
    """Every policy (name to settings) on every workload with every seed; everything else as `common` has it."""
    return [
        dataclasses.replace(common, policy=policy, settings=settings, workload=workload, seed=seed)
        for workload in workloads
        for seed in seeds
        for policy, settings in policies.items()
    ]
