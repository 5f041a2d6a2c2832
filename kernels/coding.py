"""Operations on keys that are coded: centroids, packed codes, logits by table lookup."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.kernels.backend import cpu, elsewhere
from tierstore.kernels.threads import over_rows

if TYPE_CHECKING:
    from tierstore.kernels.element import Array

__all__ = ["cluster_sums", "nearest_centroids", "pack_codes", "pq_logits"]


def nearest_centroids(points: Array, centroids: Array, offsets: Array, out: Array) -> None:
    """For each point p the centroid c of its row with the largest ``p . c + offset``, the first.

    With ``offset = -|c|**2 / 2`` that is the nearest one.

    Parameters
    ----------
    points, centroids, offsets: float32 [R, n, d], [R, k, d], [R, k]. out: integers [R, n].
    """
    if (backend := elsewhere(points)) is not None:
        backend.nearest_centroids(points, centroids, offsets, out)
        return
    points = np.ascontiguousarray(points, np.float32)
    over_rows(
        points.shape[0],
        points.size * centroids.shape[1],
        lambda first, last: cpu.nearest(points, centroids, offsets, first, last, out),
    )


def cluster_sums(points: Array, labels: Array, sums: Array, sizes: Array) -> None:
    """Sum up the points of each cluster, and count them.

    Parameters
    ----------
    points, labels: float32 [R, n, d]; int64 [R, n]. sums, sizes: float32 [R, k, d]; int64 [R, k].
    """
    if (backend := elsewhere(points)) is not None:
        backend.cluster_sums(points, labels, sums, sizes)
        return
    kernel, points = cpu.sums_kernel(points.shape[2]), np.ascontiguousarray(points, np.float32)
    over_rows(
        points.shape[0],
        points.size,
        lambda first, last: kernel(points, labels, first, last, sums, sizes),
    )


def pack_codes(codes: Array, first: int, packed: Array) -> None:
    """Put the codes of tokens `first`, `first` + 1, ... where `pq_logits` reads them.

    Tokens go in groups of 64; a word holds one bit of the code of each: token t in bit t % 64.

    Parameters
    ----------
    codes: uint8 [R, n, m], below 2**b. packed: int64 [R, groups, m, b].
    """
    if (backend := elsewhere(packed)) is not None:
        backend.pack_codes(codes, first, packed)
        return
    cpu.pack_kernel(packed.shape[3])(codes, first, packed)


def pq_logits(
    query: Array, codewords: Array, codes: Array, counts: Array, scale: float, out: Array
) -> None:
    """Logits of product-quantised keys: over the m parts, the sum of ``query . codeword * scale``.

    The Numba backend looks up bytes: a query's table entries are rounded to a 255th of the widest
    range s of its m tables, so that a logit is off by at most ``m * s / 510``. Beyond 1e30 they are
    cut off.

    Parameters
    ----------
    query: [R, G, m * w] elements. codewords: [R, m, 2**b, w or more] elements, of which w count.
    codes: int64 [R, groups, m, b], as `pack_codes` writes them. counts: int32 [R] tokens.
    out: float32 [R, G, 64 * groups]; places behind a row's tokens hold anything.
    """
    if (backend := elsewhere(codes)) is not None:
        backend.pq_logits(query, codewords, codes, counts, scale, out)
        return
    parts, bits = codes.shape[2:]
    kernel = cpu.lookup_kernel(query.shape[1], parts, bits, query.shape[2] // parts)
    over_rows(
        query.shape[0],
        int(counts.sum()) * query.shape[1] * parts,
        lambda first, last: kernel(query, codewords, codes, first, last, counts, np.float32(scale),
                                   out),
    )  # fmt: skip
