"""The two halves of a round of k-means, over many independent sets at once.

Arguments are described once, in `tierstore.kernels`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tierstore.kernels.triton.launch import launch, padded, target, tensors, tiles

if TYPE_CHECKING:
    from tierstore.kernels.element import Array

TILE = 32
"""Points, or clusters, of a tile: products in float32 spill where 64 wide points meet as many."""


@triton.jit
def nearest_kernel(points, centroids, offsets, labels, n, clusters, DIM: tl.constexpr,
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
        offset = tl.load(offsets + row * clusters + cluster, mask=is_cluster, other=0.0)
        score = tl.dot(x, c, input_precision="ieee") + offset[None, :]
        # What is no number fits nothing, so that a label is always one of a cluster.
        score = tl.where(is_cluster[None, :] & (score == score), score, float("-inf"))
        top = tl.max(score, 1)
        # The first of equals stays, in a tile as between tiles.
        nearest = tl.where(top > best, first + tl.argmax(score, 1), nearest)
        best = tl.maximum(best, top)
    tl.store(labels + row * n + point, nearest.to(labels.dtype.element_ty), mask=point < n)


@triton.jit
def sums_kernel(points, labels, sums, sizes, n, clusters, DIM: tl.constexpr, WIDTH: tl.constexpr,
                TILE: tl.constexpr):  # fmt: skip
    """Sums as products with a membership matrix: in the same order every time, unlike atomics."""
    row = tl.program_id(0).to(tl.int64)
    cluster, axis = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, WIDTH)
    total = tl.zeros((TILE, WIDTH), tl.float32)
    size = tl.zeros((TILE,), tl.int32)
    for first in range(0, n, TILE):
        point = first + tl.arange(0, TILE)
        own = tl.load(labels + row * n + point, mask=point < n, other=-1)
        is_member = own[None, :] == cluster[:, None]
        x = tl.load(
            points + (row * n + point[:, None]) * DIM + axis[None, :],
            mask=(point[:, None] < n) & (axis[None, :] < DIM),
            other=0.0,
        )
        total = tl.dot(is_member.to(tl.float32), x, total, input_precision="ieee")
        size += tl.sum(is_member.to(tl.int32), 1)
    tl.store(
        sums + (row * clusters + cluster[:, None]) * DIM + axis[None, :],
        total,
        mask=(cluster[:, None] < clusters) & (axis[None, :] < DIM),
    )
    tl.store(sizes + row * clusters + cluster, size.to(tl.int64), mask=cluster < clusters)


def nearest_centroids(points: Array, centroids: Array, offsets: Array, out: Array) -> None:
    p, c, o = tensors(points, centroids, offsets)
    rows, n, dim = p.shape
    launch(
        nearest_kernel, (rows, tiles(n, TILE)), p.contiguous(), c.contiguous(), o.contiguous(),
        target(out, p.device), n, c.shape[1], DIM=dim, WIDTH=padded(dim), TILE=TILE,
    )  # fmt: skip


def cluster_sums(points: Array, labels: Array, sums: Array, sizes: Array) -> None:
    """An infinite point makes every sum of its row NaN."""
    p, own = tensors(points, labels)
    total, count = target(sums, p.device), target(sizes, p.device)
    rows, clusters, dim = total.shape
    launch(
        sums_kernel, (rows, tiles(clusters, TILE)), p.contiguous(), own.contiguous(), total, count,
        p.shape[1], clusters, DIM=dim, WIDTH=padded(dim), TILE=TILE,
    )  # fmt: skip
