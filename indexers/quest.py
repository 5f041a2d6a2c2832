"""Quest's index: the extremes of each page's keys, and what any key between them may score."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore import kernels
from tierstore.indexers.columns import Column
from tierstore.indexers.rules import Rule
from tierstore.indexers.scoring import NewTokens, Representatives, ScoringIndex
from tierstore.kernels.element import stored_dtype

if TYPE_CHECKING:
    from tierstore.interfaces import Scores
    from tierstore.kernels.element import Array


class QuestIndex(ScoringIndex):
    """The largest and the smallest key of each page, channel by channel (Quest; pages of 16).

    A page scores ``sum_i max(q_i * max_i, q_i * min_i)``, which no key of it exceeds. Every query
    head ranks the pages for itself. The last page comes first and counts, and no step selects fewer
    than three.
    """

    rule = Rule("per_query", softmax=False)

    @property
    def least(self) -> int:
        return 3

    def columns(self) -> dict[str, Column]:
        extreme = Column("unit", (self.shape.dim,), stored_dtype(self.shape.dtype))
        return {"high": extreme, "low": extreme}

    def represent(self, new: NewTokens) -> Representatives:
        high, low = new.page_bounds(self.page_tokens)
        return Representatives({"high": high, "low": low})

    def logits(self, query: Array, out: Array) -> None:
        high, low = self.data["high"], self.data["low"]
        kernels.box_logits(query, high, low, self.units, self.shape.scale, out)

    def _block_scores(self, unit_scores: Scores) -> Scores:
        scores = super()._block_scores(unit_scores)
        if scores.shape[1]:
            live = np.arange(scores.shape[1]) < self.blocks[:, None]
            best = scores.max(1, where=live, initial=-3e38)
            scores[np.arange(len(scores)), np.maximum(self.blocks, 1) - 1] = best + 1
        return scores
