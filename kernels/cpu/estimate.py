"""Attention over clusters and over a hashed sample, and the hashes."""

import math
from functools import lru_cache

import numpy as np
from numba import njit

from tierstore.kernels.cpu.scalar import FAST, exp_nonpositive, widen

_MINUS_INFINITY = np.float32(-np.inf)
_FLOOR = 1e-4


@njit(inline="always", fastmath=FAST)
def _add(logit, value, value_dim, peak, total, sums):
    """One more token in a running softmax; returns its new peak and total."""
    if logit > peak:
        shrink = exp_nonpositive(peak - logit) if total > 0 else np.float32(0.0)
        total *= shrink
        for j in range(value_dim):
            sums[j] *= shrink
        peak = logit
    weight = exp_nonpositive(logit - peak)
    for j in range(value_dim):
        sums[j] += weight * value[j]
    return peak, total + weight


@njit(inline="always", fastmath=FAST)
def _finish(peak, total, sums, value_dim, merge, out, lse, row, g):
    """Write one head's result, or merge it with what stands there."""
    own = peak + np.log(total) if total > 0 else _MINUS_INFINITY
    share = np.float32(1.0) / total if total > 0 else np.float32(0.0)
    if not merge:
        for j in range(value_dim):
            out[row, g, j] = sums[j] * share
        lse[row, g] = own
        return
    before = lse[row, g]
    top = max(own, before)
    if top == _MINUS_INFINITY:
        return
    a = exp_nonpositive(before - top) if before > _MINUS_INFINITY else np.float32(0.0)
    b = exp_nonpositive(own - top) if own > _MINUS_INFINITY else np.float32(0.0)
    for j in range(value_dim):
        out[row, g, j] = (a * out[row, g, j] + b * share * sums[j]) / (a + b)
    lse[row, g] = top + np.log(a + b)


@lru_cache(maxsize=64)
def cluster_kernel(group, dim, value_dim):
    """Attention over clusters for one shape; see `attend_clusters` for the contract."""

    @njit(cache=True, nogil=True, fastmath=FAST)
    def attend(
        query, centroids, values, sizes, first_row, last_row, row_ptr, units, scale, merge, out, lse
    ):
        q = np.empty((group, dim), np.float32)
        key = np.empty(dim, np.float32)
        value = np.empty(value_dim, np.float32)
        sums = np.empty((group, value_dim), np.float32)
        peak = np.empty(group, np.float32)
        total = np.empty(group, np.float32)
        for row in range(first_row, last_row):
            for g in range(group):
                for j in range(dim):
                    q[g, j] = widen(query[row, g, j]) * scale
            sums[:] = 0
            total[:] = 0
            peak[:] = _MINUS_INFINITY
            for i in range(row_ptr[row], row_ptr[row + 1]):
                unit = units[i]
                size = sizes[row, unit]
                if not size > 0:
                    continue
                for j in range(dim):
                    key[j] = widen(centroids[row, unit, j])
                for j in range(value_dim):
                    value[j] = widen(values[row, unit, j])
                often = np.log(size)
                for g in range(group):
                    logit = np.float32(0.0)
                    for j in range(dim):
                        logit += key[j] * q[g, j]
                    peak[g], total[g] = _add(
                        logit + often, value, value_dim, peak[g], total[g], sums[g]
                    )
            for g in range(group):
                _finish(peak[g], total[g], sums[g], value_dim, merge, out, lse, row, g)

    return attend


@njit(inline="always")
def _log_inclusion(cosine, bits, tables):
    """ln(w + floor), w the probability of 2 collisions; in double, since it is a small rest."""
    hit = (1.0 - math.acos(min(1.0, max(-1.0, cosine))) / math.pi) ** bits
    missed = (1.0 - hit) ** (tables - 1)
    return np.float32(math.log(1.0 - missed * (1.0 - hit) - tables * hit * missed + _FLOOR))


@lru_cache(maxsize=64)
def sampled_kernel(group, tokens, dim, value_dim, value_offset):
    """Importance-sampled attention for one shape; see `attend_sampled` for the contract."""

    @njit(cache=True, nogil=True, fastmath=FAST)
    def attend_token(
        q, q_norm, block, at, centre, bits, tables, scale, met, place, key, value, peak, total, sums
    ):
        square = np.float32(0.0)
        for j in range(dim):
            key[j] = widen(block[at * dim + j])
            away = key[j] - centre[j]
            square += away * away
        for j in range(value_dim):
            value[j] = widen(block[value_offset + at * value_dim + j])
        norm = math.sqrt(square)
        for g in range(group):
            if met[g, place] < 2:
                continue
            logit = np.float32(0.0)
            dot = np.float32(0.0)
            for j in range(dim):
                logit += key[j] * q[g, j]
                dot += (key[j] - centre[j]) * q[g, j]
            cosine = dot / max(norm * q_norm[g], 1e-30)
            logit = logit * scale - _log_inclusion(cosine, bits, tables)
            peak[g], total[g] = _add(logit, value, value_dim, peak[g], total[g], sums[g])

    @njit(cache=True, nogil=True, fastmath=FAST)
    def attend(
        query, pool, first_row, last_row, row_ptr, slots, valid, blocks, collisions, centre, bits,
        tables, scale, merge, out, lse,
    ):  # fmt: skip
        q = np.empty((group, dim), np.float32)
        q_norm = np.empty(group, np.float32)
        key = np.empty(dim, np.float32)
        value = np.empty(value_dim, np.float32)
        sums = np.empty((group, value_dim), np.float32)
        peak = np.empty(group, np.float32)
        total = np.empty(group, np.float32)
        for row in range(first_row, last_row):
            for g in range(group):
                square = np.float32(0.0)
                for j in range(dim):
                    q[g, j] = widen(query[row, g, j])
                    square += q[g, j] * q[g, j]
                q_norm[g] = np.sqrt(square)
            sums[:] = 0
            total[:] = 0
            peak[:] = _MINUS_INFINITY
            for i in range(row_ptr[row], row_ptr[row + 1]):
                for at in range(valid[i]):
                    attend_token(
                        q, q_norm, pool[slots[i]], at, centre[row], bits, tables, scale,
                        collisions[row], blocks[i] * tokens + at, key, value, peak, total, sums,
                    )  # fmt: skip
            for g in range(group):
                _finish(peak[g], total[g], sums[g], value_dim, merge, out, lse, row, g)

    return attend


@njit(cache=True, nogil=True)
def pack_signs(projections, first_row, last_row, bits, out):
    """Fill `out` with codes; see `tierstore.kernels.pack_signs`."""
    for row in range(first_row, last_row):
        for i in range(out.shape[1]):
            for table in range(out.shape[2]):
                code = 0
                for bit in range(bits):
                    if projections[row, i, table * bits + bit] > 0:
                        code |= 1 << bit
                out[row, i, table] = code


@lru_cache(maxsize=64)
def collision_kernel(group, tables):
    """Counts of equal codes for one shape; see `count_collisions` for the contract."""

    @njit(cache=True, nogil=True, fastmath=FAST)
    def count(asked, codes, first_row, last_row, counts, out):
        for row in range(first_row, last_row):
            for i in range(counts[row]):
                own = codes[row, i]
                for g in range(group):
                    met = np.float32(0.0)
                    for table in range(tables):
                        same = own[table] == asked[row, g, table]
                        met += np.float32(1.0) if same else np.float32(0.0)
                    out[row, g, i] = met

    return count
