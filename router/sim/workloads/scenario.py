"""A workload together with what it is meant for: the fleet that serves it and the service level it asks for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from router.sim.fleet import FleetSettings
from router.sim.workload import Workload


class Slo(NamedTuple):
    """A request is good when its first token came within its own target and the others at this mean distance or less."""

    itl_target_s: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """`build` makes a workload at a load factor and of a duration in virtual seconds; a workload is used for one run.

    Load 1.0 is about 80 % of what the fleet serves when requests are placed well, if `summary` says nothing else.
    """

    name: str
    summary: str
    fleet: FleetSettings
    slo: Slo
    duration_s: float
    build: Callable[[float, float], Workload]
    grace_s: float = 600.0  # virtual seconds that what has arrived is still served after the last arrival
