"""What each priority class is promised, and how much may wait."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from router.policy.interface import Priority

RANKED = (Priority.INTERACTIVE, Priority.DEFAULT, Priority.BATCH)  # who goes first


@dataclass(frozen=True, slots=True)
class ClassLimits:
    """Bounds of one priority class. Times are seconds.

    Raises ValueError, naming field, value and remedy, for a bound that makes no sense.
    """

    max_wait_s: float  # a request that is predicted to wait longer is refused, one that has waited longer expires
    promote_after_s: float  # after which waiting counts as starving
    floor: float = 0.0  # share of the dispatched tokens that the class gets while it and a higher one wait, 0 to 1
    waiting_max: int = 8192  # requests that wait at one time, of one model

    def __post_init__(self) -> None:
        for name in ("max_wait_s", "promote_after_s"):
            value: float = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be above 0 seconds, e.g. 30")
        if self.promote_after_s >= self.max_wait_s:
            raise ValueError(
                f"promote_after_s is {self.promote_after_s}; it must be below max_wait_s ({self.max_wait_s}),"
                " or requests expire before they are promoted"
            )
        if not 0.0 <= self.floor < 1.0:
            raise ValueError(f"floor is {self.floor}; it must be a share from 0 to below 1, e.g. 0.1")
        if self.waiting_max < 0:
            raise ValueError(f"waiting_max is {self.waiting_max}; it must be at least 0")


DEFAULT_LIMITS: Mapping[Priority, ClassLimits] = MappingProxyType(
    {
        Priority.INTERACTIVE: ClassLimits(max_wait_s=8.0, promote_after_s=5.0),
        Priority.DEFAULT: ClassLimits(max_wait_s=30.0, promote_after_s=15.0, floor=0.10),
        Priority.BATCH: ClassLimits(max_wait_s=600.0, promote_after_s=120.0, floor=0.05),
    }
)


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """How requests wait. Raises ValueError, naming field, value and remedy, for a setting that makes no sense."""

    limits: Mapping[Priority, ClassLimits] = field(default_factory=lambda: DEFAULT_LIMITS)
    # Most of the dispatched tokens that starving requests may take out of turn. Without a bound, a backlog of one class or
    # tenant that is older than its promotion bound would stop everybody else.
    promoted_share: float = 0.25
    heads_max: int = 24  # requests of one class that one search looks at, besides those that it places
    tries_per_candidates: int = 12  # failed placements on one set of replicas after which a search leaves that set alone
    idle_tenants_max: int = 4096  # tenants remembered, per model and class, only because they had more than their share
    poll_s: float = 0.05  # between searches without an event: what a policy predicts changes with time alone

    def __post_init__(self) -> None:
        missing = [priority.value for priority in RANKED if priority not in self.limits]
        if missing:
            raise ValueError(f"limits lacks {', '.join(missing)}; it must have every priority class")
        floors = sum(self.limits[priority].floor for priority in RANKED)
        if floors >= 1.0:
            raise ValueError(f"the floors add up to {floors}; they must stay below 1 together")
        if not 0.0 < self.promoted_share < 1.0:
            raise ValueError(f"promoted_share is {self.promoted_share}; it must be a share between 0 and 1, e.g. 0.25")
        for name in ("heads_max", "tries_per_candidates", "idle_tenants_max"):
            value: int = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if not 0.0 < self.poll_s < math.inf:
            raise ValueError(f"poll_s is {self.poll_s}; it must be above 0 seconds, e.g. 0.05")
