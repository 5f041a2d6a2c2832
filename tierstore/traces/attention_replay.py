"""Replays an attention trace through a policy, by the code that moves blocks in a store."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore.directory import HandleSpace
from tierstore.errors import ConfigError
from tierstore.interfaces import Access, EvictionPolicy
from tierstore.layout import BlockLayout, Part
from tierstore.memory import Memory, unlimited
from tierstore.metrics import StoreMetrics
from tierstore.tiers.memory import MemoryTier
from tierstore.transfer import Transfers

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from tierstore.interfaces import Ids, Pointers, Selection
    from tierstore.traces.attention import AttentionTrace

_LAYOUT = BlockLayout((Part("nothing", (1,), torch.uint8),))
"""Blocks of one byte: only where they are matters."""


@dataclass(frozen=True, eq=False)
class Replay:
    """What a window would have served and fetched.

    selected, fetched: int64 [steps, segments] blocks.
    """

    selected: npt.NDArray[np.int64]
    fetched: npt.NDArray[np.int64]

    def hit_ratio(self, first_step: int = 0) -> float:
        """Share of the selected blocks that were in the window, from step `first_step` on."""
        selected = self.selected[first_step:].sum()
        return 1.0 - float(self.fetched[first_step:].sum() / selected) if selected else 1.0


def replay(
    trace: AttentionTrace,
    policy: EvictionPolicy,
    windows: Pointers,
    selections: Iterable[Selection] | None = None,
) -> Replay:
    """Fetch what each step of `trace` selects into windows that begin empty.

    Parameters
    ----------
    policy: a new one; it says who leaves, among those that the step did not select.
    windows: int64 [segments], blocks that fit each segment's window, at least those of any step.
        What is more than the blocks that a segment has makes no difference.
    selections: those of the trace, where they are at hand: ``trace.selections()`` by default.

    The decisions are those of a `BlockStore` with one domain for each segment; it sees the same
    calls, but for all layers at once. ConfigError if a window is smaller than a selection;
    PolicyError for an exception of the policy's own.
    """
    most = trace.counts.max(0, initial=0)
    if (
        not isinstance(windows, np.ndarray)
        or windows.dtype.kind not in "iu"
        or windows.shape != most.shape
        or (windows < most).any()
    ):
        raise ConfigError(
            f"windows={windows}: expected one for each of {trace.segments} segments, of at least "
            f"the {most.max(initial=0)} blocks that a step selects"
        )
    if not isinstance(policy, EvictionPolicy):
        raise ConfigError(f"policy={policy!r}: expected an EvictionPolicy")
    segments = np.arange(trace.segments, dtype=np.int32)
    # Memory is taken for windows as they are; a segment never fills more than it has.
    windows = np.minimum(windows, np.maximum(trace.blocks.max(0, initial=0), most)).astype(np.int64)
    moves, space = _empty_windows(policy, windows, int(trace.blocks.max(initial=0)))
    fetched = np.zeros(trace.blocks.shape, np.int64)
    if selections is None:
        selections = trace.selections()
    for step, selection in enumerate(selections):
        _grow(moves, space, trace.blocks[step])
        handles, slots, _, misses = moves.judge(selection, segments)
        access = Access(
            selection.row_ptr, handles, selection.scores, moves.step, selection.everything
        )
        moves.tell(0, "on_access", access)
        if misses:
            rows = np.repeat(segments, trace.counts[step])
            fetched[step] = np.bincount(rows[slots < 0], minlength=trace.segments)
            moves.bring(moves.reserve(handles, access), nullcontext())
    return Replay(trace.counts.astype(np.int64), fetched)


def _empty_windows(
    policy: EvictionPolicy, windows: Pointers, blocks: int
) -> tuple[Transfers, HandleSpace]:
    """A chain of two tiers, the upper one with a domain of that size for each segment."""
    space, count, total = HandleSpace(unlimited()), len(windows), int(windows.sum())
    space.reserve(count, blocks)
    everything = blocks * count
    tiers = [
        MemoryTier(_LAYOUT, Memory(max(1, slots), name), name)
        for name, slots in (("window", total), ("all", everything))
    ]
    moves = Transfers(_LAYOUT, tiers, [policy], space, StoreMetrics(["window", "all"]))
    segments = space.open(count)
    order: Ids = np.arange(count, dtype=np.int32)
    if not np.array_equal(segments, order):
        raise AssertionError("a new space numbers its segments from 0")
    for level, slots in enumerate((total, everything)):
        residency = moves.residency[level]
        domains = order if level == 0 else np.zeros_like(order)
        residency.assign(segments, domains)
        residency.reserve(slots, int(windows.max(initial=0)) if level == 0 else slots)
        tiers[level].resize(slots)
        residency.resize(slots)
    moves.set_quota(0, segments, windows)
    return moves, space


def _grow(moves: Transfers, space: HandleSpace, blocks: Ids) -> None:
    """Let each segment have so many blocks; the new ones are in the backing tier only."""
    short = blocks - space.blocks[: len(blocks)]
    for more in np.unique(short[short > 0]).tolist():
        segments = np.flatnonzero(short == more).astype(np.int32)
        handles = space.extend(segments, more).reshape(-1)
        moves.valid.array[handles] = 1
        moves.write(moves.backing, handles, np.zeros((1, 1), np.uint8), np.zeros_like(handles))
