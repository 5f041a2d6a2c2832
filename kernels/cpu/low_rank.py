"""Decode attention over blocks whose keys are rebuilt from a product of few columns."""

from functools import lru_cache

import numpy as np
from numba import njit

from tierstore.kernels.cpu.attend import MINUS_INFINITY, attend_values_of
from tierstore.kernels.cpu.parts import part
from tierstore.kernels.cpu.registers import CHANNELS, multiply_tile
from tierstore.kernels.cpu.scalar import FAST, widen

_ROWS = 8
"""Tokens whose keys are summed up in registers at once."""

_TILE = 4 * _ROWS
"""Tokens that are rebuilt together: their left factors and one strip of the right one stay in the
first cache."""


def _strips(half):
    """Strips of `CHANNELS` columns that hold those of 2 x `half` that turn."""
    return -(-2 * half // CHANNELS)


@lru_cache(maxsize=64)
def _prepare(group, key_dim, rank, half):
    """What a row needs of its query and its right factor, once for all of its tokens.

    The right factor goes into strips of `CHANNELS` columns, as far as its columns turn with the
    position. Those that do not turn are multiplied into the query: ``q . (u B) = (q B) . u``.
    """
    turning = 2 * half

    @part
    def prepare(query, right, scale, q, strips, reduced):
        for g in range(group):
            for j in range(key_dim):
                q[g, j] = widen(query[g, j]) * scale
            for i in range(rank):
                a = np.float32(0.0)
                for j in range(turning, key_dim):
                    a += q[g, j] * widen(right[i, j])
                reduced[g, i] = a
        for j in range(turning):
            for i in range(rank):
                strips[j // CHANNELS, i, j % CHANNELS] = widen(right[i, j])

    return prepare


@lru_cache(maxsize=64)
def _rebuild(tokens, rank, half):
    """The left factors of a tile, and from them its plain keys, as far as they turn."""
    strip_count = _strips(half)
    width = strip_count * CHANNELS

    @part
    def rebuild(left, strips, blocks, first, last, u, k):
        for t in range(_TILE):
            # Behind the last token: that one once more.
            place = min(first + t, last - 1)
            token = blocks[place // tokens] * tokens + place % tokens
            for i in range(rank):
                u[t, i] = widen(left[token, i])
        for strip in range(strip_count):
            for t in range(0, _TILE, _ROWS):
                multiply_tile(
                    u.ctypes.data + t * rank * 4,
                    strips.ctypes.data + strip * rank * CHANNELS * 4,
                    rank,
                    k.ctypes.data + (t * width + strip * CHANNELS) * 4,
                    width * 4,
                    _ROWS,
                )

    return rebuild


@lru_cache(maxsize=64)
def _logits_of_token(group, key_dim, rank, half):
    """Logits of one token from its plain key, turned here, and from its left factor."""
    turning = 2 * half

    @part
    def logits_of_token(k, u, cos, sin, q, reduced, s, at):
        for j in range(half):
            a = k[j]
            b = k[half + j]
            k[j] = a * cos[j] - b * sin[j]
            k[half + j] = b * cos[j] + a * sin[j]
        for g in range(group):
            logit = np.float32(0.0)
            for j in range(turning):
                logit += k[j] * q[g, j]
            if turning < key_dim:
                for i in range(rank):
                    logit += u[i] * reduced[g, i]
            s[g, at] = logit

    return logits_of_token


@lru_cache(maxsize=64)
def low_rank_kernel(group, shape, rank, half):
    """The kernel for one shape; see `tierstore.kernels.attend_low_rank` for the contract."""
    tokens, key_dim, value_dim = shape.tokens, shape.key_dim, shape.value_dim
    prepare = _prepare(group, key_dim, rank, half)
    rebuild = _rebuild(tokens, rank, half)
    logits_of_token = _logits_of_token(group, key_dim, rank, half)
    attend_values = attend_values_of(group, tokens, value_dim, shape.value_offset)
    strip_count = _strips(half)

    @njit(cache=True, nogil=True, fastmath=FAST)
    def attend(query, left, right, cos, sin, pool, first_row, last_row, row_ptr, blocks, slots,
               valid, scale, merge, out, lse, weights):  # fmt: skip
        heads = right.shape[0] // left.shape[0]
        q = np.empty((group, key_dim), np.float32)
        reduced = np.empty((group, rank), np.float32)
        strips = np.zeros((strip_count, rank, CHANNELS), np.float32)
        u = np.empty((_TILE, rank), np.float32)
        k = np.empty((_TILE, strip_count * CHANNELS), np.float32)
        acc = np.empty((group, value_dim), np.float32)
        for row in range(first_row, last_row):
            prepare(query[row], right[row], scale, q, strips, reduced)
            s = weights[row]
            start, stop = row_ptr[row], row_ptr[row + 1]
            n = stop * tokens
            for first in range(start * tokens, n, _TILE):
                rebuild(left[row // heads], strips, blocks, first, n, u, k)
                for place in range(first, min(first + _TILE, n)):
                    t, i = place - first, place // tokens
                    token = blocks[i] * tokens + place % tokens
                    at = place - start * tokens
                    logits_of_token(k[t], u[t], cos[token], sin[token], q, reduced, s, at)
                    if place % tokens >= valid[i]:
                        for g in range(group):
                            s[g, at] = MINUS_INFINITY
            attend_values(pool, slots, start, stop, pool, 0, merge, s, acc, out[row], lse[row])

    return attend
