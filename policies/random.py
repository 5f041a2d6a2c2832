"""Random eviction: the floor that every other policy must beat."""

import numpy as np

from tierstore.arguments import check_whole
from tierstore.policies.ranked import BlockStats, Rank, RankedPolicy


class Random(RankedPolicy):
    """Evicts any block, the same ones for the same seed, from 0 on, and history."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = check_whole("seed", seed, 0)

    def rank(self, stats: BlockStats) -> Rank:
        return np.random.default_rng((self.seed, stats.step)).random(len(stats.handles))
