"""Records attention traces in the decode path."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierstore.errors import TraceError
from tierstore.traces.attention import AttentionTrace, Halves, units_of_rows

if TYPE_CHECKING:
    from tierstore.interfaces import BlockScores, Ids, Selection


class _Part(NamedTuple):
    """What one layer's rows did in one step."""

    blocks: Ids
    unit_scores: Halves
    counts: Ids
    ids: Ids


class AttentionRecorder:
    """Listens to an engine's selections, layer by layer, and makes a trace of them.

    Pass its `listen` as ``on_selection`` of `SparseAttention`. It keeps about two bytes per unit
    and segment for each step in memory, and the last tables of units. One batch of
    sequences, which only grow.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._steps: list[list[_Part]] = []
        self._unit_of: dict[int, Ids] = {}
        """The table of each layer, as of its last step."""

    def listen(self, layer: int, blocks: Ids, selection: Selection) -> None:
        """A layer selected from its rows' so many blocks [R].

        TraceError if its index scores only what it selects, or NaN.
        """
        if selection.everything is None:
            raise TraceError(
                "the index says nothing of blocks that it does not select: expected one that "
                "scores all blocks, for example preset 'exact'"
            )
        counts = np.diff(selection.row_ptr).astype(np.int32)
        scores, unit_of = _trimmed(selection.everything, blocks)
        if np.isnan(scores).any():
            raise TraceError("the index scored a block NaN: expected logs of attention masses")
        if layer == 0:
            self._steps.append([])
        self._unit_of[layer] = unit_of
        part = _Part(blocks.copy(), scores, counts, selection.ids.copy())
        self._steps[-1].append(part)

    @property
    def steps(self) -> int:
        """Steps that every layer has made."""
        return sum(len(parts) == self._layers for parts in self._steps)

    def trace(self, **facts: object) -> AttentionTrace:
        """What was recorded, with the facts that `AttentionTrace` asks for and any others.

        TraceError if nothing was, if a step is not complete, or if sequences came, went or shrank.
        """
        if not self._steps or self.steps < len(self._steps):
            raise TraceError(
                f"{self.steps} whole steps of {self._layers} layers: expected at least one, and no "
                "part of another"
            )
        shapes = {tuple(len(part.blocks) for part in parts) for parts in self._steps}
        blocks = [np.concatenate([part.blocks for part in parts]) for parts in self._steps]
        if len(shapes) > 1 or any((b < a).any() for a, b in pairwise(blocks)):
            raise TraceError("the recorded sequences came, went or shrank: record one batch")
        parts = [part for step in self._steps for part in step]
        segments, units = len(blocks[0]), max(part.unit_scores.shape[1] for part in parts)
        scores: Halves = np.full((len(blocks), segments, units), -np.inf, np.float16)
        for step, layers in enumerate(self._steps):
            at = 0
            for part in layers:
                rows, width = part.unit_scores.shape
                scores[step, at : at + rows, :width] = part.unit_scores
                at += rows
        return AttentionTrace(
            facts=facts,
            blocks=np.stack(blocks),
            unit_scores=scores,
            unit_of=_joined([self._unit_of[layer] for layer in range(self._layers)], shapes.pop()),
            counts=np.stack([np.concatenate([p.counts for p in layers]) for layers in self._steps]),
            ids=np.concatenate([part.ids for part in parts]),
        )


def _trimmed(everything: BlockScores, blocks: Ids) -> tuple[Halves, Ids]:
    """Scores of units and the table of blocks, without what is reserved for later."""
    width = int(blocks.max(initial=0))
    unit_of = everything.unit_of[:, :width].astype(np.int32)
    unit_of[np.arange(width) >= _longest(blocks, len(unit_of))[:, None]] = -1
    units = int(unit_of.max(initial=-1)) + 1
    has_unit = np.arange(units) < units_of_rows(unit_of, blocks)[:, None]
    scores = np.where(has_unit, everything.unit_scores[:, :units], -np.inf)
    with np.errstate(over="ignore"):
        return scores.astype(np.float16), unit_of


def _longest(blocks: Ids, tables: int) -> Ids:
    """Blocks that each table covers: its row's, or the longest row's if one serves all."""
    return blocks if tables == len(blocks) else blocks.max(keepdims=True)


def _joined(tables: list[Ids], rows: tuple[int, ...]) -> Ids:
    """One table for the segments of all layers; of one row if the layers share it."""
    width = max(table.shape[1] for table in tables)
    if all(len(table) == 1 and np.array_equal(table, tables[0]) for table in tables):
        return tables[0]
    joined: Ids = np.full((sum(rows), width), -1, np.int32)
    at = 0
    for table, count in zip(tables, rows, strict=True):
        joined[at : at + count, : table.shape[1]] = table
        at += count
    return joined
