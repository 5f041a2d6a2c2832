"""Lookahead eviction: a high attention score now predicts use in the next step (KVDrive, K8)."""

from __future__ import annotations

import numpy as np

from tierstore.arguments import MOST_WHOLE, is_whole
from tierstore.errors import ConfigError
from tierstore.policies.ranked import BlockStats, Rank, RankedPolicy


class Lookahead(RankedPolicy):
    """Evicts the block with the lowest attention score of the running step.

    Parameters
    ----------
    pool: with a candidate pool of M blocks, residents outside the M best-scored blocks of their row
        leave first, the least recently used before others. None ranks all residents by their scores
        alone.
    """

    def __init__(self, pool: int | None = None) -> None:
        if pool is not None and not (is_whole(pool) and 1 <= pool <= MOST_WHOLE):
            raise ConfigError(
                f"pool={pool!r}: expected a number of blocks >= 1, or None for all scores"
            )
        self.pool = pool

    def rank(self, stats: BlockStats) -> Rank:
        if self.pool is None:
            return stats.score
        return np.where(stats.score >= stats.best_of_row(self.pool), np.inf, stats.last_used)

    def tie(self, stats: BlockStats) -> Rank:
        return stats.last_used if self.pool is None else stats.score
