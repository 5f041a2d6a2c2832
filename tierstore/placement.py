"""Where blocks start: the most important ones in the fastest tier, the next in the next (K17)."""

from collections.abc import Sequence

import numpy as np

from tierstore.interfaces import Bytes, Pointers, Scores


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
