"""The work of kernels without their memory traffic: loops over what the first cache holds.

Each is written for speed alone and is given its data over and over. Needs Numba.
"""

from functools import lru_cache

import numpy as np
from numba import njit

from tierstore.kernels.cpu.attend import AHEAD
from tierstore.kernels.cpu.registers import CHANNELS, LANES, best_of_centroids, multiply_tile
from tierstore.kernels.cpu.scalar import FAST, exp_nonpositive, prefetch, widen, widest_vectors


@njit(cache=True, nogil=True, fastmath=FAST)
def add_up(words, first, last):
    """Read everything: int64 [rows, n]."""
    widest_vectors()
    total = 0
    for row in range(first, last):
        for i in range(words.shape[1]):
            total += words[row, i]
    return total


@njit(cache=True, nogil=True, fastmath=FAST)
def add_up_rows(words, places, first, last):
    """Read rows of int64 [rows, n] that lie anywhere, each asked for some rows ahead."""
    widest_vectors()
    total = 0
    for i in range(first, last):
        if i + AHEAD < last:
            for j in range(0, words.shape[1], 8):
                prefetch(words, places[i + AHEAD], j)
        row = words[places[i]]
        for j in range(row.shape[0]):
            total += row[j]
    return total


@njit(cache=True, nogil=True)
def copy_words(source, places, target, into):
    """Copy rows of int64 [rows, n] from anywhere to anywhere, each asked for some rows ahead."""
    for i in range(places.shape[0]):
        if i + AHEAD < places.shape[0]:
            for j in range(0, source.shape[1], 8):
                prefetch(source, places[i + AHEAD], j)
        a, b = source[places[i]], target[into[i]]
        for j in range(a.shape[0]):
            b[j] = a[j]


@lru_cache(maxsize=8)
def multiply_adds(group):
    """Elements widened and multiplied with as many queries, up to 4; sums stay in registers."""

    @njit(cache=True, nogil=True, fastmath=FAST)
    def loop(elements, queries, repeat):
        widest_vectors()
        a = b = c = d = np.float32(0.0)
        for _ in range(repeat):
            for j in range(elements.shape[0]):
                x = widen(elements[j])
                a += x * queries[0, j]
                if group > 1:
                    b += x * queries[1, j]
                if group > 2:
                    c += x * queries[2, j]
                if group > 3:
                    d += x * queries[3, j]
        return a + b + c + d

    return loop


@njit(cache=True, nogil=True, fastmath=FAST)
def exponentials(values, repeat):
    """The sum of e**x over values that are not positive."""
    widest_vectors()
    total = np.float32(0.0)
    for _ in range(repeat):
        for i in range(values.shape[0]):
            total += exp_nonpositive(values[i])
    return total


@njit(cache=True, nogil=True)
def compares(codes, asked, repeat):
    """Codes of 16 bits that are equal, counted in 16 bits."""
    widest_vectors()
    total = 0
    for _ in range(repeat):
        same = np.int16(0)
        for i in range(codes.shape[0]):
            same = np.int16(same + np.int16(codes[i] == asked[i]))
        total += same
    return total


@njit(cache=True, nogil=True)
def counts_and_picks(keys, bins, cut, picked, repeat):
    """Keys, uint32, counted by their upper 11 bits, then the places of those that reach `cut`."""
    at = 0
    for _ in range(repeat):
        for i in range(keys.shape[0]):
            bins[keys[i] >> np.uint32(21)] += 1
        at = 0
        for i in range(keys.shape[0]):
            picked[at] = i
            at += keys[i] >= cut
    return at


@njit(cache=True, nogil=True)
def products(left, right, out, repeat):
    """Tiles of a product of float32 matrices: [8, n] times [n, `CHANNELS`]."""
    for _ in range(repeat):
        multiply_tile(
            left.ctypes.data, right.ctypes.data, left.shape[1], out.ctypes.data, CHANNELS * 4, 8
        )
    return out[0, 0]


@njit(cache=True, nogil=True)
def comparisons(points, centroids, offsets, out, repeat):
    """The nearest centroid of `LANES` points [d, `LANES`]."""
    for _ in range(repeat):
        best_of_centroids(
            points.ctypes.data, centroids.ctypes.data, offsets.ctypes.data, centroids.shape[0],
            out.ctypes.data, points.shape[0],
        )  # fmt: skip
    return out[0]


@njit(cache=True, nogil=True, fastmath=FAST)
def scattered(query, vectors, places, first, last):
    """Products of a query with vectors that lie anywhere: row after row of `places`."""
    widest_vectors()
    total = np.float32(0.0)
    for row in range(first, last):
        for i in range(places.shape[1]):
            vector = vectors[row, places[row, i]]
            for j in range(query.shape[0]):
                total += query[j] * widen(vector[j])
    return total


POINTS = LANES
"""Points of a turn of `comparisons`."""

COLUMNS = CHANNELS
"""Columns of a turn of `products`."""
