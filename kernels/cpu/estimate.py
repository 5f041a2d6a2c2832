"""Attention over clusters and over a hashed sample, and the hashes."""

import math
from functools import lru_cache

import numpy as np
from numba import njit

from tierstore.kernels.cpu.attend import AHEAD
from tierstore.kernels.cpu.flags import NUMBERS, flags_above
from tierstore.kernels.cpu.parts import part
from tierstore.kernels.cpu.registers import add_tile, dot_tile, tokens_at_once
from tierstore.kernels.cpu.scalar import (
    FAST,
    exp_nonpositive,
    from_ordered,
    log_positive,
    ordered,
    prefetch,
    widen,
    widest_vectors,
)

_MINUS_INFINITY = np.float32(-np.inf)
_FLOOR = 1e-4


@part
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


@part
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


_TILE = 64
"""Clusters whose weights are computed together."""


@part
def _weigh(s, n, peak, total, sums):
    """Logits of a tile into weights relative to the new peak of a running softmax.

    Returns that peak and the total; `sums` shrink with it. Behind `n` weights are 0.
    """
    most = ordered(peak)
    for i in range(n):
        most = max(most, ordered(s[i]))
    top = from_ordered(most)
    if not top <= peak:
        shrink = exp_nonpositive(peak - top) if total > 0 else np.float32(0.0)
        total *= shrink
        for j in range(sums.shape[0]):
            sums[j] *= shrink
    for i in range(n):
        weight = exp_nonpositive(s[i] - top) if s[i] > _MINUS_INFINITY else np.float32(0.0)
        s[i] = weight
        total += weight
    for i in range(n, _TILE):
        s[i] = np.float32(0.0)
    return top, total


@part
def _ask_for(vectors, rows, first, last):
    """Rows are scattered: their cache lines are asked for before they are used."""
    for i in range(first, last):
        for j in range(0, vectors.shape[1], 64 // vectors.itemsize):
            prefetch(vectors, rows[i], j)


@part
def _count_tokens(s, sizes, rows, n, often):
    """From the logits of clusters to those of their tokens together."""
    for i in range(n):
        size = sizes[rows[i]]
        often[i] = log_positive(size) if size > 0 else _MINUS_INFINITY
    for g in range(s.shape[0]):
        for i in range(n):
            s[g, i] += often[i]


@lru_cache(maxsize=64)
def _logits_of_rows(group, dim):
    """Logits of the first `n` of some rows of `keys`."""
    each = tokens_at_once(group, dim, _TILE)

    @part
    def logits_by_tiles(keys, rows, n, q, s):
        for i in range(0, n, each):
            _ask_for(keys, rows, i + AHEAD, i + AHEAD + each)
            dot_tile(keys, rows[i : i + each], q, s, i, dim, each, group)

    @part
    def logits_one_by_one(keys, rows, n, q, s):
        for i in range(n):
            for g in range(group):
                logit = np.float32(0.0)
                for j in range(dim):
                    logit += widen(keys[rows[i], j]) * q[g, j]
                s[g, i] = logit

    return logits_by_tiles if each else logits_one_by_one


@lru_cache(maxsize=64)
def _values_of_rows(group, value_dim):
    """Add the first `n` of some rows of `values`, each times its weight."""
    each = tokens_at_once(group, value_dim, _TILE)

    @part
    def values_by_tiles(values, rows, n, s, sums):
        for i in range(0, n, each):
            _ask_for(values, rows, i + AHEAD, i + AHEAD + each)
            add_tile(values, rows[i : i + each], s, i, sums, value_dim, each, group)

    @part
    def values_one_by_one(values, rows, n, s, sums):
        for i in range(n):
            for g in range(group):
                for j in range(value_dim):
                    sums[g, j] += s[g, i] * widen(values[rows[i], j])

    return values_by_tiles if each else values_one_by_one


@lru_cache(maxsize=64)
def cluster_kernel(group, dim, value_dim):
    """Attention over clusters for one shape; see `attend_clusters` for the contract."""
    logits_of_rows = _logits_of_rows(group, dim)
    values_of_rows = _values_of_rows(group, value_dim)

    @njit(cache=True, nogil=True, fastmath=FAST)
    def attend(
        query, centroids, values, sizes, first_row, last_row, row_ptr, units, scale, merge, out, lse
    ):
        widest_vectors()
        q = np.empty((group, dim), np.float32)
        rows = np.empty(_TILE + AHEAD, np.int64)
        often = np.empty(_TILE, np.float32)
        s = np.empty((group, _TILE), np.float32)
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
            stop = row_ptr[row + 1]
            for first in range(row_ptr[row], stop, _TILE):
                n = min(_TILE, stop - first)
                # Behind the last one: that one once more, with a weight of 0.
                for i in range(rows.shape[0]):
                    rows[i] = units[min(first + i, stop - 1)]
                logits_of_rows(centroids[row], rows, n, q, s)
                _count_tokens(s, sizes[row], rows, n, often)
                for g in range(group):
                    peak[g], total[g] = _weigh(s[g], n, peak[g], total[g], sums[g])
                values_of_rows(values[row], rows, n, s, sums)
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
    columns = projections.shape[2]
    whole = columns - columns % NUMBERS
    rest = np.zeros(NUMBERS, np.float32)
    # Behind the last word one more, which the last code may look into.
    words = np.zeros(whole // NUMBERS + 2, np.uint64)
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    zero, one = np.float32(0.0), np.uint64(1)
    for row in range(first_row, last_row):
        for i in range(out.shape[1]):
            own = projections[row, i]
            for first in range(0, whole, NUMBERS):
                words[first // NUMBERS] = flags_above(own.ctypes.data + first * 4, zero)
            rest[: columns - whole] = own[whole:]
            words[whole // NUMBERS] = flags_above(rest.ctypes.data, zero)
            start = np.uint64(0)
            for table in range(out.shape[2]):
                # Meanwhile the next row's numbers come near.
                prefetch(projections[row], min(i + 1, out.shape[1] - 1), start)
                # Unsigned: else each access tests for a negative index first.
                word, shift = start >> np.uint64(6), start & np.uint64(63)
                # In two shifts: one by all 64 bits has no result.
                above = words[word + one] << one << (np.uint64(63) - shift)
                out[row, i, table] = (words[word] >> shift | above) & mask
                start += np.uint64(bits)


@lru_cache(maxsize=64)
def collision_kernel(group, tables):
    """Counts of equal codes for one shape; see `count_collisions` for the contract."""

    @njit(cache=True, nogil=True, fastmath=FAST)
    def count(asked, codes, first_row, last_row, counts, out):
        for row in range(first_row, last_row):
            for i in range(counts[row]):
                own = codes[row, i]
                for g in range(group):
                    # As wide as a code: whole vectors are compared and counted.
                    met = np.int16(0)
                    for table in range(tables):
                        met = np.int16(met + np.int16(own[table] == asked[row, g, table]))
                    out[row, g, i] = met

    return count
