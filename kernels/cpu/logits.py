"""Logits of the units of an index: how well each fits each query of its row."""

from functools import lru_cache

import numpy as np
from numba import njit

from tierstore.kernels.cpu.scalar import FAST, widen


@lru_cache(maxsize=64)
def dot_kernel(group, dim):
    """Dot products for one shape; see `tierstore.kernels.dot_logits` for the contract."""

    @njit(cache=True, nogil=True, fastmath=FAST)
    def dot(query, units, first_row, last_row, counts, scale, out):
        q = np.empty((group, dim), np.float32)
        u = np.empty(dim, np.float32)
        for row in range(first_row, last_row):
            for g in range(group):
                for j in range(dim):
                    q[g, j] = widen(query[row, g, j]) * scale
            for i in range(counts[row]):
                for j in range(dim):
                    u[j] = widen(units[row, i, j])
                for g in range(group):
                    a = np.float32(0.0)
                    for j in range(dim):
                        a += u[j] * q[g, j]
                    out[row, g, i] = a

    return dot
