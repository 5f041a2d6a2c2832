"""Attention traces: what every block scored in each decode step, and which blocks were selected.

In a file, under the kind ``"attention"``:

================  =========================================================================
``blocks``        int32 [steps, segments], blocks that a segment had
``unit_scores``   float16 [steps, segments, units], log attention mass; -inf where no unit is
``unit_of``       int32 [segments, blocks], or [1, blocks] for all; a block's unit, or -1
``counts``        int32 [steps, segments], blocks selected
``ids``           int32, the blocks selected: step by step, in each segment by segment
================  =========================================================================

Scores are rounded to 16 bits, so that a trace stays small; the ids are what was selected before
rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from tierstore import kernels
from tierstore.arguments import MOST_WHOLE, is_whole
from tierstore.errors import ConfigError, TraceError
from tierstore.interfaces import BlockScores, Ids, Pointers, Scores, Selection
from tierstore.sizes import parse_budget
from tierstore.traces.file import read_trace, write_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Halves = npt.NDArray[np.float16]

KIND = "attention"


@dataclass(frozen=True, eq=False)
class AttentionTrace:
    """The arrays of an attention trace, named as in the file.

    facts: what is known about the run. ``block_tokens`` and ``context_tokens`` are always there,
    the tokens of a block, and of the text before the first step.
    """

    facts: Mapping[str, Any]
    blocks: Ids
    unit_scores: Halves
    unit_of: Ids
    counts: Ids
    ids: Ids

    @property
    def steps(self) -> int:
        """Decode steps."""
        return len(self.blocks)

    @property
    def segments(self) -> int:
        """Segments: (layer, sequence, KV head), the last changing fastest."""
        return int(self.blocks.shape[1])

    def selections(self) -> Iterator[Selection]:
        """What the index answered in each step, for all segments at once; segment s is row s.

        A block of no unit has a score of -inf.
        """
        segments = np.arange(self.segments, dtype=np.int32)
        rows = np.repeat(np.tile(segments, self.steps), self.counts.reshape(-1))
        table = np.minimum(rows, len(self.unit_of) - 1)
        units = self.unit_of[table, self.ids]
        ends = np.cumsum(self.counts.sum(1))
        for step, scores in enumerate(self.unit_scores):
            mine = slice(int(ends[step] - self.counts[step].sum()), int(ends[step]))
            row_ptr: Pointers = np.zeros(self.segments + 1, np.int64)
            np.cumsum(self.counts[step], out=row_ptr[1:])
            unit_scores: Scores = scores.astype(np.float32)
            everything = BlockScores(unit_scores, self.unit_of, segments)
            of_units = unit_scores[rows[mine], np.maximum(units[mine], 0)]
            picked: Scores = np.where(units[mine] >= 0, of_units, np.float32(-np.inf))
            yield Selection(row_ptr, self.ids[mine], picked, everything)

    def with_budget(
        self, budget: float | str, shares: npt.NDArray[np.float64] | None = None
    ) -> AttentionTrace:
        """The trace as it were with another budget, from the scores alone.

        budget: share of the context before the first step (a float in (0, 1]), or tokens.
        shares: float64 [segments] >= 0, what each segment gets of it, 1 for all of it and the
            default.

        The scores stay those of the run, whose budget also had a part in its queries. A block of
        no unit is never selected.
        """
        ones = np.ones(self.segments) if shares is None else self._checked(shares)
        blocks = np.maximum(np.rint(self.budget_blocks(budget) * ones), 1)
        counts: Ids = np.minimum(self._scored_blocks(), blocks).astype(np.int32)
        ids: Ids = np.empty(int(counts.sum()), np.int32)
        picked: Scores = np.empty(int(counts.sum(1).max(initial=0)), np.float32)
        row_ptr: Pointers = np.empty(self.segments + 1, np.int64)
        order: Ids = np.empty(max(1, self.unit_scores.shape[2]), np.int32)
        at, lists, have = 0, None, None
        for step, scores in enumerate(self.unit_scores):
            if have is None or (self.blocks[step] != have).any():
                have = self.blocks[step]
                lists = _unit_lists(self.unit_of, have, self.unit_scores.shape[2])
            wanted = int(counts[step].sum())
            assert lists is not None
            kernels.select_blocks(
                scores.astype(np.float32), *lists, counts[step], order, row_ptr,
                ids[at : at + wanted], picked,
            )  # fmt: skip
            at += wanted
        facts = {**self.facts, "budget": parse_budget(budget)}
        return replace(self, facts=facts, counts=counts, ids=ids)

    def _checked(self, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        is_array = isinstance(shares, np.ndarray) and shares.dtype.kind in "iuf"
        if not is_array or shares.shape != (self.segments,):
            found = f"{shares.dtype} {list(shares.shape)}" if is_array else f"{shares!r:.60}"
            raise ConfigError(f"shares: expected numbers [{self.segments}], found {found}")
        if not (np.isfinite(shares) & (shares >= 0)).all():
            raise ConfigError(f"shares: expected finite numbers >= 0, found {shares}")
        return shares

    def _scored_blocks(self) -> Ids:
        """int32 [steps, segments]: how many of the blocks had a unit."""
        is_scored = np.pad(self.unit_of >= 0, ((0, 0), (1, 0)))
        before = np.cumsum(is_scored, axis=1, dtype=np.int32)
        scored: Ids = before[np.arange(self.segments) % len(before), self.blocks]
        return scored

    def budget_blocks(self, budget: float | str) -> int:
        """Blocks of a budget, a share of the context before the first step or tokens."""
        amount = parse_budget(budget)
        if isinstance(amount, float):
            amount *= int(self.facts["context_tokens"])
        return max(1, math.ceil(amount / int(self.facts["block_tokens"]) - 1e-9))

    def save(self, path: str | Path) -> None:
        """Write the trace; the file appears whole or not at all."""
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        write_trace(path, KIND, self.facts, arrays)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a trace. TraceError if the file is none, or its arrays do not fit each other."""
        facts, arrays = read_trace(path, KIND)
        fault = _fault(facts, arrays)
        if fault:
            raise TraceError(f"{path}: expected a trace of attention, found {fault}")
        return cls(facts, **{name: arrays[name] for name in _ARRAYS})


