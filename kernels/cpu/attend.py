"""Decode attention over blocks in place and over each row's strip (sinks and recent tokens)."""

from functools import lru_cache

import numpy as np
from numba import njit

from tierstore.kernels.cpu.parts import part
from tierstore.kernels.cpu.registers import add_tile, dot_tile, tokens_at_once
from tierstore.kernels.cpu.scalar import (
    FAST,
    exp_nonpositive,
    from_ordered,
    narrow,
    ordered,
    prefetch,
    widen,
    widest_vectors,
)

AHEAD = 8
"""Blocks are scattered: their cache lines are asked for this many blocks before they are used."""

MINUS_INFINITY = np.float32(-np.inf)


@lru_cache(maxsize=64)
def _logits_of_keys(group, dim, tokens):
    """Logits of `tokens` keys of `source` from `first` on, into columns from `at` on of `s`."""
    each = tokens_at_once(group, dim, tokens)

    @part
    def logits_by_tiles(source, first, q, s, at):
        for t in range(0, tokens, each):
            dot_tile(source, first + t * dim, q, s, at + t, dim, each, group)

    @part
    def logits_one_by_one(source, first, q, s, at):
        for t in range(tokens):
            for g in range(group):
                a = np.float32(0.0)
                for j in range(dim):
                    a += widen(source[first + t * dim + j]) * q[g, j]
                s[g, at + t] = a

    return logits_by_tiles if each else logits_one_by_one


