"""The floor under every index: blocks are selected without a look at their keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tierstore.indexers import Representatives, ScoringIndex

if TYPE_CHECKING:
    from tierstore.interfaces import IndexContext


class RandomBlocks(ScoringIndex):
    """Scores each block by a random vector in place of its keys.

    So selections change with the query and overlap from step to step, as those of other indexes do.
    """

    def represent(self, keys: torch.Tensor, context: IndexContext) -> Representatives:
        rows, tokens, dim = keys.shape
        size = self.shape.block_tokens
        generator = torch.Generator().manual_seed(context.first_block)
        vectors = torch.randn(rows, tokens // size, dim, generator=generator)
        return Representatives(vectors, torch.full(vectors.shape[:2], float(size)))
