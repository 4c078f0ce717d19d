"""The comparison as tables for a terminal: one for each workload, and one of its tenants where it has several."""

from collections.abc import Sequence
from itertools import groupby

from router.sim.figures import METRICS
from router.sim.report import Summary
from router.sim.statistics import Estimate

_COLUMNS = (
    *("output_tokens_per_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "itl_p90_s"),
    *("hit_rate", "load_cv", "hot_spot", "preemptions", "refused", "decision_us"),
)


def tables(summaries: Sequence[Summary], width: int | None = None) -> str:
    """The policies of each workload in the order of their goodput, best first.

    Columns that do not fit into `width` characters are left out, the last first; None: nothing is.
    """
    shown: list[str] = []
    for _, group in groupby(summaries, key=lambda summary: summary.workload):
        ranked = sorted(group, key=lambda summary: -summary.metrics["goodput_share"].mean)
        shown.append(_workload(ranked, width))
        if len(ranked[0].tenants) > 1:
            shown.append(_tenants(ranked, width))
    return "\n\n".join(shown)


def _workload(ranked: Sequence[Summary], width: int | None) -> str:
    first = ranked[0]
    seeds = "1 seed" if len(first.seeds) == 1 else f"{len(first.seeds)} seeds"
    columns = [("policy", [summary.policy for summary in ranked]), ("goodput %", _cells(ranked, "goodput_share", True))]
    if any(summary.of_oracle for summary in ranked):
        shares = [summary.of_oracle.get("goodput_share") for summary in ranked]
        columns.append(("of oracle", ["" if share is None else f"{share.mean:.3f}" for share in shares]))
    if any(summary.against_best for summary in ranked):
        best = [summary.against_best.get("goodput_share") for summary in ranked]
        columns.append(("to best other", ["" if found is None else _signed(found.difference) for found in best]))
    columns += [(_title(key), _cells(ranked, key, False)) for key in _COLUMNS]
    return _laid_out(f"{first.workload}: {first.requests.mean:.0f} requests, {seeds}", columns, width)


def _tenants(ranked: Sequence[Summary], width: int | None) -> str:
    columns = [("policy", [summary.policy for summary in ranked]), ("Jain", _cells(ranked, "jain", False))]
    for name in ranked[0].tenants:
        waits = [summary.tenants[name]["ttft_p99_s"].mean if name in summary.tenants else 0.0 for summary in ranked]
        columns.append((name, [f"{wait:.3f}" for wait in waits]))
    return _laid_out("TTFT p99 by tenant, s", columns, width)


def _laid_out(title: str, columns: Sequence[tuple[str, list[str]]], width: int | None) -> str:
    lines: list[str] = []
    for number, (head, cells) in enumerate(columns):
        wide = max(map(len, (head, *cells)))
        column = [cell.rjust(wide) if number else cell.ljust(wide) for cell in (head, *cells)]
        if not lines:
            lines = column
        elif width is None or len(lines[0]) + 2 + wide <= width:
            lines = [f"{line}  {cell}" for line, cell in zip(lines, column, strict=True)]
        else:
            break
    return "\n".join((title, *lines))


def _cells(ranked: Sequence[Summary], key: str, with_interval: bool) -> list[str]:
    return [_shown(key, summary.metrics[key], with_interval) for summary in ranked]


def _title(key: str) -> str:
    metric = METRICS[key]
    return f"{metric.title} {metric.unit}".rstrip()


def _shown(key: str, value: Estimate, with_interval: bool) -> str:
    metric = METRICS[key]
    mean = f"{value.mean * metric.scale:.{metric.decimals}f}"
    if value.ci95 is None or not with_interval:
        return mean
    return f"{mean}±{value.ci95 * metric.scale:.{metric.decimals}f}"


def _signed(difference: Estimate) -> str:
    """Percentage points of goodput."""
    mean = f"{difference.mean * 100:+.1f}"
    return mean if difference.ci95 is None else f"{mean}±{difference.ci95 * 100:.1f}"
