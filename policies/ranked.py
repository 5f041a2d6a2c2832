"""The reduced base of policies that rank: write one vectorised function, get a policy."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import PolicyError
from tierstore.interfaces import Access, Demand, EvictionPolicy, Ids, Pointers, Scores
from tierstore.kernels import histories, tables

if TYPE_CHECKING:
    from tierstore.directory import Column, HandleSpace

Rank = npt.NDArray[Any]


class BlockStats:
    """What is known about the residents that may leave; computed when first asked for.

    handles: int32 [n], those of the i-th domain at ``row_ptr[i]:row_ptr[i + 1]``.
    step: number of the running step. space: says which segment a handle belongs to.
    """

    def __init__(self, demand: Demand, space: HandleSpace, last_used: Column) -> None:
        self.demand = demand
        self.step = demand.access.step
        self.space = space
        self.row_ptr: Pointers = np.empty_like(demand.row_ptr)
        room: Ids = np.empty(len(demand.residents) + 1, np.int32)
        count = histories.eligible_only(
            demand.residents, demand.eligible, demand.row_ptr, room, self.row_ptr
        )
        self.handles = room[:count]
        self._last_used = last_used

    @cached_property
    def last_used(self) -> npt.NDArray[np.int64]:
        """int64 [n] step of the last use; -1 never."""
        last_used: npt.NDArray[np.int64] = np.empty(len(self.handles), np.int64)
        histories.take(self.handles, self._last_used.array, last_used)
        return last_used

    @cached_property
    def score(self) -> Scores:
        """float32 [n] log attention mass in the running step; -inf where the index gave none."""
        everything = self.demand.access.everything
        out: Scores = np.full(len(self.handles), -np.inf, np.float32)
        if everything is not None:
            tables.gather_scores(
                self.handles, self.space.owner_segment, self.space.owner_index, self._row_of,
                everything.unit_of, everything.unit_scores, out,
            )  # fmt: skip
        return out

    def best_of_row(self, count: int) -> Scores:
        """float32 [n] score of the `count`-th best of all blocks in each resident's row.

        -inf where the index scored fewer; inf where it scored none.
        """
        everything = self.demand.access.everything
        if everything is None:
            return np.full(len(self.handles), np.inf, np.float32)
        rows, width = len(everything.segments), everything.unit_of.shape[1]
        cuts: Scores = np.full(rows + 1, -np.inf, np.float32)
        cuts[rows] = np.inf
        if count <= width:
            unit_of = np.broadcast_to(everything.unit_of, (rows, width))
            is_block = np.arange(width) < self.space.blocks[everything.segments, None]
            scores = np.take_along_axis(everything.unit_scores, np.maximum(unit_of, 0), axis=1)
            scores = np.where(is_block & (unit_of >= 0), scores, -np.inf)
            cuts[:rows] = np.partition(scores, width - count, axis=1)[:, width - count]
        return cuts[self._row_of[self.space.owner_segment[self.handles // tables.CHUNK]]]

    @cached_property
    def _row_of(self) -> Ids:
        """Row of each segment in the running step's scores; -1 where it has none."""
        everything = self.demand.access.everything
        rows: Ids = np.full(len(self.space.blocks), -1, np.int32)
        if everything is not None:
            rows[everything.segments] = np.arange(len(everything.segments), dtype=np.int32)
        return rows


class RankedPolicy(EvictionPolicy):
    """Evicts the residents of lowest rank; ranks are computed anew whenever room is wanted.

    For domains up to some thousands of blocks, all of them at once. PolicyError where a rank or a
    tie is no array of as many numbers as handles.
    """

    def bind(self, space: HandleSpace) -> None:
        self._space = space
        self._last_used = space.column(np.int64, fill=-1)

    def on_access(self, access: Access) -> None:
        histories.stamp(access.handles, access.step, self._last_used.array)

    def on_remove(self, handles: Ids) -> None:
        """The space resets columns of handles that it gives out again."""

    @abstractmethod
    def rank(self, stats: BlockStats) -> Rank:
        """One number for each of `stats.handles`: the lowest leave first."""

    def tie(self, stats: BlockStats) -> Rank:
        """Decides between equal ranks, lowest first; then the order of `stats.handles` does."""
        return stats.last_used

    def victims(self, demand: Demand) -> Ids:
        stats = BlockStats(demand, self._space, self._last_used)
        able = np.diff(stats.row_ptr)
        if (able < demand.need).any():
            row = int(np.argmax(able < demand.need))
            raise PolicyError(
                f"{type(self).__name__}: domain {demand.domains[row]} should give up "
                f"{demand.need[row]} blocks, but only {able[row]} may leave"
            )
        picks: Ids = np.empty(int(demand.need.sum()), np.int32)
        order: Ids = np.empty(len(stats.handles), np.int32)
        rank, tie = self._one_each("rank", stats), self._one_each("tie", stats)
        tables.lowest(rank, tie, stats.row_ptr, demand.need, order, picks)
        return stats.handles[picks]

    def _one_each(self, name: str, stats: BlockStats) -> Rank:
        """What the method of that name says of each handle; a kernel would read beyond less."""
        found = getattr(self, name)(stats)
        count = len(stats.handles)
        if isinstance(found, np.ndarray) and found.shape == (count,):
            return found
        what = f"[{', '.join(map(str, found.shape))}]" if isinstance(found, np.ndarray) else found
        raise PolicyError(
            f"{type(self).__name__}.{name} returned {what!s:.99}: expected an array [{count}], one "
            "number for each of stats.handles"
        )
