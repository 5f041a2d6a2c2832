"""Every key is its own representative: the oracle that other indexes are measured against."""

import torch

from tierstore.indexers.scoring import IndexShape, Representatives, ScoringIndex
from tierstore.interfaces import IndexContext


class ExactIndex(ScoringIndex):
    """Ranks blocks by their true attention mass, summed over tokens and query heads."""

    def __init__(self, shape: IndexShape) -> None:
        super().__init__(shape)
        self.units_per_block = shape.block_tokens

    def represent(self, keys: torch.Tensor, context: IndexContext) -> Representatives:
        return Representatives(keys, torch.ones(keys.shape[:2]))
