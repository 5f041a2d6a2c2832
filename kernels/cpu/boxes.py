"""Logits of units that are boxes around keys."""

from functools import lru_cache

import numpy as np
from numba import njit

from tierstore.kernels.cpu.scalar import FAST, widen


@lru_cache(maxsize=64)
def box_kernel(group, dim):
    """The best of each box for one shape; see `tierstore.kernels.box_logits` for the contract.

    The larger of q * high and q * low is the first where q > 0, the second where q < 0: with q
    split into these parts, each channel takes two multiply-adds and no comparison.
    """

    @njit(cache=True, nogil=True, fastmath=FAST)
    def box(query, high, low, first_row, last_row, counts, scale, out):
        above = np.empty((group, dim), np.float32)
        below = np.empty((group, dim), np.float32)
        hi = np.empty(dim, np.float32)
        lo = np.empty(dim, np.float32)
        zero = np.float32(0.0)
        for row in range(first_row, last_row):
            for g in range(group):
                for j in range(dim):
                    q = widen(query[row, g, j]) * scale
                    above[g, j] = max(q, zero)
                    below[g, j] = min(q, zero)
            for i in range(counts[row]):
                for j in range(dim):
                    hi[j] = widen(high[row, i, j])
                    lo[j] = widen(low[row, i, j])
                for g in range(group):
                    a = zero
                    for j in range(dim):
                        a += hi[j] * above[g, j] + lo[j] * below[g, j]
                    out[row, g, i] = a

    return box
