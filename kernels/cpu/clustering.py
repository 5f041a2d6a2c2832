"""Loops of k-means: the nearest centroid of each point, and sums of clusters."""

from functools import lru_cache

import numpy as np
from numba import njit

from tierstore.kernels.cpu.registers import (
    CENTROIDS,
    LANES,
    add_row,
    best_of_centroids,
    turn_points,
)


@njit(cache=True, nogil=True)
def nearest(points, centroids, offsets, first_row, last_row, out):
    """The best centroid of each point; see `tierstore.kernels.nearest_centroids`."""
    n, dim = points.shape[1:]
    clusters = centroids.shape[1]
    padded = -(-clusters // CENTROIDS) * CENTROIDS
    length = -(-dim // 4) * 4
    last = np.zeros((LANES, length), np.float32)
    turned = np.empty((length, LANES), np.float32)
    own = np.zeros((padded, length), np.float32)
    # What is not there fits nothing.
    plus = np.full(padded, -np.inf, np.float32)
    found = np.empty(LANES, np.int64)
    for row in range(first_row, last_row):
        own[:clusters, :dim] = centroids[row]
        plus[:clusters] = offsets[row]
        for first in range(0, n, LANES):
            count = min(LANES, n - first)
            start = points[row, first:].ctypes.data
            if count < LANES or length > dim:
                last[:count, :dim] = points[row, first : first + count]
                start = last.ctypes.data
            turn_points(start, turned.ctypes.data, length)
            best_of_centroids(
                turned.ctypes.data, own.ctypes.data, plus.ctypes.data, padded, found.ctypes.data,
                length,
            )  # fmt: skip
            out[row, first : first + count] = found[:count]


@lru_cache(maxsize=64)
def sums_kernel(dim):
    """Sums and sizes of clusters; see `tierstore.kernels.cluster_sums`."""

    @njit(cache=True, nogil=True)
    def add_up(points, labels, first_row, last_row, sums, sizes):
        total = np.empty((sums.shape[1], dim), np.float32)
        for row in range(first_row, last_row):
            total[:] = 0
            sizes[row] = 0
            point, into = points[row].ctypes.data, total.ctypes.data
            for i in range(points.shape[1]):
                # Unsigned: else each access tests for a negative index first.
                c = np.uint64(labels[row, i])
                sizes[row, c] += 1
                add_row(point + i * dim * 4, into + np.int64(c) * dim * 4, dim)
            sums[row] = total

    return add_up
