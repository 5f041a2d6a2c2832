"""Logits of units that are boxes around keys."""

from functools import lru_cache

import numpy as np
from numba import njit

from tierstore.kernels.cpu.parts import part
from tierstore.kernels.cpu.registers import box_tile, tokens_at_once
from tierstore.kernels.cpu.scalar import FAST, widen


@lru_cache(maxsize=64)
def box_kernel(group, dim):
    """The best of each box for one shape; see `tierstore.kernels.box_logits` for the contract.

    The larger of q * high and q * low is the first where q > 0, the second where q < 0: with q
    split into these parts, each channel takes two multiply-adds and no comparison.
    """
    each = tokens_at_once(group, dim, 4)

    @part
    def boxes_by_tiles(high, low, above, below, n, out):
        whole = n - n % each
        for i in range(0, whole, each):
            box_tile(high, low, i, above, below, out, i, dim, each, group)
        for i in range(whole, n):
            box_tile(high, low, i, above, below, out, i, dim, 1, group)

    @part
    def boxes_one_by_one(high, low, above, below, n, out):
        for i in range(n):
            for g in range(group):
                a = np.float32(0.0)
                for j in range(dim):
                    a += widen(high[i, j]) * above[g, j] + widen(low[i, j]) * below[g, j]
                out[g, i] = a

    logits_of_boxes = boxes_by_tiles if each else boxes_one_by_one

    @njit(cache=True, nogil=True, fastmath=FAST)
    def box(query, high, low, first_row, last_row, counts, scale, out):
        above = np.empty((group, dim), np.float32)
        below = np.empty((group, dim), np.float32)
        zero = np.float32(0.0)
        for row in range(first_row, last_row):
            for g in range(group):
                for j in range(dim):
                    q = widen(query[row, g, j]) * scale
                    above[g, j] = max(q, zero)
                    below[g, j] = min(q, zero)
            logits_of_boxes(high[row], low[row], above, below, counts[row], out[row])

    return box
