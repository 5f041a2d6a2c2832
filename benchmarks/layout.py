"""How blocks should stand on disk: bytes read for bytes wanted, and extents of a step.

Recorded selections are looked up in the file as it would be written: a segment for each layer and
KV head, its blocks in the order of the text, or those of each cluster of the index side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.adapters.cli.trace_file import read_attention
from tierstore.benchmarks.findings import Findings
from tierstore.benchmarks.machine import Machine
from tierstore.benchmarks.recorded import traces_in
from tierstore.benchmarks.rounds import Measure, Ratio, Say
from tierstore.errors import ConfigError
from tierstore.placement import packing_order

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from tierstore.interfaces import Ids, Pointers
    from tierstore.traces.attention import AttentionTrace

EXTENTS = (4 << 10, 16 << 10, 64 << 10)
BUDGETS = (1 / 64, 1 / 16)
WINDOW = 2.0
FIRST = 16
"""Step that counting begins at: a window that begins empty misses everything first."""

BLOCK_BYTES = 1 << 10
"""Of the demo model: 4 tokens, keys and values, 64 numbers of 16 bits."""

ORDERS = {
    "time": "blocks in the order of the text",
    "packed": "blocks of a cluster side by side, clusters in the order of their first blocks",
}


def run(say: Say, *, traces: str | None = None) -> Findings:
    """Measure every ``kvdrive-*.trace`` in a directory: only its index has clusters of blocks."""
    if traces is None:
        raise ConfigError("traces=None: expected a directory of attention traces; pass --traces")
    paths = traces_in(traces, "kvdrive-*.trace")
    values: dict[str, dict[str, list[float]]] = {}
    for path in paths:
        whole = read_attention(path, steps=FIRST + 1)
        for budget in BUDGETS:
            for measure, by_order in amounts(whole.with_budget(budget)).items():
                of_budget = values.setdefault(f"{measure}, budget {budget:.4g}", {})
                for order, value in by_order.items():
                    of_budget.setdefault(order, []).append(value)
        say(f"{path.stem}: done")
    return Findings(
        benchmark="layout",
        machine=Machine.here(),
        baseline="time",
        settings={
            "traces": ", ".join(path.stem for path in paths),
            "block bytes": BLOCK_BYTES,
            "window": f"x{WINDOW:g}, least recently used leave",
            "from step": FIRST,
        },
        configurations=ORDERS,
        measures={
            name: Measure("by document; extents: of a layer in a step", each)
            for name, each in values.items()
        },
        ratios=[
            Ratio(f"{name}: time / packed", name, "time", "packed", at_least=1.0)
            for name in values
            if name.startswith("bytes read")
        ],
    )


def amounts(trace: AttentionTrace) -> dict[str, dict[str, float]]:
    """By measure and order: bytes read / wanted, and extents, of what steps select and miss."""
    orders = slots_of(trace)
    layers = trace.segments / int(trace.facts.get("kv_heads", 3))
    found: dict[str, dict[str, float]] = {}
    for what, steps in (("selected", list(selected(trace))), ("missed", list(missed(trace)))):
        counted = steps[FIRST:]
        wanted = sum(len(ids) for _, ids in counted) * BLOCK_BYTES
        for extent in EXTENTS:
            size = f"{extent >> 10} KiB"
            for order, slots in orders.items():
                read = sum(extents_of(slots[rows, ids], extent) for rows, ids in counted)
                amplification = found.setdefault(f"bytes read / wanted, {what}, {size}", {})
                amplification[order] = read * extent / max(1, wanted)
                extents = found.setdefault(f"extents, {what}, {size}", {})
                extents[order] = read / len(counted) / layers
    return found


def slots_of(trace: AttentionTrace) -> dict[str, Pointers]:
    """By order: the slot of each block [segments, blocks], one segment after the other."""
    blocks = int(trace.blocks[0].min())
    width = trace.unit_of.shape[1]
    start = np.arange(trace.segments)[:, None] * width
    in_time = np.broadcast_to(np.arange(width), (trace.segments, width))
    packed: Pointers = in_time.copy()
    clusters = np.broadcast_to(trace.unit_of[:, :blocks], (trace.segments, blocks))
    np.put_along_axis(packed, packing_order(clusters), np.arange(blocks)[None], 1)
    return {"time": start + in_time, "packed": start + packed}


def extents_of(slots: Pointers, extent: int) -> int:
    """How many extents blocks stand in."""
    return len(np.unique(slots * BLOCK_BYTES // extent))


def selected(trace: AttentionTrace) -> Iterator[tuple[Ids, Ids]]:
    """Segments and blocks that each step selects."""
    segments = np.arange(trace.segments, dtype=np.int32)
    at = 0
    for counts in trace.counts:
        total = int(counts.sum())
        yield np.repeat(segments, counts), trace.ids[at : at + total]
        at += total


def missed(trace: AttentionTrace) -> Iterator[tuple[Ids, Ids]]:
    """Those that a window of each segment does not have, the least recently used leaving it.

    Among those of one step the one with the lowest number leaves first.
    """
    width = trace.unit_of.shape[1]
    last: npt.NDArray[np.int64] = np.full((trace.segments, width), -1)
    capacity = int(WINDOW * trace.counts.max())
    for step, (rows, ids) in enumerate(selected(trace)):
        new = last[rows, ids] < 0
        yield rows[new], ids[new]
        last[rows, ids] = step * width + ids
        if capacity < last.shape[1]:
            oldest = np.argpartition(-last, capacity, axis=1)[:, capacity:]
            np.put_along_axis(last, oldest, -1, 1)
