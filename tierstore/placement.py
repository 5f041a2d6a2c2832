"""Where blocks start: the most important ones in the fastest tier, the next in the next (K17)."""

from collections.abc import Sequence

import numpy as np

from tierstore.interfaces import Bytes, Ids, Pointers, Scores

RANKINGS = ("head", "layer", "global", "recency", "none")
"""By whose attention blocks are ranked.

``head``: by that to each head's own blocks. ``layer``: by the sum over a layer's heads, so that all
of them start with the same tokens. ``global``: by the sum over heads and layers. ``recency``: the
later, the better. ``none``: nothing starts above the backing tier.
"""


def pooled(importance: Scores, ranking: str) -> Scores:
    """Importance float32 [layers, rows, n] of blocks, as a ranking looks at it; the same shape."""
    if ranking == "head":
        return importance
    if ranking == "recency":
        return np.zeros_like(importance)
    over = 1 if ranking == "layer" else (0, 1)
    sums: Scores = np.broadcast_to(importance.sum(over, keepdims=True), importance.shape)
    return sums


def assign_homes(importance: Scores, room: Sequence[int | Pointers]) -> Bytes:
    """The tier for each block, ranked within its row.

    Parameters
    ----------
    importance: float32 [R, n], higher is more important; among equals the later block is.
    room: blocks that each tier above the backing one may take, fastest first: a number for all
        rows, or int64 [R].

    Returns
    -------
    uint8 [R, n]; ``len(room)`` stands for the backing tier alone.
    """
    rows, n = importance.shape
    order = np.argsort(importance, axis=1, kind="stable")[:, ::-1]
    rank = np.empty((rows, n), np.int64)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(n), (rows, n)), axis=1)
    each = np.array([np.broadcast_to(level, rows) for level in room], np.int64)
    bounds = each.reshape(len(room), rows).cumsum(0)
    homes: Bytes = (rank >= bounds[:, :, None]).sum(0).astype(np.uint8)
    return homes


def packing_order(clusters: Ids | Pointers) -> Pointers:
    """Permutations [R, n] that put the blocks of each cluster side by side, the first ones first.

    clusters: int [R, n], the cluster of each block. A cluster stands where its first block would.
    """
    rows, n = clusters.shape
    if not n:
        return np.empty((rows, 0), np.int64)
    first = np.full((rows, int(clusters.max()) + 1), n, np.int64)
    np.minimum.at(first, (np.arange(rows)[:, None], clusters), np.arange(n))
    order: Pointers = np.argsort(np.take_along_axis(first, clusters, 1), axis=1, kind="stable")
    return order
