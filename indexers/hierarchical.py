"""KVDrive's index (K5): page means grouped by similarity, and the groups' centroids scored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tierstore.errors import ConfigError
from tierstore.indexers.scoring import IndexShape, NewTokens, Representatives, ScoringIndex
from tierstore.kernels.clustering import kmeans

if TYPE_CHECKING:
    from tierstore.indexers.rules import Rule


class HierarchicalIndex(ScoringIndex):
    """Centroids of page means; only they and the member lists stay, the means are for building.

    Parameters
    ----------
    tokens_per_centroid: context tokens for each centroid (the paper: 8,192 centroids at 120k
        tokens).
    segment_tokens: clustering is done in stretches of this many tokens, each on its own; tokens
        that come later are clustered among themselves as they come.
    iterations: rounds of k-means; on keys of the demo model as on synthetic ones, 10 find no more.
    """

    is_coarse = True

    def __init__(
        self,
        shape: IndexShape,
        *,
        tokens_per_centroid: float = 15.0,
        segment_tokens: int = 2048,
        iterations: int = 3,
        page_tokens: int | None = None,
        rule: Rule | None = None,
    ) -> None:
        if tokens_per_centroid < 1 or segment_tokens < shape.block_tokens or iterations < 1:
            raise ConfigError(
                f"tokens_per_centroid={tokens_per_centroid}, segment_tokens={segment_tokens}, "
                f"iterations={iterations}: expected at least 1, {shape.block_tokens} and 1"
            )
        super().__init__(shape, page_tokens=page_tokens, rule=rule)
        self.tokens_per_centroid = tokens_per_centroid
        self.segment_tokens = segment_tokens
        self.iterations = iterations

    def represent(self, new: NewTokens) -> Representatives:
        means = new.page_means(self.page_tokens)
        pages = means.shape[1]
        stretch = max(1, self.segment_tokens // self.page_tokens)
        whole = pages // stretch * stretch
        parts = [
            self._cluster(part, stretches)
            for part, stretches in (
                (means[:, :whole], whole // stretch),
                (means[:, whole:], int(whole < pages)),
            )
            if stretches
        ]
        centroids = torch.cat([centroids for centroids, _ in parts], 1)
        first = centroids.shape[1] - parts[-1][0].shape[1]
        unit_of = torch.cat([*(labels for _, labels in parts[:-1]), parts[-1][1] + first], 1)
        sizes = torch.zeros(centroids.shape[:2], device=centroids.device)
        sizes.scatter_add_(1, unit_of, torch.full(unit_of.shape, float(self.page_tokens)).to(sizes))
        return Representatives({"vectors": centroids}, sizes, unit_of)

    def _cluster(self, means: torch.Tensor, stretches: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Centroids, and the one of each mean, of so many equal stretches at once."""
        pages = means.shape[1] // stretches
        wanted = round(pages * self.page_tokens / self.tokens_per_centroid)
        each = min(max(1, wanted), pages)
        labels, centroids = kmeans(
            means, each * stretches, iterations=self.iterations, segments=stretches
        )
        return centroids, labels
