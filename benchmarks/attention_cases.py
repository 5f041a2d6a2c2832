"""Cases of the kernels that attend, cluster and move blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore import kernels
from tierstore.benchmarks import kernel_bounds as bounds
from tierstore.benchmarks.kernel_cases import (
    STRIP,
    Case,
    Picked,
    Sizes,
    attention,
    elements,
    full,
    singles,
)
from tierstore.benchmarks.scoring_cases import BITS, HASH_BITS, PARTS, TABLES, WIDTH
from tierstore.kernels import estimate_reference, reference
from tierstore.kernels.element import to_tensor
from tierstore.kernels.rotary import rotate
from tierstore.tiers.memory import copy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RANK, CHUNK = 160, 8
TOKENS_PER_CLUSTER, ESTIMATED = 16, 0.23
"""RetroInfer's clusters, and the share of them that it estimates."""


def attend_blocks(sizes: Sizes) -> Case:
    """Blocks anywhere in a tier, and the strip; torch gathers and calls its own attention."""
    picked = Picked(sizes, sizes.block_tokens)
    strip = elements(sizes.rows, STRIP, sizes.dim)
    length = full(sizes, STRIP)
    query, local = to_tensor(picked.query), to_tensor(strip)

    def plain() -> torch.Tensor:
        keys, values = picked.gathered()
        return attention(query, torch.cat([keys, local], 1), torch.cat([values, local], 1))

    return Case(
        lambda: kernels.attend_blocks(
            picked.query, picked.pool, picked.shape, picked.row_ptr, picked.slots, picked.valid,
            strip, strip, length, sizes.scale, picked.out, picked.lse, picked.weights,
        ),
        plain,
        (picked.moves, bounds.stream(2 * strip.nbytes)),
        picked.softmax_work(sizes.picked + STRIP),
    )  # fmt: skip


