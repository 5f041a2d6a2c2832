"""Decode attention over blocks in place and over each row's strip (sinks and recent tokens)."""

from functools import lru_cache

import numpy as np
from numba import njit

from tierstore.kernels.cpu.scalar import FAST, exp_nonpositive, narrow, prefetch, widen

AHEAD = 8
"""Blocks are scattered: their cache lines are asked for this many blocks before they are used."""


@lru_cache(maxsize=64)
def attend_kernel(group, tokens, key_dim, value_dim, value_offset):
    """The kernel for one block shape: constants let the compiler keep whole heads in registers.

    A block is one row of `pool`: `tokens` keys of `key_dim`, and from `value_offset` on as many
        values.
    """

    @njit(cache=True, nogil=True, fastmath=FAST)
    def attend(query, pool, first_row, last_row, row_ptr, slots, valid,
               strip_key, strip_value, strip_length, scale, merge, out, lse, weights):  # fmt: skip
        elements = value_offset + tokens * value_dim
        line = 64 // pool.itemsize
        q = np.empty((group, key_dim), np.float32)
        k = np.empty(key_dim, np.float32)
        acc = np.empty((group, value_dim), np.float32)
        minus_infinity = np.float32(-np.inf)
        for row in range(first_row, last_row):
            for g in range(group):
                for j in range(key_dim):
                    q[g, j] = widen(query[row, g, j]) * scale
            s = weights[row]
            n = 0
            stop = row_ptr[row + 1]
            for i in range(row_ptr[row], min(row_ptr[row] + AHEAD, stop)):
                for j in range(0, elements, line):
                    prefetch(pool, slots[i], j)
            for i in range(row_ptr[row], stop):
                if i + AHEAD < stop:
                    for j in range(0, elements, line):
                        prefetch(pool, slots[i + AHEAD], j)
                block = pool[slots[i]]
                for t in range(tokens):
                    for j in range(key_dim):
                        k[j] = widen(block[t * key_dim + j])
                    live = t < valid[i]
                    for g in range(group):
                        a = np.float32(0.0)
                        for j in range(key_dim):
                            a += k[j] * q[g, j]
                        s[g, n + t] = a if live else minus_infinity
                n += tokens
            in_blocks = n
            for t in range(strip_length[row]):
                for j in range(key_dim):
                    k[j] = widen(strip_key[row, t, j])
                for g in range(group):
                    a = np.float32(0.0)
                    for j in range(key_dim):
                        a += k[j] * q[g, j]
                    s[g, n + t] = a
            n += strip_length[row]

            for g in range(group):
                peak = minus_infinity
                is_broken = False
                for i in range(n):
                    peak = max(peak, s[g, i])
                    is_broken |= s[g, i] != s[g, i]
                if merge:
                    peak = max(peak, lse[row, g])
                    is_broken |= lse[row, g] != lse[row, g]
                if is_broken:
                    # A NaN must be seen, as torch shows it, not vanish in a comparison.
                    for i in range(n):
                        s[g, i] = 0.0
                    for j in range(value_dim):
                        acc[g, j] = np.nan
                    lse[row, g] = np.nan
                    continue
                if peak == minus_infinity:
                    for i in range(n):
                        s[g, i] = 0.0
                    for j in range(value_dim):
                        acc[g, j] = 0.0
                    lse[row, g] = minus_infinity
                    continue
                total = np.float32(0.0)
                for i in range(n):
                    e = (
                        exp_nonpositive(s[g, i] - peak)
                        if s[g, i] > minus_infinity
                        else np.float32(0.0)
                    )
                    s[g, i] = e
                    total += e
                kept = np.float32(0.0)
                if merge:
                    kept = np.exp(lse[row, g] - peak)
                total += kept
                inverse = np.float32(1.0) / total
                for i in range(n):
                    s[g, i] *= inverse
                for j in range(value_dim):
                    acc[g, j] = widen(out[row, g, j]) * kept * inverse if merge else np.float32(0.0)
                lse[row, g] = peak + np.log(total)

            at = 0
            for i in range(row_ptr[row], row_ptr[row + 1]):
                block = pool[slots[i]]
                for g in range(group):
                    for j in range(value_dim):
                        a = acc[g, j]
                        for t in range(tokens):
                            a += s[g, at + t] * widen(block[value_offset + t * value_dim + j])
                        acc[g, j] = a
                at += tokens
            for t in range(strip_length[row]):
                for g in range(group):
                    p = s[g, in_blocks + t]
                    for j in range(value_dim):
                        acc[g, j] += p * widen(strip_value[row, t, j])
            for g in range(group):
                for j in range(value_dim):
                    out[row, g, j] = narrow(acc[g, j], out[row, g, j])

    return attend
