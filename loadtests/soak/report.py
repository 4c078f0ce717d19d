"""The results of a soak for people and for programs. Pure."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from loadtests.soak.judge import Invariant, rss_growth
from loadtests.soak.run import Results
from loadtests.soak.views import Ending, Manner

_SHOWN_MAX = 10  # violations of one invariant; the JSON has them all


def text(results: Results) -> str:
    """What was done, what came of it, and the verdict on each invariant."""
    data = summary(results)
    lines = [f"{name:<36} {value}" for name, value in data["figures"].items()]
    lines += [
        f"{title}: " + ", ".join(f"{name} {count}" for name, count in data[title].items())
        for title in ("outcomes", "seen by clients", "continuations", "faults")
    ]
    for invariant in Invariant:
        broken = [violation.what for violation in results.violations if violation.invariant is invariant]
        lines.append(f"{'FAIL' if broken else 'ok':<5}{invariant}" + (f": {len(broken)} times" if broken else ""))
        lines += [f"     {what}" for what in broken[:_SHOWN_MAX]]
    return "\n".join(lines)


def summary(results: Results) -> dict[str, Any]:
    """JSON-ready."""
    views, samples, remains = results.views, results.samples, results.remains
    counted = sum(view.asked.is_counted and view.manner is not Manner.SPEAKS_NO_HTTP for view in views)
    endings = Counter(view.ending for view in views)
    answered = [view.seconds for view in views if view.ending in (Ending.WHOLE, Ending.REFUSED) and view.manner is Manner.READS]
    honest = [view for view in views if view.asked.is_valid and view.manner is Manner.READS]
    rss = [sample.rss_bytes / 2**20 for sample in samples]
    figures = {
        "seconds under load": round(results.seconds, 1),
        "requests sent": len(views),
        "requests to be counted": counted,
        "requests counted by the router": sum(results.outcomes.values()),
        "withdrawn before the router saw them": counted - sum(results.outcomes.values()),
        "valid requests read, answered whole %": _percent([view.ending is Ending.WHOLE for view in honest]),
        "answers continued, whole": sum(view.continuations > 0 and view.ending is Ending.WHOLE for view in views),
        "longest answer s": round(max((view.seconds for view in views), default=0.0), 1),
        "median answer s": round(statistics.median(answered), 3) if answered else None,
        "memory MiB (median, early and late)": [round(value, 1) for value in _early_and_late(rss)],
        "memory growth": round(rss_growth(samples), 4),
        "descriptors (before, most, after)": [
            remains.descriptors_before,
            max((sample.descriptors for sample in samples), default=0),
            remains.descriptors,
        ],
        "threads, most": max((sample.threads for sample in samples), default=0),
        "left: in flight, departing, engines": [remains.in_flight, remains.departing, *remains.engines_busy.values()],
    }
    return {
        "plan": asdict(results.plan),
        "figures": figures,
        "outcomes": dict(sorted(results.outcomes.items())),
        "seen by clients": dict(sorted(endings.items())),
        "continuations": dict(sorted(results.continuations.items())),
        "faults": dict(sorted(results.faults.items())),
        "violations": [asdict(violation) for violation in results.violations],
        "samples": [asdict(sample) for sample in samples],
    }


def _percent(values: Sequence[bool]) -> float | None:
    return round(100 * sum(values) / len(values), 2) if values else None


def _early_and_late(values: Sequence[float]) -> tuple[float, float]:
    """Medians of the second and of the last fifth."""
    fifth = max(1, len(values) // 5)
    early = values[fifth : 2 * fifth] or values
    return statistics.median(early), statistics.median(values[-fifth:])
