"""Each block is represented by the mean of its keys (as ShadowKV's landmarks are)."""

import torch

from tierstore.indexers.scoring import Representatives, ScoringIndex
from tierstore.interfaces import IndexContext


class ChunkMeanIndex(ScoringIndex):
    """One mean key per block. ShadowKV takes the largest mass over heads, not the sum."""

    aggregate = "max"

    def represent(self, keys: torch.Tensor, context: IndexContext) -> Representatives:
        pages = keys.unflatten(1, (-1, self.shape.block_tokens))
        means = pages.float().mean(2)
        return Representatives(means, torch.full(means.shape[:2], float(self.shape.block_tokens)))