def attend_low_rank(sizes: Sizes) -> Case:
    """Keys of rank 160 in chunks of 8, all channels turned, as ShadowKV has them."""
    picked = Picked(sizes, CHUNK)
    left = elements(1, sizes.tokens, RANK)
    right = elements(sizes.rows, RANK, sizes.dim)
    angles = singles(sizes.tokens, sizes.dim // 2)
    cos, sin = np.cos(angles), np.sin(angles)
    chosen = torch.from_numpy(picked.blocks).long().view(sizes.rows, -1, 1)
    tokens = (chosen * CHUNK + torch.arange(CHUNK)).flatten(1)
    query, factor, c, s = (to_tensor(a) for a in (picked.query, right, cos, sin))

    def plain() -> torch.Tensor:
        keys = torch.bmm(to_tensor(left)[0, tokens], factor)
        keys = rotate(keys, c[tokens].bfloat16(), s[tokens].bfloat16())
        return attention(query, keys, picked.gathered()[1])

    count, ids = sizes.rows * sizes.picked, picked.blocks
    values = picked.pool[:, : CHUNK * sizes.dim].copy()
    return Case(
        lambda: kernels.attend_low_rank(
            picked.query, left, right, cos, sin, picked.pool, picked.shape, picked.row_ptr,
            picked.blocks, picked.slots, picked.valid, sizes.scale, picked.out, picked.lse,
            picked.weights,
        ),
        plain,
        (bounds.blocks(values, picked.slots), bounds.blocks(left[0].reshape(-1, CHUNK * RANK), ids),
         bounds.stream(2 * cos[: sizes.picked].nbytes)),
        (
            bounds.products(count * RANK * sizes.dim, RANK),
            *picked.softmax_work(sizes.picked),
        ),
    )  # fmt: skip


def attend_clusters(sizes: Sizes) -> Case:
    """The estimated zone of RetroInfer."""
    units = sizes.tokens // TOKENS_PER_CLUSTER
    chosen = int(units * ESTIMATED)
    query = elements(sizes.rows, sizes.group, sizes.dim)
    centroids = elements(sizes.rows, units, sizes.dim)
    values = elements(sizes.rows, units, sizes.dim)
    counts = np.full((sizes.rows, units), float(TOKENS_PER_CLUSTER), np.float32)
    random = np.random.default_rng(0)
    ids = np.concatenate([random.permutation(units)[:chosen] for _ in range(sizes.rows)])
    ids, row_ptr = ids.astype(np.int32), np.arange(sizes.rows + 1, dtype=np.int64) * chosen
    places = ids + np.repeat(np.arange(sizes.rows, dtype=np.int32) * units, chosen)
    out = np.zeros((sizes.rows, sizes.group, sizes.dim), np.float32)
    lse = np.zeros((sizes.rows, sizes.group), np.float32)
    arguments = (query, centroids, values, counts, row_ptr, ids, sizes.scale, out, lse)
    pairs = sizes.rows * sizes.group * chosen
    return Case(
        lambda: kernels.attend_clusters(*arguments),
        lambda: estimate_reference.attend_clusters(*arguments, merge=False),
        tuple(bounds.blocks(a.reshape(-1, sizes.dim), places) for a in (centroids, values)),
        (
            bounds.multiply_adds(2 * pairs * sizes.dim, sizes.group),
            bounds.exponentials(pairs),
        ),
    )


def attend_sampled(sizes: Sizes) -> Case:
    """MagicPIG's sample: what each head met in two tables or more, a quarter of the blocks."""
    picked = Picked(sizes, sizes.block_tokens)
    random = np.random.default_rng(0)
    shape = (sizes.rows, sizes.group, sizes.tokens)
    met = (random.random(shape, np.float32) < 0.25) * np.float32(2)
    centre = singles(sizes.rows, sizes.dim)
    arguments = (
        picked.query, picked.pool, picked.shape, picked.row_ptr, picked.slots, picked.valid,
        picked.blocks, met, centre, HASH_BITS, TABLES, sizes.scale, picked.out, picked.lse,
    )  # fmt: skip
    few = max(1, len(picked.slots) // 64)
    ends = np.array([0, few], np.int64)
    return Case(
        lambda: kernels.attend_sampled(*arguments),
        lambda: estimate_reference.attend_sampled(*arguments, merge=False),
        (picked.moves,),
        (
            bounds.in_cache(
                lambda: kernels.attend_sampled(
                    picked.query[:1], picked.pool, picked.shape, ends, picked.slots[:few],
                    picked.valid[:few], picked.blocks[:few], met, centre, HASH_BITS, TABLES,
                    sizes.scale, picked.out, picked.lse,
                ),
                len(picked.slots) / few,
            ),
        ),
    )  # fmt: skip


def nearest_centroids(sizes: Sizes) -> Case:
    """A round of k-means over all tokens, for nine codes of six bits."""
    sets, clusters = sizes.rows * PARTS, 1 << BITS
    points, centroids = singles(sets, sizes.tokens, WIDTH), singles(sets, clusters, WIDTH)
    offsets = -np.square(centroids).sum(2) / 2
    out = np.empty(points.shape[:2], np.int64)
    return Case(
        lambda: kernels.nearest_centroids(points, centroids, offsets, out),
        lambda: reference.nearest_centroids(points[:1], centroids[:1], offsets[:1], out[:1]),
        (bounds.stream(points.nbytes + out.nbytes),),
        (bounds.comparisons(sets * sizes.tokens, WIDTH, clusters),),
        plain_share=sets,
    )


def cluster_sums(sizes: Sizes) -> Case:
    """The other half of that round."""
    sets, clusters = sizes.rows * PARTS, 1 << BITS
    points = singles(sets, sizes.tokens, WIDTH)
    labels = np.random.default_rng(0).integers(0, clusters, points.shape[:2])
    sums = np.empty((sets, clusters, WIDTH), np.float32)
    counts = np.empty((sets, clusters), np.int64)
    return Case(
        lambda: kernels.cluster_sums(points, labels, sums, counts),
        lambda: reference.cluster_sums(points, labels, sums, counts),
        (bounds.stream(points.nbytes + labels.nbytes),),
    )


def copy_blocks(sizes: Sizes) -> Case:
    """What a step fetches, from anywhere to anywhere."""
    picked = Picked(sizes, sizes.block_tokens)
    source = picked.pool.view(np.uint8)
    target = np.zeros((2 * len(picked.slots), source.shape[1]), np.uint8)
    places = np.random.default_rng(1).permutation(len(target))[: len(picked.slots)]
    rows, into = picked.slots, places.astype(np.int32)
    a, b = torch.from_numpy(source), torch.from_numpy(target)
    i, j = torch.from_numpy(rows).long(), torch.from_numpy(into).long()
    return Case(
        lambda: copy(source, rows, target, into, 0, source.shape[1]),
        lambda: b.index_copy_(0, j, a[i]),
        (bounds.copies(picked.pool, rows, target, into),),
    )


ATTENTION: Mapping[str, Callable[[Sizes], Case]] = {
    "attend_blocks": attend_blocks,
    "attend_low_rank": attend_low_rank,
    "attend_clusters": attend_clusters,
    "attend_sampled": attend_sampled,
    "nearest_centroids": nearest_centroids,
    "cluster_sums": cluster_sums,
    "copy_rows": copy_blocks,
}