@lru_cache(maxsize=64)
def _ask_for(first, last):
    """Ask for the elements from `first` to `last` of some of a row's blocks."""

    @part
    def ask_for(pool, slots, start, stop):
        for i in range(start, stop):
            for j in range(first, last, 64 // pool.itemsize):
                prefetch(pool, slots[i], j)

    return ask_for


@lru_cache(maxsize=64)
def _logits_of_blocks(group, tokens, key_dim):
    """Logits of the keys in a row's blocks, -inf for what does not count; returns their number."""
    logits_of_keys = _logits_of_keys(group, key_dim, tokens)
    ask_for = _ask_for(0, tokens * key_dim)

    @part
    def logits_of_blocks(pool, slots, valid, start, stop, q, s):
        ask_for(pool, slots, start, min(start + AHEAD, stop))
        n = 0
        for i in range(start, stop):
            ask_for(pool, slots, i + AHEAD, min(i + AHEAD + 1, stop))
            logits_of_keys(pool[slots[i]], 0, q, s, n)
            for t in range(valid[i], tokens):
                for g in range(group):
                    s[g, n + t] = MINUS_INFINITY
            n += tokens
        return n

    return logits_of_blocks


@part
def _weights_of(s, n, known):
    """Logits of one head into weights that sum to 1 with what is known already.

    known: the log-sum-exp of the latter, -inf for nothing. Returns that of all, and the weight of
    what is known. A NaN must be seen, as torch shows it, not vanish in a comparison.
    """
    most = ordered(known)
    broken_ones = 0 if known == known else 1
    for i in range(n):
        most = max(most, ordered(s[i]))
        broken_ones += 0 if s[i] == s[i] else 1
    is_broken = broken_ones > 0
    peak = from_ordered(most)
    if is_broken or peak == MINUS_INFINITY:
        for i in range(n):
            s[i] = np.float32(0.0)
        broken = np.float32(np.nan)
        return (broken, broken) if is_broken else (MINUS_INFINITY, np.float32(0.0))
    total = np.float32(0.0)
    for i in range(n):
        e = exp_nonpositive(s[i] - peak) if s[i] > MINUS_INFINITY else np.float32(0.0)
        s[i] = e
        total += e
    kept = np.exp(known - peak)
    total += kept
    inverse = np.float32(1.0) / total
    for i in range(n):
        s[i] *= inverse
    return peak + np.log(total), kept * inverse


@lru_cache(maxsize=64)
def _weighed_sums_of(group, dim, tokens):
    """Add `tokens` values of `source` from `first` on, times columns from `at` on of `s`."""
    each = tokens_at_once(group, dim, tokens)

    @part
    def sums_by_tiles(source, first, s, at, acc):
        for t in range(0, tokens, each):
            add_tile(source, first + t * dim, s, at + t, acc, dim, each, group)

    @part
    def sums_one_by_one(source, first, s, at, acc):
        for g in range(group):
            for j in range(dim):
                a = acc[g, j]
                for t in range(tokens):
                    a += s[g, at + t] * widen(source[first + t * dim + j])
                acc[g, j] = a

    return sums_by_tiles if each else sums_one_by_one


@lru_cache(maxsize=64)
def _add_values(group, tokens, value_dim, value_offset):
    """Add the values of a row's blocks, then of its strip, each times its weight, to `acc`."""
    weighed_sums = _weighed_sums_of(group, value_dim, tokens)
    weighed_sum = _weighed_sums_of(group, value_dim, 1)
    ask_for = _ask_for(value_offset, value_offset + tokens * value_dim)

    @part
    def add_values(pool, slots, start, stop, strip, length, s, acc):
        ask_for(pool, slots, start, min(start + AHEAD, stop))
        at = 0
        for i in range(start, stop):
            ask_for(pool, slots, i + AHEAD, min(i + AHEAD + 1, stop))
            weighed_sums(pool[slots[i]], value_offset, s, at, acc)
            at += tokens
        for t in range(length):
            weighed_sum(strip[t], 0, s, at + t, acc)

    return add_values


@lru_cache(maxsize=64)
def attend_values_of(group, tokens, value_dim, value_offset):
    """From the logits `s` of a row's keys, which it overwrites, to its output and log-sum-exp."""
    add_values = _add_values(group, tokens, value_dim, value_offset)

    @part
    def attend_values(pool, slots, start, stop, strip, length, merge, s, acc, out, lse):
        n = (stop - start) * tokens + length
        for g in range(group):
            lse[g], kept = _weights_of(s[g], n, lse[g] if merge else MINUS_INFINITY)
            for j in range(value_dim):
                old = widen(out[g, j]) if merge else np.float32(0.0)
                acc[g, j] = np.float32(np.nan) if kept != kept else old * kept
        add_values(pool, slots, start, stop, strip, length, s, acc)
        for g in range(group):
            for j in range(value_dim):
                out[g, j] = narrow(acc[g, j], out[g, j])

    return attend_values


@lru_cache(maxsize=64)
def attend_kernel(group, tokens, key_dim, value_dim, value_offset):
    """The kernel for one block shape: constants let the compiler keep whole heads in registers.

    A block is one row of `pool`: `tokens` keys of `key_dim`, and from `value_offset` on as many
        values.
    """
    logits_of_key = _logits_of_keys(group, key_dim, 1)
    logits_of_blocks = _logits_of_blocks(group, tokens, key_dim)
    attend_values = attend_values_of(group, tokens, value_dim, value_offset)

    @njit(cache=True, nogil=True, fastmath=FAST)
    def attend(query, pool, first_row, last_row, row_ptr, slots, valid,
               strip_key, strip_value, strip_length, scale, merge, out, lse, weights):  # fmt: skip
        widest_vectors()
        q = np.empty((group, key_dim), np.float32)
        acc = np.empty((group, value_dim), np.float32)
        for row in range(first_row, last_row):
            for g in range(group):
                for j in range(key_dim):
                    q[g, j] = widen(query[row, g, j]) * scale
            s = weights[row]
            start, stop, length = row_ptr[row], row_ptr[row + 1], strip_length[row]
            n = logits_of_blocks(pool, slots, valid, start, stop, q, s)
            for t in range(length):
                logits_of_key(strip_key[row, t], 0, q, s, n + t)
            attend_values(
                pool, slots, start, stop, strip_value[row], length, merge, s, acc, out[row],
                lse[row],
            )  # fmt: skip

    return attend
