"""Attention over keys that are not all looked at: clusters that stand for them, or a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.kernels import estimate_reference as reference
from tierstore.kernels.backend import backend_of, cpu
from tierstore.kernels.operations import dot_logits
from tierstore.kernels.threads import over_rows

if TYPE_CHECKING:
    from tierstore.kernels.element import Array
    from tierstore.kernels.shape import BlockShape


def attend_clusters(
    query: Array,
    centroids: Array,
    values: Array,
    sizes: Array,
    row_ptr: Array,
    units: Array,
    scale: float,
    out: Array,
    lse: Array,
    *,
    merge: bool = False,
) -> None:
    """RetroInfer's estimated zone: every token of a cluster counts as the mean of its cluster.

    The sum of weights is at most the true one (Jensen), and equal where keys of a cluster agree.

    Parameters
    ----------
    query: [R, G, d] elements.
    centroids, values: [R, u, d], [R, u, e] elements, mean keys and mean values of clusters.
    sizes: float32 [R, u], tokens of each cluster; one of size 0 does not count.
    row_ptr, units: int64 [R + 1]; int32 [n] clusters of row r at ``row_ptr[r]:row_ptr[r + 1]``.
    out, lse: float32 [R, G, e]; float32 [R, G] natural log-sum-exp.
    merge: combine with what `out` and `lse` already hold (the exact part).
    """
    if backend_of(centroids) != "numba":
        reference.attend_clusters(
            query, centroids, values, sizes, row_ptr, units, scale, out, lse, merge=merge
        )
        return
    kernel = cpu.cluster_kernel(query.shape[1], query.shape[2], out.shape[2])
    over_rows(
        len(query),
        len(units) * query.shape[1] * (query.shape[2] + out.shape[2]),
        lambda first, last: kernel(query, centroids, values, sizes, first, last, row_ptr, units,
                                   np.float32(scale), merge, out, lse),
    )  # fmt: skip


def attend_sampled(
    query: Array,
    pool: Array,
    shape: BlockShape,
    row_ptr: Array,
    slots: Array,
    valid: Array,
    blocks: Array,
    collisions: Array,
    centre: Array,
    bits: int,
    tables: int,
    scale: float,
    out: Array,
    lse: Array,
    *,
    merge: bool = False,
) -> None:
    """MagicPIG's estimate of attention over all keys from those that a hash happened to retrieve.

    Each query head looks at the keys that share at least 2 of its buckets, with logits less
    ``ln(w + 1e-4)``, w being the probability of that over the choice of hashes.

    Parameters
    ----------
    query: [R, G, d] elements.
    pool, shape, row_ptr, slots, valid: as for `attend_blocks`; the blocks that hold what any head
        retrieved, and they may hold more.
    blocks: int32 [n], the number of each block in its row: token t of block b has place
        ``b * shape.tokens + t``.
    collisions: float32 [R, G, u], tables in which the token at each place meets the query.
    centre: float32 [R, d], taken from the keys before they were hashed; logits are of the keys as
        they are, so that any other part can be merged.
    bits, tables: of the hash.
    out, lse: float32 [R, G, e]; float32 [R, G] natural log-sum-exp.
    merge: combine with what `out` and `lse` already hold (the exact part).
    """
    if backend_of(pool) != "numba":
        reference.attend_sampled(query, pool, shape, row_ptr, slots, valid, blocks, collisions,
                                 centre, bits, tables, scale, out, lse, merge=merge)  # fmt: skip
        return
    kernel = cpu.sampled_kernel(
        query.shape[1], shape.tokens, shape.key_dim, shape.value_dim, shape.value_offset
    )
    over_rows(
        len(query),
        len(slots) * shape.tokens * query.shape[1] * shape.key_dim,
        lambda first, last: kernel(query, pool, first, last, row_ptr, slots, valid, blocks,
                                   collisions, centre, bits, tables, np.float32(scale), merge, out,
                                   lse),
    )  # fmt: skip


def pack_signs(projections: Array, bits: int, out: Array) -> None:
    """SimHash codes: bit k of a code is whether its projection number k is positive.

    Parameters
    ----------
    projections: float32 [R, n, L * bits], table after table. bits: 1 to 15.
    out: int16 [R, n, L].
    """
    if backend_of(projections) != "numba":
        reference.pack_signs(projections, bits, out)
        return
    projections = np.ascontiguousarray(projections, np.float32)
    over_rows(
        len(out),
        projections.size,
        lambda first, last: cpu.pack_signs(projections, first, last, bits, out),
    )


def count_collisions(asked: Array, codes: Array, counts: Array, out: Array) -> None:
    """In how many tables each key of a row meets each query of the row.

    Parameters
    ----------
    asked, codes: int16 [R, G, L], [R, u, L]. counts: int32 [R] keys in use.
    out: float32 [R, G, u]; places behind a row's keys are left as they are.
    """
    if backend_of(codes) != "numba":
        reference.count_collisions(asked, codes, counts, out)
        return
    kernel = cpu.collision_kernel(asked.shape[1], asked.shape[2])
    over_rows(
        len(counts),
        int(counts.sum()) * asked.shape[1] * asked.shape[2] // 8,
        lambda first, last: kernel(asked, codes, first, last, counts, out),
    )


def search_graph(
    query: Array,
    vectors: Array,
    edges: Array,
    counts: Array,
    beams: Array,
    scale: float,
    out: Array,
) -> None:
    """Best-first search by inner product for each query of a row, from 8 nodes evenly taken.

    It ends when the best so many nodes that it saw have all been expanded. A node's neighbours are
    those of its edges and the node that follows it, so that every node can be reached. The plain
    torch backend looks at every node.

    Parameters
    ----------
    query, vectors: [R, G, d], [R, u, d] elements.
    edges: int32 [R, u, degree], the used ones first, then -1. counts: int32 [R] nodes in use; edges
        to nodes behind them are passed over.
    beams: int32 [R], nodes kept (ef); 0 for no search.
    out: float32 [R, G, u]: logits of the nodes that were seen, -inf of the others; places behind a
        row's nodes are left as they are.
    """
    if backend_of(vectors) != "numba":
        dot_logits(query, vectors, counts, scale, out)
        return
    kernel = cpu.search_kernel(query.shape[1], query.shape[2], edges.shape[2])
    over_rows(
        len(counts),
        int(beams.sum()) * query.shape[1] * query.shape[2] * edges.shape[2],
        lambda first, last: kernel(query, vectors, edges, first, last, counts, beams,
                                   np.float32(scale), out),
    )  # fmt: skip


def walk_graph(
    query: Array, vectors: Array, edges: Array, n: int, beam: int, near: Array, logits: Array
) -> None:
    """The nodes of largest inner product with each query that a walk of `search_graph` finds.

    What it costs is bounded, whatever n is. The plain torch backend looks at every node.

    Parameters
    ----------
    query, vectors: [R, q, d], [R, u, d] elements. edges: int32 [R, u, degree].
    n: nodes in use, of each row. beam: nodes kept, at least k.
    near, logits: int32, float32 [R, q, k], best first; -1 and -inf where fewer were found.
    """
    if backend_of(vectors) != "numba":
        reference.walk_graph(query, vectors, n, near, logits)
        return
    kernel = cpu.walk_kernel(query.shape[2], edges.shape[2])
    over_rows(
        len(query),
        query.size * beam * edges.shape[2] // 2,
        lambda first, last: kernel(query, vectors, edges, n, beam, first, last, near, logits),
    )
