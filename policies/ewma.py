"""Mean of a block's past scores: what mattered over the last steps will matter in the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.policies.history import LEAST_MASS, ScoreHistory
from tierstore.policies.ranked import BlockStats, Rank, RankedPolicy

if TYPE_CHECKING:
    from tierstore.directory import HandleSpace
    from tierstore.interfaces import Access


class EWMA(RankedPolicy):
    """Evicts the block whose exponentially weighted mean of log attention mass is lowest.

    Every block is followed, resident or not, from its first score on. Four bytes a
    block, beside those of its last use.

    Parameters
    ----------
    alpha: weight of the newest score, in (0, 1]; 1 is `Lookahead`.
    """

    def __init__(self, alpha: float = 0.3) -> None:
        self._history = ScoreHistory([alpha], LEAST_MASS, np.inf)

    def bind(self, space: HandleSpace) -> None:
        super().bind(space)
        self._history.bind(space)

    def on_access(self, access: Access) -> None:
        super().on_access(access)
        self._history.update(access)

    def rank(self, stats: BlockStats) -> Rank:
        return self._history.mean(0, stats.handles)
