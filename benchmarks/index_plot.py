"""The frontier of indexes, bytes against quality, and what they find by budget."""

from __future__ import annotations

from colorsys import hsv_to_rgb
from statistics import fmean
from typing import TYPE_CHECKING

from tierstore.adapters.cli.pictures import new_figure, save_figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from tierstore.benchmarks.findings import Findings
    from tierstore.benchmarks.indexes import Row

_BUDGET = 1 / 32
_LABELS = {
    "KL": "KL(full || sparse), nats",
    "mass": "attention / perfect selection",
    "recall": "share of the best units selected",
    "exact match": "numbers found",
    "log-probability": "log-probability of the number",
}


def draw(findings: Findings, rows: Sequence[Row], budgets: Sequence[float], path: str) -> None:
    """Draw to a picture file: above each measure by bytes at about 3.1 %, below by budget.

    MissingExtraError without matplotlib, ConfigError if the file cannot be written.
    """
    shown = [name for name in _LABELS if name in findings.measures]
    figure = new_figure(5 * len(shown), 9, path)
    axes = figure.subplots(2, len(shown), squeeze=False)
    near = min(budgets, key=lambda budget: abs(budget - _BUDGET))
    for column, name in enumerate(shown):
        if "bytes" in findings.measures:
            _frontier(axes[0, column], findings, rows, name, near)
        _curves(axes[1, column], findings, rows, name, budgets)
    handles, labels = axes[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    save_figure(figure, path)


def _frontier(
    axis: Axes, findings: Findings, rows: Sequence[Row], name: str, budget: float
) -> None:
    nbytes, values = findings.measures["bytes"].values, findings.measures[name].values
    for color, row in zip(_colors(rows), rows, strict=True):
        x, y = fmean(nbytes[str(row)]), fmean(values[row.at(budget)])
        axis.plot(x, y, _marker(row), color=color)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set(xlabel="index, bytes per token and KV head", ylabel=_LABELS[name])
    axis.set_title(f"{budget:.2%} selected")
    if name == "KL":
        axis.set_yscale("log")


def _curves(
    axis: Axes, findings: Findings, rows: Sequence[Row], name: str, budgets: Sequence[float]
) -> None:
    values = findings.measures[name].values
    percent = [100 * budget for budget in budgets]
    for color, row in zip(_colors(rows), rows, strict=True):
        means = [fmean(values[row.at(budget)]) for budget in budgets]
        axis.plot(percent, means, f"{_marker(row)}-", color=color, label=str(row))
    axis.set(xscale="log", xlabel="selected, % of the context", ylabel=_LABELS[name])
    axis.set_xticks(percent, [f"{each:.3g}" for each in percent])
    axis.minorticks_off()
    if name == "KL":
        axis.set_yscale("log")


def _marker(row: Row) -> str:
    return {1: "o", 2: "^", 4: "s"}.get(row.block_tokens, "D")


def _colors(rows: Sequence[Row]) -> list[tuple[float, float, float]]:
    """One colour for each index, whatever its blocks: all hues, by turns dark and light."""
    names = list(dict.fromkeys(row.name for row in rows))
    places = [names.index(row.name) for row in rows]
    return [hsv_to_rgb(place / len(names), 0.9, (0.55, 0.9)[place % 2]) for place in places]
