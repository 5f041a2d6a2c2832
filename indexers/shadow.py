"""ShadowKV's index: chunk means, and chunks that their mean does not stand for always selected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore.errors import ConfigError
from tierstore.indexers.columns import Column
from tierstore.indexers.rules import Rule
from tierstore.indexers.scoring import IndexShape, NewTokens, Representatives, ScoringIndex

if TYPE_CHECKING:
    from tierstore.kernels.element import Array


class ShadowKVIndex(ScoringIndex):
    """The mean key of each chunk (page; the paper: of 8), scored by the largest mass over heads.

    The outliers, chunks with a key that points farthest from their mean, are found at the build of
    a row and stay; every step selects their blocks beside its budget and scores none of them. Where
    a block has several chunks, an outlier keeps all of it. Chunks that come later are none of them:
    the system leaves them all attended, here they are ranked by their means.

    Parameters
    ----------
    outliers: how many chunks of a row; all if it has no more.
    """

    rule = Rule("max")
    keeps_blocks = True

    def __init__(
        self,
        shape: IndexShape,
        *,
        outliers: int = 48,
        page_tokens: int | None = None,
        rule: Rule | None = None,
    ) -> None:
        if outliers < 0:
            raise ConfigError(f"outliers={outliers}: expected a number of chunks, 0 for none")
        super().__init__(shape, page_tokens=page_tokens, rule=rule)
        self.outliers = outliers

    def columns(self) -> dict[str, Column]:
        return {**super().columns(), "scored_tokens": Column("unit", (), np.float32)}

    @property
    def sizes(self) -> Array | None:
        return self.data["scored_tokens"]

    def represent(self, new: NewTokens) -> Representatives:
        pages = new.pages(self.page_tokens).float()
        means = new.page_means(self.page_tokens)
        kept = torch.zeros(means.shape[:2], dtype=torch.bool, device=means.device)
        if new.first_unit == 0:
            cosines = torch.cosine_similarity(pages, means[:, :, None], dim=-1).amin(2)
            found = cosines.topk(min(self.outliers, means.shape[1]), largest=False).indices
            kept.scatter_(1, found, value=True)
        kept = kept.unflatten(1, (-1, self.pages_per_block)).any(2)
        tokens = self.page_tokens * (~kept).float().repeat_interleave(self.pages_per_block, 1)
        return Representatives({"vectors": means, "scored_tokens": tokens}, kept=kept)
