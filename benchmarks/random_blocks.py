"""The floor under every index: blocks are selected without a look at their keys."""

import torch

from tierstore.indexers import NewTokens, Representatives, ScoringIndex


class RandomBlocks(ScoringIndex):
    """Scores each block by a random vector in place of its keys.

    So selections change with the query and overlap from step to step, as those of other indexes do.
    """

    def represent(self, new: NewTokens) -> Representatives:
        rows, tokens, dim = new.keys.shape
        generator = torch.Generator().manual_seed(new.context.first_block)
        vectors = torch.randn(rows, tokens // self.page_tokens, dim, generator=generator)
        return Representatives({"vectors": vectors})
