"""ArkVale's index: a box around the middle of each page, as wide as its keys are on average."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore import kernels
from tierstore.indexers.columns import Column
from tierstore.indexers.rules import Rule
from tierstore.indexers.scoring import NewTokens, Representatives, ScoringIndex
from tierstore.kernels.element import stored_dtype

if TYPE_CHECKING:
    from tierstore.kernels.element import Array


class StatisticalBoxIndex(ScoringIndex):
    """Boxes ``c - r .. c + r`` around pages (ArkVale; pages of 32), scored as Quest scores its own.

    ``c`` is the middle between a channel's extremes, ``r`` the mean distance of the page's keys
    from it. Keys may lie outside, so the score is no bound. All heads of a sequence select alike,
    by the mean of their scores.
    """

    rule = Rule("mean_all", softmax=False)

    def columns(self) -> dict[str, Column]:
        side = Column("unit", (self.shape.dim,), stored_dtype(self.shape.dtype))
        return {"high": side, "low": side}

    def represent(self, new: NewTokens) -> Representatives:
        high, low = new.page_bounds(self.page_tokens)
        # Halved first: the sum of two huge keys overflows.
        centre = high.float() / 2 + low.float() / 2
        radius = (new.pages(self.page_tokens).float() - centre[:, :, None]).abs().mean(2)
        return Representatives({"high": centre + radius, "low": centre - radius})

    def logits(self, query: Array, out: Array) -> None:
        high, low = self.data["high"], self.data["low"]
        kernels.box_logits(query, high, low, self.units, self.shape.scale, out)
