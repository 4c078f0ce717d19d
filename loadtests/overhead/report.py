"""The results as a table, against the targets. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from loadtests.overhead.figures import Metric, Summary
from loadtests.overhead.routers import ROUTERS, RouterName


@dataclass(frozen=True, slots=True)
class Target:
    """Ours must not exceed `limit`; with a rival, `limit` times what the rival takes."""

    metric: Metric
    limit: float
    rival: RouterName | None = None


class Verdict(StrEnum):
    PASS = "PASS"
    MISS = "MISS"


_REQUEST_METRICS = (Metric.REQUEST_400, Metric.REQUEST_8000, Metric.REQUEST_60000)
TARGETS = (
    *(Target(metric, 0.40, RouterName.VLLM) for metric in _REQUEST_METRICS),
    *(Target(metric, 0.80, RouterName.SGLANG) for metric in _REQUEST_METRICS),
    Target(Metric.CHUNK, 1.00, RouterName.VLLM_ROUND_ROBIN),
    Target(Metric.IDLE_STREAM, 60.0),
    Target(Metric.ERRORS, 0.0),
)
LABELS = {
    Metric.REQUEST_400: "CPU per request, 0.4 kB prompt (µs)",
    Metric.REQUEST_8000: "CPU per request, 8 kB prompt (µs)",
    Metric.REQUEST_60000: "CPU per request, 60 kB prompt (µs)",
    Metric.RATE_400: "requests per second, 0.4 kB",
    Metric.RATE_8000: "requests per second, 8 kB",
    Metric.RATE_60000: "requests per second, 60 kB",
    Metric.CHUNK: "CPU per delivered chunk (µs)",
    Metric.CHUNK_RATE: "chunks delivered per second",
    Metric.LATENCY_RATE: "half load (requests per second)",
    Metric.LATENCY_P50: "added latency at half load, p50 (µs)",
    Metric.LATENCY_P99: "added latency at half load, p99 (µs)",
    Metric.IDLE_STREAM: "memory per idle stream (kB)",
    Metric.ERRORS: "errors",
}
# What more of is worse, so that ours divided by theirs says something.
_COSTS = (*_REQUEST_METRICS, Metric.CHUNK, Metric.LATENCY_P50, Metric.LATENCY_P99, Metric.IDLE_STREAM)


def judge(target: Target, summary: Summary) -> tuple[Verdict, float] | None:
    """The verdict, and what it rests on: ours divided by the rival's, or ours where there is no rival. None: not measured."""
    found = summary.get(RouterName.OURS, {}).get(target.metric)
    if found is None:
        return None
    if target.rival is not None:
        theirs = summary.get(target.rival, {}).get(target.metric)
        if not theirs:
            return None
        found /= theirs
    return (Verdict.PASS if found <= target.limit else Verdict.MISS), found


def figures_table(summary: Summary) -> str:
    """Markdown: one line for each figure that was measured, one column for each router."""
    routers = [name for name in RouterName if name in summary]
    rows = [["figure", *(ROUTERS[name].title for name in routers)]]
    for metric, label in LABELS.items():
        values = [summary[name].get(metric) for name in routers]
        if any(value is not None for value in values):
            rows.append([label, *map(_number, values)])
    return _table(rows)


def ratios_table(summary: Summary) -> str:
    """Markdown: ours divided by each rival's; empty if there is nothing to compare."""
    ours: Mapping[Metric, float] = summary.get(RouterName.OURS, {})
    rivals = [name for name in RouterName if name in summary and name is not RouterName.OURS]
    rows = [["ours divided by", *(ROUTERS[name].title for name in rivals)]]
    for metric in _COSTS:
        shared = [summary[name].get(metric) for name in rivals]
        if (value := ours.get(metric)) is not None and any(shared):
            rows.append([LABELS[metric].partition(" (")[0], *(f"{value / other:.2f}" if other else "" for other in shared)])
    return _table(rows) if len(rows) > 1 else ""


def targets_table(summary: Summary) -> str:
    """Markdown: each target that was measured, with what was found and the verdict; empty if there is none."""
    rows = [["target", "limit", "found", "verdict"]]
    for target in TARGETS:
        judged = judge(target, summary)
        if judged is None:
            continue
        verdict, found = judged
        label = LABELS[target.metric]
        if target.rival is None:
            rows.append([label, f"{target.limit:g}", _number(found), verdict])
        else:
            limit = f"{target.limit:.2f} x {ROUTERS[target.rival].title}"
            rows.append([label.partition(" (")[0], limit, f"{found:.2f}", verdict])
    return _table(rows) if len(rows) > 1 else ""


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if abs(value) < 100 and value != round(value) else f"{value:,.0f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned, so that it reads well as plain text too. The first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
