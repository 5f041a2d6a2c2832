"""Logits of the units of an index: how well each fits each query of its row."""

from functools import lru_cache

import numpy as np
from numba import njit

from tierstore.kernels.cpu.parts import known
from tierstore.kernels.cpu.registers import dot_tile, tokens_at_once
from tierstore.kernels.cpu.scalar import FAST, exp_nonpositive, widen


@lru_cache(maxsize=64)
def dot_kernel(group, dim):
    """Dot products for one shape; see `tierstore.kernels.dot_logits` for the contract."""
    each = tokens_at_once(group, dim, 4)

    @njit(cache=True, nogil=True, fastmath=FAST)
    def dot_by_tiles(query, units, first_row, last_row, counts, scale, out):
        q = np.empty((group, dim), np.float32)
        for row in range(first_row, last_row):
            for g in range(group):
                for j in range(dim):
                    q[g, j] = widen(query[row, g, j]) * scale
            n = counts[row]
            whole = n - n % each
            for i in range(0, whole, each):
                dot_tile(units[row], i, q, out[row], i, dim, each, group)
            for i in range(whole, n):
                dot_tile(units[row], i, q, out[row], i, dim, 1, group)

    @njit(cache=True, nogil=True, fastmath=FAST)
    def dot_one_by_one(query, units, first_row, last_row, counts, scale, out):
        for row in range(first_row, last_row):
            for i in range(counts[row]):
                for g in range(group):
                    a = np.float32(0.0)
                    for j in range(dim):
                        a += widen(units[row, i, j]) * (widen(query[row, g, j]) * scale)
                    out[row, g, i] = a

    return known(dot_by_tiles if each else dot_one_by_one)


@lru_cache(maxsize=64)
def weigh_kernel(group, dim):
    """The kernel for one shape; see `tierstore.kernels.weigh_strips` for the contract."""

    dot = dot_kernel(group, dim)

    @njit(cache=True, nogil=True, fastmath=FAST)
    def weigh(query, strip_key, strip_length, scale, out):
        rows = query.shape[0]
        logits = np.empty((rows, group, strip_key.shape[1]), np.float32)
        dot(query, strip_key, 0, rows, strip_length, scale, logits)
        for row in range(rows):
            n = strip_length[row]
            for g in range(group):
                peak = np.float32(-np.inf)
                for i in range(n):
                    peak = max(peak, logits[row, g, i])
                total = np.float32(0.0)
                for i in range(n):
                    total += exp_nonpositive(logits[row, g, i] - peak)
                out[row, g] = peak + np.log(total) if n > 0 else peak

    return weigh
