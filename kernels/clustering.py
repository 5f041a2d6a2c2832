"""k-means over many independent sets at once, in plain torch (a few batched matrix products)."""

import torch


def kmeans(
    points: torch.Tensor, clusters: int, *, iterations: int = 10
) -> tuple[torch.Tensor, torch.Tensor]:
    """Spherical k-means with strided starts: assign by inner product with unit centroids.

    The mean of each set is taken out first, as RetroInfer does, so that direction and not the
    common offset of the keys decides. An empty cluster keeps its last centroid.

    Parameters
    ----------
    points: float [R, n, d], R independent sets.
    clusters: k, with 1 <= k <= n.

    Returns
    -------
    Assignment int64 [R, n], and the mean of each cluster's points, float32 [R, k, d].
    """
    points = points.float()
    rows, n, _ = points.shape
    centred = points - points.mean(1, keepdim=True)
    starts = torch.arange(clusters, device=points.device) * n // clusters
    centroids = torch.nn.functional.normalize(centred[:, starts], dim=-1)
    assignment = torch.zeros(rows, n, dtype=torch.int64, device=points.device)
    for _ in range(iterations):
        assignment = (centred @ centroids.transpose(1, 2)).argmax(-1)
        means = _means(centred, assignment, centroids)
        centroids = torch.nn.functional.normalize(means, dim=-1)
    assignment = (centred @ centroids.transpose(1, 2)).argmax(-1)
    means = _means(points, assignment, points[:, starts])
    return assignment, means


def _means(points: torch.Tensor, assignment: torch.Tensor, fallback: torch.Tensor) -> torch.Tensor:
    """The mean of each cluster; an empty one takes its `fallback`."""
    rows, _, dim = points.shape
    clusters = fallback.shape[1]
    sizes = torch.zeros(rows, clusters, device=points.device)
    sizes.scatter_add_(1, assignment, torch.ones_like(assignment, dtype=torch.float32))
    sums = torch.zeros(rows, clusters, dim, device=points.device)
    sums.scatter_add_(1, assignment[..., None].expand(-1, -1, dim), points)
    means = sums / sizes.clamp(min=1)[..., None]
    return torch.where(sizes[..., None] > 0, means, fallback.float())
