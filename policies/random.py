"""Random eviction: the floor that every other policy must beat."""

import numpy as np

from tierstore.policies.ranked import BlockStats, Rank, RankedPolicy


class Random(RankedPolicy):
    """Evicts any block, the same ones for the same seed and history."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def rank(self, stats: BlockStats) -> Rank:
        return np.random.default_rng((self.seed, stats.step)).random(len(stats.handles))
