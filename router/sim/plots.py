"""The comparison as bars: a self-contained HTML page with inline SVG, or a PNG where matplotlib is installed."""

import importlib
import importlib.util
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from router.sim.figures import METRICS
from router.sim.report import Summary
from router.sim.statistics import Estimate

SHOWN = ("goodput_share", "output_tokens_per_s", "ttft_p90_s", "hit_rate")

_LABEL_PX, _BARS_PX, _VALUE_PX, _ROW_PX, _HEAD_PX = 180, 300, 110, 20, 34
_COLOURS = ("#4472a8", "#c0504d")  # of bars, and of the intervals over them
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Placement policies compared</title>
<style>body{font:14px system-ui,sans-serif;margin:2em}svg{margin:0 2em 1em 0}text{font:12px system-ui,sans-serif}</style>
</head><body><h1>Placement policies compared</h1>
%s
</body></html>
"""


class PlotError(Exception):
    """A plot that cannot be written. The message is `<path>: cause; remedy`."""


class Bar(NamedTuple):
    label: str
    value: Estimate


class Chart(NamedTuple):
    """Bars of one figure on one workload, in the unit it is shown in."""

    workload: str
    title: str
    decimals: int
    bars: Sequence[Bar]


def charts(summaries: Sequence[Summary]) -> list[Chart]:
    found = []
    for workload, group in groupby(summaries, key=lambda summary: summary.workload):
        own = list(group)
        for key in SHOWN:
            metric = METRICS[key]
            bars = [Bar(summary.policy, _scaled(summary.metrics[key], metric.scale)) for summary in own]
            better = "more is better" if metric.more_is_better else "less is better"
            found.append(Chart(workload, f"{metric.title}, {metric.unit} ({better})", metric.decimals, bars))
    return found


def check_plot(path: Path) -> None:
    """Whether `path` can be plotted to, before any run is made. Raises PlotError."""
    if path.suffix not in (".html", ".png"):
        raise PlotError(f"{path}: is neither .html nor .png; name the file so")
    if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise PlotError(
            f"{path}: a PNG needs matplotlib, which is not installed; install it, or write {path.with_suffix('.html')}"
        )


def write_plot(path: Path, summaries: Sequence[Summary]) -> None:
    """Raises PlotError."""
    check_plot(path)
    try:
        if path.suffix == ".html":
            path.write_text(page(charts(summaries)), encoding="utf-8")
        else:
            _write_png(path, charts(summaries))
    except OSError as error:
        raise PlotError(f"{path}: cannot be written ({error.strerror}); check the folder") from error


def page(shown: Sequence[Chart]) -> str:
    """One HTML page that loads nothing."""
    parts = []
    for workload, group in groupby(shown, key=lambda chart: chart.workload):
        parts.append(f"<h2>{escape(workload)}</h2>")
        parts += [_svg(chart) for chart in group]
    return _PAGE % "\n".join(parts)


def _svg(chart: Chart) -> str:
    width, height = _LABEL_PX + _BARS_PX + _VALUE_PX, _HEAD_PX + _ROW_PX * len(chart.bars)
    most = max((bar.value.mean + (bar.value.ci95 or 0.0) for bar in chart.bars), default=0.0) or 1.0
    lines = [
        f'<svg role="img" width="{width}" height="{height}"><text x="0" y="16" font-weight="bold">{escape(chart.title)}</text>'
    ]
    for number, (label, (mean, ci95)) in enumerate(chart.bars):
        top = _HEAD_PX + number * _ROW_PX
        middle = top + _ROW_PX // 2
        shown = f"{mean:.{chart.decimals}f}" + ("" if ci95 is None else f" ± {ci95:.{chart.decimals}f}")
        long = _BARS_PX * max(0.0, mean) / most
        lines.append(f'<text x="{_LABEL_PX - 8}" y="{middle + 4}" text-anchor="end">{escape(label)}</text>')
        lines.append(f'<rect x="{_LABEL_PX}" y="{top + 3}" width="{long:.1f}" height="{_ROW_PX - 6}" fill="{_COLOURS[0]}"/>')
        if ci95:
            low, high = (_LABEL_PX + _BARS_PX * min(max(0.0, end), most) / most for end in (mean - ci95, mean + ci95))
            lines.append(f'<path d="M{low:.1f} {middle}H{high:.1f}" stroke="{_COLOURS[1]}" stroke-width="2"/>')
        lines.append(f'<text x="{_LABEL_PX + _BARS_PX + 6}" y="{middle + 4}">{shown}</text>')
    lines.append("</svg>")
    return "\n".join(lines)


def _write_png(path: Path, shown: Sequence[Chart]) -> None:
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    rows = -(-len(shown) // len(SHOWN))
    tall = max(len(chart.bars) for chart in shown) * 0.25 + 1.0
    figure, axes = pyplot.subplots(rows, len(SHOWN), figsize=(5.0 * len(SHOWN), tall * rows), squeeze=False)
    for chart, axis in zip(shown, axes.flat, strict=True):
        labels = [bar.label for bar in chart.bars]
        errors = [bar.value.ci95 or 0.0 for bar in chart.bars]
        axis.barh(labels, [bar.value.mean for bar in chart.bars], xerr=errors, color=_COLOURS[0], ecolor=_COLOURS[1])
        axis.invert_yaxis()
        axis.set_title(f"{chart.workload}: {chart.title}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _scaled(value: Estimate, scale: float) -> Estimate:
    return Estimate(value.mean * scale, None if value.ci95 is None else value.ci95 * scale)
