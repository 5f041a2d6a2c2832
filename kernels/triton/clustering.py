"""The two halves of a round of k-means, over many independent sets at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tierstore.kernels.triton.launch import launch, padded, tiles

TILE = 64
"""Points, or clusters, of a tile."""


@triton.jit
def nearest_kernel(points, centroids, offsets, assignment, n, clusters, DIM: tl.constexpr,
                   WIDTH: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    point, axis = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, WIDTH)
    x = tl.load(
        points + (row * n + point[:, None]) * DIM + axis[None, :],
        mask=(point[:, None] < n) & (axis[None, :] < DIM),
        other=0.0,
    )
    best = tl.full((TILE,), float("-inf"), tl.float32)
    nearest = tl.zeros((TILE,), tl.int32)
    for first in range(0, clusters, TILE):
        cluster = first + tl.arange(0, TILE)
        is_cluster = cluster < clusters
        c = tl.load(
            centroids + (row * clusters + cluster[None, :]) * DIM + axis[:, None],
            mask=is_cluster[None, :] & (axis[:, None] < DIM),
            other=0.0,
        )
        offset = tl.load(offsets + row * clusters + cluster, mask=is_cluster, other=float("inf"))
        score = tl.dot(x, c, input_precision="ieee") - offset[None, :]
        top = tl.max(score, 1)
        # The first of equals stays, in a tile as between tiles.
        nearest = tl.where(top > best, first + tl.argmax(score, 1), nearest)
        best = tl.maximum(best, top)
    tl.store(assignment + row * n + point, nearest.to(tl.int64), mask=point < n)


@triton.jit
def means_kernel(points, assignment, fallback, means, n, clusters, DIM: tl.constexpr,
                 WIDTH: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Sums as products with a membership matrix: in the same order every time, unlike atomics."""
    row = tl.program_id(0).to(tl.int64)
    cluster, axis = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, WIDTH)
    sums = tl.zeros((TILE, WIDTH), tl.float32)
    size = tl.zeros((TILE,), tl.float32)
    for first in range(0, n, TILE):
        point = first + tl.arange(0, TILE)
        own = tl.load(assignment + row * n + point, mask=point < n, other=-1)
        member = tl.where(own[None, :] == cluster[:, None], 1.0, 0.0)
        x = tl.load(
            points + (row * n + point[:, None]) * DIM + axis[None, :],
            mask=(point[:, None] < n) & (axis[None, :] < DIM),
            other=0.0,
        )
        sums = tl.dot(member, x, sums, input_precision="ieee")
        size += tl.sum(member, 1)
    place = (row * clusters + cluster[:, None]) * DIM + axis[None, :]
    inside = (cluster[:, None] < clusters) & (axis[None, :] < DIM)
    last = tl.load(fallback + place, mask=inside, other=0.0)
    mean = tl.where(size[:, None] > 0, sums / tl.maximum(size, 1.0)[:, None], last)
    tl.store(means + place, mean, mask=inside)


def nearest(
    points: torch.Tensor, centroids: torch.Tensor, *, euclidean: bool = False
) -> torch.Tensor:
    """The centroid of each point, int64 [R, n]: by inner product, or by distance if `euclidean`.

    points: float32 [R, n, d]. centroids: float32 [R, k, d]. Of equals the first is taken.
    """
    points, centroids = points.contiguous(), centroids.contiguous()
    rows, n, dim = points.shape
    offsets = (
        centroids.square().sum(-1) / 2 if euclidean else centroids.new_zeros(centroids.shape[:2])
    )
    assignment = points.new_empty((rows, n), dtype=torch.int64)
    launch(
        nearest_kernel, (rows, tiles(n, TILE)), points, centroids, offsets, assignment, n,
        centroids.shape[1], DIM=dim, WIDTH=padded(dim), TILE=TILE,
    )  # fmt: skip
    return assignment


def means(points: torch.Tensor, assignment: torch.Tensor, fallback: torch.Tensor) -> torch.Tensor:
    """The mean of each cluster's points, float32 [R, k, d]; an empty one takes its `fallback`.

    points: float32 [R, n, d]. assignment: int64 [R, n]. fallback: float32 [R, k, d].
    """
    points, assignment, fallback = (
        tensor.contiguous() for tensor in (points, assignment, fallback)
    )
    rows, clusters, dim = fallback.shape
    result = torch.empty_like(fallback)
    launch(
        means_kernel, (rows, tiles(clusters, TILE)), points, assignment, fallback, result,
        points.shape[1], clusters, DIM=dim, WIDTH=padded(dim), TILE=TILE,
    )  # fmt: skip
    return result
