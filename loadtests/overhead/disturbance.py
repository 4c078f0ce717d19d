"""How much the machine did besides the benchmark. On busy cores latencies are those of waiting for a core, and CPU per request
shifts, not for all routers alike."""

import resource
import time
from dataclasses import dataclass

import psutil

_IDLE = ("idle", "iowait")
# Already in user and nice.
_COUNTED_TWICE = ("guest", "guest_nice")


@dataclass(frozen=True, slots=True)
class Reading:
    """Seconds: the clock, the CPU time of the whole machine, and that of this process and of its ended descendants."""

    at: float
    machine: float
    own: float


def read() -> Reading:
    times = psutil.cpu_times()
    busy = sum(getattr(times, name) for name in times._fields if name not in (*_IDLE, *_COUNTED_TWICE))
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return Reading(time.monotonic(), busy, sum(usage.ru_utime + usage.ru_stime for usage in used))


def cores_lost(before: Reading, after: Reading) -> float:
    """Cores that others kept busy on average between two readings; none of our descendants may live at either."""
    others = (after.machine - before.machine) - (after.own - before.own)
    return max(0.0, others / (after.at - before.at))
