"""k-means over many independent sets at once: narrow points by a kernel, wide ones by torch."""

from __future__ import annotations

import torch

from tierstore.kernels import coding

METRICS = "inner", "cosine", "l2"
STARTS = "strided", "random"
_PRODUCTS = 1 << 24
"""Similarities that are held at once."""
_SMALL, _LARGE = 1e-12, 1e12
"""Between these, squares and their sums are far from the ends of float32."""
_NARROW = 16
"""Points of up to so many dimensions are compared by the kernel: 5 times as fast as a product of
matrices, whose result is then read again, at 4 (24 x 6144 points, 64 clusters, one core)."""


def kmeans(
    points: torch.Tensor,
    clusters: int,
    *,
    iterations: int = 10,
    metric: str = "inner",
    init: str = "strided",
    segments: int = 1,
    centre: bool = True,
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
            centre=centre,
        )  # fmt: skip
        offsets = torch.arange(segments, device=points.device)[:, None] * (clusters // segments)
        labels = (labels.unflatten(0, (rows, segments)) + offsets).flatten(1)
        return labels, means.unflatten(0, (rows, segments)).flatten(1, 2)
    points = points.float()
    starts = _starts(n, clusters, init).to(points.device)
    compared = _compared(points, metric, centre)
    centroids = compared[:, starts]
    if metric == "inner":
        assignment = nearest(compared, centroids, centroids.new_zeros(centroids.shape[:2]))
    else:
        assignment = _assign(compared, centroids, metric)
    for _ in range(iterations):
        centroids = cluster_means(compared, assignment, centroids)
        before, assignment = assignment, _assign(compared, centroids, metric)
        if torch.equal(before, assignment):
            break
    return assignment, cluster_means(points, assignment, points[:, starts])


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
    if _is_for_kernel(points):
        found = torch.empty(points.shape[:2], dtype=torch.int64)
        p, c, o = (a.contiguous().numpy() for a in (points, centroids, offsets))
        coding.nearest_centroids(p, c, o, found.numpy())
        return found
    rows, clusters = offsets.shape
    labels = [
        # argmax() took twice as long as max() on a CPU (torch 2.13, 3 x 1733 x 462, November 2026).
        torch.baddbmm(offsets[:, None], part, centroids.transpose(1, 2)).max(-1).indices
        for part in points.split(max(1, _PRODUCTS // (rows * clusters)), dim=1)
    ]
    return torch.cat(labels, 1)


def _is_for_kernel(points: torch.Tensor) -> bool:
    return points.device.type == "cpu" and points.shape[2] <= _NARROW


def cluster_means(
    points: torch.Tensor, assignment: torch.Tensor, fallback: torch.Tensor
) -> torch.Tensor:
    """The mean [R, k, d] of each cluster's points; an empty one takes its `fallback`."""
    rows, clusters, dim = fallback.shape
    if _is_for_kernel(points):
        sums, sizes = (
            torch.empty(rows, clusters, dim),
            torch.empty((rows, clusters), dtype=torch.int64),
        )
        arrays = points.contiguous().numpy(), assignment.numpy(), sums.numpy(), sizes.numpy()
        coding.cluster_sums(*arrays)
    else:
        flat = (assignment + torch.arange(rows, device=points.device)[:, None] * clusters).flatten()
        sizes = torch.bincount(flat, minlength=rows * clusters).view(rows, clusters)
        sums = points.new_zeros(rows, clusters, dim)
        sums.view(-1, dim).index_add_(0, flat, points.reshape(-1, dim))
    sizes = sizes[..., None]
    means = sums / sizes.clamp(min=1)
    return torch.where(sizes > 0, means, fallback.float())
