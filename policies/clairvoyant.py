"""Belady's rule for attention traces: the ceiling, which knows what is selected next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np

from tierstore.policies.ranked import BlockStats, Rank, RankedPolicy
from tierstore.policies.replay import NEVER, next_uses

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from tierstore.directory import HandleSpace
    from tierstore.interfaces import Access, Selection


class Clairvoyant(RankedPolicy):
    """Evicts the block whose next selection is farthest away, given the selections to come.

    Where all selected blocks must come in, no choice among the others fetches less (L. A. Belady,
    1966). It serves one replay, of just those selections.

    Parameters
    ----------
    next_uses: for each access to come, the number of the access, from 0, that selects each of its
        handles next; int64, `NEVER` for none. `of` makes them from the selections of a trace.
    """

    def __init__(self, next_uses: Sequence[npt.NDArray[np.int64]]) -> None:
        self._next_uses = iter(next_uses)

    @classmethod
    def of(cls, selections: Sequence[Selection]) -> Self:
        """Knowing that these selections come, each row being a segment of its own."""
        steps = np.repeat(np.arange(len(selections)), [len(s.ids) for s in selections])
        rows = [np.repeat(np.arange(len(s.row_ptr) - 1), np.diff(s.row_ptr)) for s in selections]
        ids = np.concatenate([s.ids for s in selections]).astype(np.int64)
        keys = np.concatenate(rows) * (ids.max(initial=0) + 1) + ids
        following = np.minimum(next_uses(keys), len(keys))
        next_use = np.append(steps, NEVER)[following]
        ends = np.cumsum([len(s.ids) for s in selections])
        return cls(np.split(next_use, ends[:-1]))

    def bind(self, space: HandleSpace) -> None:
        super().bind(space)
        self._next_use = space.column(np.int64, fill=NEVER)

    def on_access(self, access: Access) -> None:
        super().on_access(access)
        self._next_use.array[access.handles] = next(self._next_uses)

    def rank(self, stats: BlockStats) -> Rank:
        return -self._next_use.array[stats.handles]
