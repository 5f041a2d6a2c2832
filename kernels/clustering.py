"""k-means over many independent sets at once."""

from __future__ import annotations

import torch

from tierstore.kernels import coding
from tierstore.kernels.element import to_array

METRICS = "inner", "cosine", "l2"
STARTS = "strided", "random"
_SMALL, _LARGE = 1e-12, 1e12
"""Between these, squares and their sums are far from the ends of float32."""


def kmeans(
    points: torch.Tensor,
    clusters: int,
    *,
    iterations: int = 10,
    metric: str = "inner",
    init: str = "strided",
    segments: int = 1,
    centre: bool = True,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lloyd's algorithm. An empty cluster keeps its last centroid; it ends early when all stays.

    Parameters
    ----------
    points: float [R, n, d], R independent sets.
    clusters: k, with 1 <= k <= n.
    metric: assign to the centroid of largest inner product, scaled to length 1 in each round but
        the first, when it is a point (``"inner"``, RetroInfer), the same with points scaled to
        length 1 as well (``"cosine"``, ClusterKV), or to the nearest one (``"l2"``, PQCache).
    init: points that the clusters start with: ``"strided"``, each the middle of a k-th, or
        ``"random"``, always the same for the same n, and the same ones in each set.
    segments: stretches of equal length, clustered separately into equally many clusters; a divisor
        of n and k.
    centre: take the mean of each set out first, as RetroInfer does, so that direction and not the
        common offset of the keys decides; ``"l2"`` does not care.
    weights: float32 [R, n] > 0, what each point counts in the mean of its cluster; None for alike.

    Returns
    -------
    Assignment int64 [R, n], and the mean of each cluster's points as given, float32 [R, k, d].
    """
    rows, n, _ = points.shape
    _check(n, clusters, metric, init, segments)
    if segments > 1:
        pieces = points.unflatten(1, (segments, -1)).flatten(0, 1)
        labels, means = kmeans(
            pieces, clusters // segments, iterations=iterations, metric=metric, init=init,
            centre=centre, weights=None if weights is None else weights.reshape(pieces.shape[:2]),
        )  # fmt: skip
        offsets = torch.arange(segments, device=points.device)[:, None] * (clusters // segments)
        labels = (labels.unflatten(0, (rows, segments)) + offsets).flatten(1)
        return labels, means.unflatten(0, (rows, segments)).flatten(1, 2)
    points = points.float().contiguous()
    starts = _starts(n, clusters, init).to(points.device)
    compared = _compared(points, metric, centre)
    centroids = compared[:, starts]
    if metric == "inner":
        assignment = nearest(compared, centroids, centroids.new_zeros(centroids.shape[:2]))
    else:
        assignment = _assign(compared, centroids, metric)
    summed = _weighed(compared, weights)
    for _ in range(iterations):
        centroids = cluster_means(summed, assignment, centroids)
        before, assignment = assignment, _assign(compared, centroids, metric)
        if torch.equal(before, assignment):
            break
    if compared is not points:
        summed = _weighed(points, weights)
    return assignment, cluster_means(summed, assignment, points[:, starts])


def _check(n: int, clusters: int, metric: str, init: str, segments: int) -> None:
    if metric not in METRICS or init not in STARTS:
        raise ValueError(
            f"metric={metric!r}, init={init!r}: expected one of {', '.join(METRICS)}, "
            f"and one of {', '.join(STARTS)}"
        )
    if not 1 <= clusters <= n:
        raise ValueError(f"clusters={clusters}: expected 1 to the number of points, {n}")
    if segments < 1 or n % segments or clusters % segments:
        raise ValueError(
            f"segments={segments}: expected a divisor of the {n} points and {clusters} clusters"
        )


def _starts(n: int, clusters: int, init: str) -> torch.Tensor:
    if init == "random":
        return torch.randperm(n, generator=torch.Generator().manual_seed(n))[:clusters]
    return (2 * torch.arange(clusters) + 1) * n // (2 * clusters)


def _compared(points: torch.Tensor, metric: str, centre: bool) -> torch.Tensor:
    if metric == "l2":
        points = in_range(points)
    if centre:
        points = points - points.mean(1, keepdim=True)
    return torch.nn.functional.normalize(points, dim=-1) if metric == "cosine" else points


def in_range(points: torch.Tensor) -> torch.Tensor:
    """Points [R, n, d], or each set over its largest number: sums of squares are then finite.

    Points that need no scaling are returned as they are.
    """
    peak = torch.maximum(points.amax((1, 2), keepdim=True), -points.amin((1, 2), keepdim=True))
    if bool(((peak > _SMALL) & (peak < _LARGE)).all()):
        return points
    return points / peak.clamp(min=torch.finfo(torch.float32).tiny)


def _assign(points: torch.Tensor, centroids: torch.Tensor, metric: str) -> torch.Tensor:
    if metric == "l2":
        return nearest(points, centroids, centroids.square().sum(-1) / -2)
    centroids = torch.nn.functional.normalize(centroids, dim=-1)
    return nearest(points, centroids, centroids.new_zeros(centroids.shape[:2]))


def nearest(points: torch.Tensor, centroids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """int64 [R, n] as `tierstore.kernels.nearest_centroids` says, for float32 tensors."""
    found = torch.empty(points.shape[:2], dtype=torch.int64, device=points.device)
    p, c, o = (to_array(tensor.contiguous()) for tensor in (points, centroids, offsets))
    coding.nearest_centroids(p, c, o, to_array(found))
    return found


def cluster_means(
    points: torch.Tensor, assignment: torch.Tensor, fallback: torch.Tensor
) -> torch.Tensor:
    """The mean [R, k, d] of each cluster's points; an empty one takes its `fallback`.

    points: [R, n, d], or weighed ones, [R, n, d + 1], whose last coordinate is their weight.
    """
    sums = torch.empty((*fallback.shape[:2], points.shape[2]), device=points.device)
    sizes = torch.empty(fallback.shape[:2], dtype=torch.int64, device=points.device)
    p, labels = to_array(points.contiguous()), to_array(assignment.contiguous())
    coding.cluster_sums(p, labels, to_array(sums), to_array(sizes))
    dim, size = fallback.shape[2], sizes[..., None]
    means = sums[..., :dim] / (sums[..., dim:] if points.shape[2] > dim else size)
    return torch.where(size > 0, means, fallback.float())


def _weighed(points: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Points times their weights and, as one coordinate more, the weights."""
    if weights is None:
        return points
    return torch.cat([points * weights[..., None], weights[..., None]], -1)
