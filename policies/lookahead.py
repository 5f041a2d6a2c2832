"""Lookahead eviction: a high attention score now predicts use in the next step (KVDrive, K8)."""

from __future__ import annotations

import numpy as np

from tierstore.errors import ConfigError
from tierstore.interfaces import BlockScores
from tierstore.policies.ranked import BlockStats, Rank, RankedPolicy


class Lookahead(RankedPolicy):
    """Evicts the block with the lowest attention score of the running step.

    Parameters
    ----------
    pool: with a candidate pool of M blocks, residents among the M best-scored blocks of their row stay,
        and the others leave in order of recency. None uses the scores of all blocks, which measures better.
    """

    def __init__(self, pool: int | None = None) -> None:
        if pool is not None and pool < 1:
            raise ConfigError(
                f"pool={pool}: expected a number of blocks >= 1, or None for all scores"
            )
        self.pool = pool

    def rank(self, stats: BlockStats) -> Rank:
        everything = stats.demand.access.everything
        if self.pool is None or everything is None:
            return stats.score
        cut = self._cut_of_domain(stats, everything)
        return np.where(stats.score >= cut, np.inf, stats.last_used)

    def _cut_of_domain(self, stats: BlockStats, everything: BlockScores) -> Rank:
        """For each resident, the score of the last block in its row's pool."""
        demand, pool = stats.demand, self.pool or 0
        cuts = np.full(int(everything.segments.max()) + 1, -np.inf, np.float32)
        for row, segment in enumerate(everything.segments.tolist()):
            units = everything.unit_of[row]
            scores = everything.unit_scores[row, units[units >= 0]]
            if len(scores) > pool:
                cuts[segment] = np.partition(scores, len(scores) - pool)[len(scores) - pool]
        per_domain = np.repeat(demand.domains, np.diff(demand.row_ptr))
        return cuts[np.minimum(per_domain, len(cuts) - 1)]