_ARRAYS = {
    "blocks": (2, np.int32),
    "unit_scores": (3, np.float16),
    "unit_of": (2, np.int32),
    "counts": (2, np.int32),
    "ids": (1, np.int32),
}
"""Axes and type of each array."""


def _fault(facts: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """What is wrong with the content of a file; empty if nothing."""
    for name in ("block_tokens", "context_tokens"):
        if not is_whole(facts.get(name)) or not 1 <= facts[name] <= MOST_WHOLE:
            return f"{name}={facts.get(name)!r}"
    if arrays.keys() != _ARRAYS.keys():
        return f"arrays {sorted(arrays)}"
    for name, (axes, dtype) in _ARRAYS.items():
        if arrays[name].ndim != axes or arrays[name].dtype != dtype:
            return f"{name} of shape {arrays[name].shape}, {arrays[name].dtype}"
    blocks, unit_scores, unit_of, counts, ids = (arrays[name] for name in _ARRAYS)
    if (
        counts.shape != blocks.shape
        or unit_scores.shape[:2] != blocks.shape
        or unit_of.shape[0] not in (1, blocks.shape[1])
        or counts.min(initial=0) < 0
        or counts.sum() != len(ids)
    ):
        return "arrays of shapes that do not fit each other"
    if blocks.min(initial=0) < 0 or blocks.max(initial=0) > unit_of.shape[1]:
        return "more blocks than units are known for"
    if unit_of.min(initial=-1) < -1 or unit_of.max(initial=-1) >= unit_scores.shape[2]:
        return "a unit that has no score"
    has_unit = np.arange(unit_scores.shape[2]) < units_of_rows(unit_of, blocks)[..., None]
    if (np.isnan(unit_scores) & has_unit).any():
        return "a score that is no number"
    if (blocks[1:] < blocks[:-1]).any():
        return "segments that get shorter"
    known = np.repeat(blocks.reshape(-1), counts.reshape(-1))
    if ((ids < 0) | (ids >= known)).any():
        return "a selected block that its segment does not have"
    return ""


def units_of_rows(unit_of: Ids, blocks: Ids) -> Ids:
    """int32, in the shape of blocks [..., rows]: units that this many blocks of a row are in.

    unit_of: [rows, width], or [1, width] for all.
    """
    known = np.pad(unit_of + 1, ((0, 0), (1, 0)))
    rows = np.arange(blocks.shape[-1]) % len(unit_of)
    units: Ids = np.maximum.accumulate(known, axis=1)[rows, blocks]
    return units


def _unit_lists(unit_of: Ids, blocks: Ids, units: int) -> tuple[Ids, Ids, Ids, Ids]:
    """Units in use, and costs, pointers and members of units, as `kernels.select_blocks` has them.

    Members of a unit stand in the order of their numbers. Blocks of no unit are in no list.
    """
    rows, width = len(blocks), unit_of.shape[1]
    known = np.broadcast_to(unit_of, (rows, width))
    is_member = (np.arange(width) < blocks[:, None]) & (known >= 0)
    keys = np.where(is_member, known, units)
    flat = (np.arange(rows)[:, None] * (units + 1) + keys).reshape(-1)
    all_costs = np.bincount(flat, minlength=rows * (units + 1)).reshape(rows, units + 1)
    costs: Ids = all_costs[:, :units].astype(np.int32)
    unit_ptr: Ids = (np.cumsum(costs, 1) - costs).astype(np.int32)
    members: Ids = np.argsort(keys, axis=1, kind="stable").astype(np.int32)
    return np.full(rows, units, np.int32), costs, unit_ptr, members
