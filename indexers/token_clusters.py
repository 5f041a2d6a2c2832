"""RetroInfer's index, and ClusterKV's: tokens grouped by their keys, the groups' means scored."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore import kernels
from tierstore.errors import ConfigError
from tierstore.indexers.columns import Column
from tierstore.indexers.rules import Rule
from tierstore.indexers.scoring import IndexShape, NewTokens, Representatives, ScoringIndex
from tierstore.kernels.clustering import METRICS, STARTS, cluster_means, kmeans, nearest
from tierstore.kernels.element import stored_dtype
from tierstore.kernels.zones import untaken

if TYPE_CHECKING:
    import numpy.typing as npt

    from tierstore.interfaces import Ids, Pointers, Selection

_MULTIPLE = 8
"""Clusters come in multiples of it, as RetroInfer's do."""


class TokenClustersIndex(ScoringIndex):
    """Clusters of single tokens, by default as RetroInfer builds and scores them.

    k-means runs in segments; then, with `is_global`, every token joins the nearest cluster of all.
    Tokens that come later are clustered among themselves, at best `refresh` at a time. Blocks of
    one token are selected cluster by cluster, the last one cut; larger blocks by the scores of
    their tokens.

    ClusterKV: ``tokens_per_cluster=80, new_tokens_per_cluster=40, refresh=320, metric="cosine",
    init="random", iterations=20, segment_tokens=None, is_global=False, rule=Rule("per_query",
    softmax=False)``.

    Parameters
    ----------
    tokens_per_cluster, new_tokens_per_cluster: at the build, and of tokens that come later.
    segment_tokens: tokens of a segment, about; None for one segment.
    iterations: rounds of k-means, each an assignment and new means; one more assignment ends it.
    metric, init: of `tierstore.kernels.clustering.kmeans`.
    is_global: whether a last assignment is over the clusters of all segments.
    refresh: tokens that should gather before they are clustered.
    value_dim: elements of a value, whose means are kept for the estimated zone; 0 keeps none.
        RetroInfer keeps sums, which are these times the sizes; means stay right when a cluster
        loses tokens, and in the range of 16 bits.
    """

    is_coarse = True
    rule = Rule(by_size=False)

    def __init__(
        self,
        shape: IndexShape,
        *,
        tokens_per_cluster: float = 16,
        new_tokens_per_cluster: float = 16,
        segment_tokens: int | None = 8192,
        iterations: int = 9,
        metric: str = "inner",
        init: str = "strided",
        is_global: bool = True,
        refresh: int = 1024,
        value_dim: int = 0,
        rule: Rule | None = None,
    ) -> None:
        if min(tokens_per_cluster, new_tokens_per_cluster, iterations) < 1:
            raise ConfigError(
                f"tokens_per_cluster={tokens_per_cluster}, new_tokens_per_cluster="
                f"{new_tokens_per_cluster}, iterations={iterations}: expected at least 1"
            )
        if metric not in METRICS or init not in STARTS:
            raise ConfigError(
                f"metric={metric!r}, init={init!r}: expected one of {', '.join(METRICS)}, and one "
                f"of {', '.join(STARTS)}"
            )
        if refresh < 0 or value_dim < 0 or (segment_tokens is not None and segment_tokens < 1):
            raise ConfigError(
                f"refresh={refresh}, value_dim={value_dim}, segment_tokens={segment_tokens}: "
                "expected at least 0, 0 and 1, or segment_tokens=None"
            )
        self.value_dim = value_dim
        super().__init__(shape, page_tokens=1, rule=rule)
        self.tokens_per_cluster = tokens_per_cluster
        self.new_tokens_per_cluster = new_tokens_per_cluster
        self.segment_tokens = segment_tokens
        self.iterations = iterations
        self.metric, self.init = metric, init
        self.is_global = is_global
        self.refresh = refresh

    @property
    def refresh_tokens(self) -> int:
        return self.refresh

    def columns(self) -> dict[str, Column]:
        columns = super().columns()
        if self.value_dim:
            columns["values"] = Column("unit", (self.value_dim,), stored_dtype(self.shape.dtype))
        return columns

    def represent(self, new: NewTokens) -> Representatives:
        keys = new.keys.float()
        unit_of, vectors = self._cluster(keys, is_build=new.first_unit == 0)
        sizes = torch.zeros(vectors.shape[:2], device=keys.device)
        sizes.scatter_add_(1, unit_of, torch.ones_like(unit_of, dtype=sizes.dtype))
        units = {"vectors": vectors}
        if self.value_dim:
            none = torch.zeros(*sizes.shape, self.value_dim, device=keys.device)
            units["values"] = cluster_means(new.values.float(), unit_of, none)
        return Representatives(units, sizes, unit_of)

    def _cluster(self, keys: torch.Tensor, *, is_build: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Assignment [R, n], and mean keys [R, k, d]."""
        n, per_cluster = keys.shape[1], self.new_tokens_per_cluster
        segments = 1
        if is_build:
            per_cluster = self.tokens_per_cluster
            if self.segment_tokens is not None:
                segments = max(1, min(n, round(n / self.segment_tokens)))
        multiple = math.lcm(_MULTIPLE, segments)
        clusters = round(n / per_cluster / multiple) * multiple or round(n / per_cluster)
        body = n - n % segments
        if not (is_build and self.is_global):
            segments, body = 1, n
        clusters = min(max(1, clusters), body)
        centred = keys - self._centre(keys)
        assignment, means = kmeans(
            centred[:, :body], clusters, metric=self.metric, init=self.init, centre=False,
            # Its first assignment, to the starts, is a round of its own; so is the global one.
            iterations=self.iterations - self.is_global,
            segments=segments if clusters % segments == 0 else 1,
        )  # fmt: skip
        if self.is_global:
            directions = torch.nn.functional.normalize(means, dim=-1)
            points = centred
            if self.metric == "cosine":
                points = torch.nn.functional.normalize(centred, dim=-1)
            assignment = nearest(points, directions, directions.new_zeros(directions.shape[:2]))
        return assignment, cluster_means(keys, assignment, means)

    def _centre(self, keys: torch.Tensor) -> torch.Tensor:
        """What is taken out of keys before directions are compared: nothing from ClusterKV's."""
        if self.metric == "cosine":
            return keys.new_zeros(1)
        return keys.double().mean(1, keepdim=True).float()

    def estimation_zone(self, selection: Selection, clusters: int) -> tuple[Pointers, Ids]:
        """The next best clusters of each row, after those that the last selection took from.

        For `tierstore.kernels.attend_clusters`: int64 [R + 1] and int32 [n], at most `clusters`
        for each row. ConfigError where a block has several tokens: clusters are then selected in
        part, and what is left of one would count with what was taken.
        """
        if not self._takes_whole_units or not self.value_dim:
            raise ConfigError(
                f"block_tokens={self.shape.block_tokens}, value_dim={self.value_dim}: the "
                "estimated zone needs blocks of 1 token, and value_dim= of the model"
            )
        rows, width = len(self.segments), self.data.places("unit")
        array = self._scratch.array
        everything = selection.everything
        assert everything is not None
        scores = array("zone scores", (rows, width), np.float32)
        wanted: Ids = array("zone sizes", (rows,), np.int32)
        total = untaken(
            everything.unit_scores, self.units, self.data["unit_of"], selection.row_ptr,
            selection.ids, clusters, scores, wanted,
        )  # fmt: skip
        one_each, identity = self._identity(width)
        row_ptr: Pointers = array("zone pointers", (rows + 1,), np.int64)
        ids: Ids = array("zone ids", (total,), np.int32)
        picked = array("zone picked", ids.shape, np.float32)
        order = array("order", (max(1, width),), np.int32)
        kernels.select_blocks(
            scores, self.units, one_each, identity, identity, wanted, order, row_ptr, ids, picked
        )
        return row_ptr, ids

    def _kind(self) -> npt.NDArray[np.str_]:
        return np.array(f"{super()._kind()}, values of {self.value_dim}")
