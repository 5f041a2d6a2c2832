"""Least recently used."""

from tierstore.policies.ranked import BlockStats, Rank, RankedPolicy


class LRU(RankedPolicy):
    """Evicts the block whose last selection is longest ago; among equals, the one scored lowest."""

    def rank(self, stats: BlockStats) -> Rank:
        return stats.last_used

    def tie(self, stats: BlockStats) -> Rank:
        return stats.score
