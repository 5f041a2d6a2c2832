"""Mean of a block's past margins over the cut of selection, and how often it was selected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.policies.history import ScoreHistory, UseCount
from tierstore.policies.ranked import BlockStats, Rank, RankedPolicy

if TYPE_CHECKING:
    from tierstore.directory import HandleSpace
    from tierstore.interfaces import Access, Scores

_MARGINS = (-6.0, 2.0)
"""In nats: far below the cut of selection, and far above it, differences say nothing."""
_LEAST_CUT = np.float32(-1e4)
"""Stands for a cut of -inf: then every block is far above it."""
_UNUSED = 0.05


class EwmaUse(RankedPolicy):
    """Evicts the lowest sum of the mean margin over the selection's cut and the log of uses.

    The margin is a block's log attention mass less the lowest that was selected in its row, clipped
    to [-6, 2]; where nothing was selected, the mass itself. Eight bytes a block, beside
    those of its last use.

    Parameters
    ----------
    alpha: weight of the newest margin, in (0, 1].
    decay: what is left of a use one step later, in [0, 1].
    """

    def __init__(self, alpha: float = 0.3, decay: float = 0.95) -> None:
        self._margins = ScoreHistory([alpha], *_MARGINS)
        self._uses = UseCount(decay)

    def bind(self, space: HandleSpace) -> None:
        super().bind(space)
        self._margins.bind(space)
        self._uses.bind(space)

    def on_access(self, access: Access) -> None:
        super().on_access(access)
        self._margins.update(access, _lowest_selected(access))
        self._uses.update(access)

    def rank(self, stats: BlockStats) -> Rank:
        uses: Scores = np.log(self._uses.uses(stats.handles) + np.float32(_UNUSED))
        return self._margins.mean(0, stats.handles) + uses


def _lowest_selected(access: Access) -> Scores:
    """Lowest selected score of each row; 0 where nothing was selected."""
    # Padded, since the last rows may begin at the end.
    padded: Scores = np.append(access.scores, np.float32(np.inf))
    lowest = np.maximum(np.minimum.reduceat(padded, access.row_ptr[:-1]), _LEAST_CUT)
    return np.where(np.diff(access.row_ptr) == 0, np.float32(0), lowest)
