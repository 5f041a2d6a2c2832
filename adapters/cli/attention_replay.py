"""What ``tierstore trace replay`` does with an attention trace."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from rich.table import Table

from tierstore.adapters.cli.pictures import save_figure
from tierstore.adapters.cli.text import visible
from tierstore.errors import ConfigError
from tierstore.policies.attention import ATTENTION_POLICIES, Place
from tierstore.policies.comparison import BASELINE, CEILING, compare, gap_closed
from tierstore.sizes import MOST, format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from tierstore.traces.attention import AttentionTrace

DEFAULT_CAPACITY = "x1.5,x2,x3"
NAMES = (*ATTENTION_POLICIES, CEILING)


@dataclass(frozen=True, slots=True)
class Row:
    """What one policy did with windows of one size.

    window: in budgets. blocks: that fit a segment's window. moved: blocks fetched in a step.
    gap_closed: share of Belady's gain over LRU; None where there is none.
    """

    policy: str
    window: float
    blocks: int
    hit_ratio: float
    moved: float
    gap_closed: float | None


def checked_names(text: str) -> list[str]:
    """Names of policies, ConfigError for an unknown one."""
    names = list(NAMES) if text == "all" else text.split(",")
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"policies={name!r}: expected all, or of {', '.join(NAMES)}")
    return names


def rows_of(trace: AttentionTrace, names: list[str], capacity: str) -> list[Row]:
    """A row for each policy and window. ConfigError for a window that no selection fits."""
    selections, budget = list(trace.selections()), int(trace.counts.max(initial=0))
    if not budget:
        raise ConfigError("trace: expected steps that select blocks, found none")
    rows = []
    for text in capacity.split(","):
        place = _place(text, trace, budget)
        wanted = dict.fromkeys((BASELINE, CEILING, *names))
        outcomes = compare(trace, selections, wanted, Place(place.window, budget), place.blocks)
        low, high = outcomes[BASELINE].hit_ratio, outcomes[CEILING].hit_ratio
        for name in names:
            hits, moved = outcomes[name]
            closed = gap_closed(hits, low, high)
            rows.append(Row(name, place.window, place.blocks, hits, moved, closed))
    return rows


def _place(text: str, trace: AttentionTrace, budget: int) -> Place:
    """A window: budgets (x2), a share of a segment's blocks (5%), or blocks."""
    try:
        if text.startswith("x"):
            blocks = math.ceil(float(text[1:]) * budget)
        elif text.endswith("%"):
            blocks = int(float(text[:-1]) / 100 * int(trace.blocks.max()))
        else:
            blocks = int(text)
    except (ValueError, OverflowError):
        blocks = -1
    if not budget <= blocks <= MOST:
        raise ConfigError(
            f"capacity={text!r}: expected budgets such as x2, a share of a segment's blocks such "
            f"as 12%, or blocks, and at least the {budget} that a step selects; a smaller --budget "
            "selects fewer"
        )
    return Place(blocks / budget, blocks)


def block_bytes(trace: AttentionTrace) -> int | None:
    """Bytes of a block's keys and values, where the trace tells."""
    facts = trace.facts
    dtype = getattr(torch, str(facts.get("dtype")), None)
    keys, values = facts.get("head_dim"), facts.get("value_size")
    if not (isinstance(dtype, torch.dtype) and isinstance(keys, int) and isinstance(values, int)):
        return None
    return (keys + values) * dtype.itemsize * int(facts["block_tokens"])


def show(trace: AttentionTrace, rows: list[Row], console: Console) -> None:
    """Print a table."""
    facts = ", ".join(
        str(trace.facts[name]) for name in ("model", "document", "preset") if name in trace.facts
    )
    console.print(
        f"{trace.steps:,} steps of {trace.segments:,} segments of {trace.blocks.max(initial=0):,} "
        f"blocks: {visible(facts)}",
        soft_wrap=True,
    )
    size = block_bytes(trace)
    moved = "blocks moved a step" if size is None else "moved a step"
    table = Table("window", "policy", "hits", moved, "of the gap LRU to Belady")
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            f"×{row.window:.3g}",
            row.policy,
            f"{row.hit_ratio:.2%}",
            f"{row.moved:,.1f}" if size is None else format_size(round(row.moved * size)),
            "–" if row.gap_closed is None else f"{row.gap_closed:.1%}",
        )
    console.print(table)


def content(trace: AttentionTrace, rows: list[Row]) -> dict[str, object]:
    """What goes into the JSON file."""
    return {
        "schema": 1,
        "trace": {
            "steps": trace.steps,
            "segments": trace.segments,
            "block_bytes": block_bytes(trace),
            "facts": dict(trace.facts),
        },
        "rows": [asdict(row) for row in rows],
    }


def draw(figure: Figure, rows: list[Row], path: str) -> None:
    """Draw hit ratios over windows to a file."""
    axes = figure.subplots()
    for name in dict.fromkeys(row.policy for row in rows):
        mine = sorted((row.window, row.hit_ratio) for row in rows if row.policy == name)
        axes.plot(*zip(*mine, strict=True), marker="o", markersize=3, label=name)
    axes.set(xlabel="window, in budgets", ylabel="hit ratio")
    axes.legend(fontsize="small", ncols=2)
    save_figure(figure, path)
