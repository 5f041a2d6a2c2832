"""Loops of k-means over narrow points: the nearest centroid of each, and sums of clusters."""

from functools import lru_cache

import numpy as np
from numba import njit

from tierstore.kernels.cpu.registers import LANES, best_of_centroids


@lru_cache(maxsize=64)
def nearest_kernel(dim):
    """The best centroid of each point; see `tierstore.kernels.nearest_centroids`."""

    @njit(cache=True, nogil=True)
    def nearest(points, centroids, offsets, first_row, last_row, out):
        n, clusters = points.shape[1], centroids.shape[1]
        turned = np.zeros((dim, LANES), np.float32)
        own = np.empty((clusters, dim), np.float32)
        plus = np.empty(clusters, np.float32)
        found = np.empty(LANES, np.int32)
        for row in range(first_row, last_row):
            own[:] = centroids[row]
            plus[:] = offsets[row]
            for first in range(0, n, LANES):
                count = min(LANES, n - first)
                for lane in range(count):
                    for j in range(dim):
                        turned[j, lane] = points[row, first + lane, j]
                best_of_centroids(
                    turned.ctypes.data, own.ctypes.data, plus.ctypes.data, clusters,
                    found.ctypes.data, dim,
                )  # fmt: skip
                for lane in range(count):
                    out[row, first + lane] = found[lane]

    return nearest


@lru_cache(maxsize=64)
def sums_kernel(dim):
    """Sums and sizes of clusters; see `tierstore.kernels.cluster_sums`."""

    @njit(cache=True, nogil=True)
    def add_up(points, labels, first_row, last_row, sums, sizes):
        for row in range(first_row, last_row):
            sums[row] = 0
            sizes[row] = 0
            for i in range(points.shape[1]):
                # Unsigned: else each access tests for a negative index first.
                c = np.uint64(labels[row, i])
                sizes[row, c] += 1
                for j in range(dim):
                    sums[row, c, j] += points[row, i, j]

    return add_up
