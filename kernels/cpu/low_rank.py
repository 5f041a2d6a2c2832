"""Decode attention over blocks whose keys are rebuilt from a product of few columns."""

from functools import lru_cache

import numpy as np
from numba import njit

from tierstore.kernels.cpu.scalar import FAST, exp_nonpositive, narrow, widen


@lru_cache(maxsize=64)
def low_rank_kernel(group, tokens, key_dim, value_dim, rank, half):
    """The kernel for one shape; see `tierstore.kernels.attend_low_rank` for the contract."""

    @njit(cache=True, nogil=True, fastmath=FAST)
    def rebuild(left, right, cos, sin, first, k):
        """Keys of `tokens` tokens from number `first` on into `k`, turned to their positions."""
        u = np.empty(tokens, np.float32)
        k[:] = 0
        for i in range(rank):
            for t in range(tokens):
                u[t] = widen(left[first + t, i])
            for t in range(tokens):
                for j in range(key_dim):
                    k[t, j] += u[t] * right[i, j]
        for t in range(tokens):
            for j in range(half):
                c = cos[first + t, j]
                s = sin[first + t, j]
                a = k[t, j]
                b = k[t, half + j]
                k[t, j] = a * c - b * s
                k[t, half + j] = b * c + a * s

    @njit(cache=True, nogil=True, fastmath=FAST)
    def fold(s, n, out, lse, values, pool, slots, value_offset):
        """Attention of one head with logits `s` over its blocks, merged into `out`; its new lse."""
        peak = lse
        is_broken = lse != lse
        for i in range(n):
            peak = max(peak, s[i])
            is_broken |= s[i] != s[i]
        if is_broken:
            # A NaN must be seen, as torch shows it, not vanish in a comparison.
            for j in range(value_dim):
                out[j] = narrow(np.float32(np.nan), out[j])
            return np.float32(np.nan)
        if peak == np.float32(-np.inf):
            return peak
        total = np.exp(lse - peak)
        for j in range(value_dim):
            values[j] = widen(out[j]) * total
        for i in range(n):
            live = s[i] > np.float32(-np.inf)
            s[i] = exp_nonpositive(s[i] - peak) if live else np.float32(0.0)
            total += s[i]
        for i in range(slots.shape[0]):
            block = pool[slots[i]]
            for t in range(tokens):
                p = s[i * tokens + t]
                at = value_offset + t * value_dim
                for j in range(value_dim):
                    values[j] += p * widen(block[at + j])
        inverse = np.float32(1.0) / total
        for j in range(value_dim):
            out[j] = narrow(values[j] * inverse, out[j])
        return peak + np.log(total)

    @njit(cache=True, nogil=True, fastmath=FAST)
    def attend(query, left, right, cos, sin, pool, value_offset, first_row, last_row, row_ptr,
               blocks, slots, valid, scale, merge, out, lse, weights):  # fmt: skip
        heads = right.shape[0] // left.shape[0]
        q = np.empty((group, key_dim), np.float32)
        k = np.empty((tokens, key_dim), np.float32)
        factor = np.empty((rank, key_dim), np.float32)
        values = np.empty(value_dim, np.float32)
        minus_infinity = np.float32(-np.inf)
        for row in range(first_row, last_row):
            start = row_ptr[row]
            stop = row_ptr[row + 1]
            for g in range(group):
                for j in range(key_dim):
                    q[g, j] = widen(query[row, g, j]) * scale
            for i in range(rank):
                for j in range(key_dim):
                    factor[i, j] = widen(right[row, i, j])
            s = weights[row]
            for i in range(start, stop):
                rebuild(left[row // heads], factor, cos, sin, blocks[i] * tokens, k)
                for t in range(tokens):
                    for g in range(group):
                        a = np.float32(0.0)
                        for j in range(key_dim):
                            a += k[t, j] * q[g, j]
                        live = t < valid[i]
                        s[g, (i - start) * tokens + t] = a if live else minus_infinity
            for g in range(group):
                if not merge:
                    lse[row, g] = minus_infinity
                    for j in range(value_dim):
                        out[row, g, j] = narrow(np.float32(0.0), out[row, g, j])
                lse[row, g] = fold(
                    s[g], (stop - start) * tokens, out[row, g], lse[row, g], values, pool,
                    slots[start:stop], value_offset,
                )  # fmt: skip

    return attend
